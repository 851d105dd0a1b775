"""Optimizer state outside of a step: creation, state dicts, files, conversion."""
