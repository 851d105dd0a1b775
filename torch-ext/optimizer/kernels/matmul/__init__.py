"""Matrix products of the Newton-Schulz iteration."""
