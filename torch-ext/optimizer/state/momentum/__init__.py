"""Momentum in the form and the dtype of the optimizer that loads it."""
