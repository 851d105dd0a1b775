"""fp32 weights in two 16-bit tensors, in state dicts and as whole numbers."""
