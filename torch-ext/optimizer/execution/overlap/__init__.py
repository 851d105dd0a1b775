"""Optional overlap of a step with backward and forward; imported by muon.py only."""
