"""Checks of parameters, each a subject of its own."""
