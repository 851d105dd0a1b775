"""Metrics of a step: sums that updates make as they go, and their values for logs."""
