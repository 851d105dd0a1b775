"""Elementwise and row-wise kernels: momentum, weight update, scaling, copies."""
