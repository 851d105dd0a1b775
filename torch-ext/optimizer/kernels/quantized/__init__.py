"""Momentum in 8 bits: the format, and the kernels that read and write it."""
