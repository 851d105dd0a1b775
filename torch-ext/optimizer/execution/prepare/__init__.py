"""Preparation of a step: which parameters, in which buckets, bound to which memory."""
