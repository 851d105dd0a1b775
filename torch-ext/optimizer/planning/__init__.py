"""Plans: owners, buckets, memory. Pure Python, equal on every rank; touches no tensor."""
