"""One training run from its start to its saved record: `training` begins it, `run` holds its objects while it lasts."""
