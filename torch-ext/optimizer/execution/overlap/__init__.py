"""Optional overlap of the step with backward and forward. Only muon.py imports it."""
