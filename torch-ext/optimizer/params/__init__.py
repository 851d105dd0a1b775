"""What the user hands in: parameter groups, options, layouts, and their checks."""
