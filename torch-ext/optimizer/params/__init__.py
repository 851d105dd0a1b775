"""User input of the optimizer: parameter groups, options, sharding layouts, and their checks."""
