"""Optional offload of state to host memory: transfers around the launches of a step."""
