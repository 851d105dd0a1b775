"""Triton kernels and their launchers; the only folder that knows Triton."""
