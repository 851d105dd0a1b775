"""Which rows of matrices are read for metrics."""
