"""Entries for training frameworks; they use public names of the package only."""
