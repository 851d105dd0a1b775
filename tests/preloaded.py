"""Imported once, in the process that forks the ranks (tests/ranks.py), and so with the package under test."""

from __future__ import annotations

import os

from tests.ranks import package

if "LOCAL_KERNELS" in os.environ:
    package()
