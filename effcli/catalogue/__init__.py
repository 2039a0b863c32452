"""Models that are known without a network: facts, generated shapes, and the look-up."""
