"""The model of the user: which parameters are hidden matrices, and where it holds fused weights."""
