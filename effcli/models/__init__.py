"""Models: `source` finds one by name, `build` makes it."""
