"""Execution of a step: preparation, bucket updates, step inputs, CUDA graphs, report."""
