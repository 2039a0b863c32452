"""What each of several processes holds of a model and its optimizer, by how the run is sharded. No torch."""
