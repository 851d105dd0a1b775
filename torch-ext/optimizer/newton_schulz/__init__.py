"""Orthogonalization of stacks of matrices. Knows no ranks."""
