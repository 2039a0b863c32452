"""What a saved optimizer state says: whose it is, which optimizer wrote it, and why some of it is quantised."""
