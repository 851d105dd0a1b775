"""State of whole matrices, kept by the owners of the matrices."""
