"""How kernels are compiled, configured, launched and replayed."""
