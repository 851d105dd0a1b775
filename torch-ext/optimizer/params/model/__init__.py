"""The model of the user: which parameters are hidden matrices, and which weights are fused."""
