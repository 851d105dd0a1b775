"""Kernels that measure a step for logs: sums over parts of tensors that no other kernel sums."""
