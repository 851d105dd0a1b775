"""Bytes of an optimizer by kind: predicted from plans, or measured."""
