"""Rules of groups with use_muon=False, by name."""
