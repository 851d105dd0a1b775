"""State dicts of other Muons: recognized, and converted to those of this package."""
