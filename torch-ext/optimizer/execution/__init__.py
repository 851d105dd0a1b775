"""One step on this rank."""
