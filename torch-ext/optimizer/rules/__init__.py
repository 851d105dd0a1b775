"""Update rules: the computation of a step, without ranks."""

# Each registers its rule under a name
from __future__ import annotations

from . import normuon as _normuon  # noqa: F401
from .elements import adamw as _adamw  # noqa: F401
from .elements import lion as _lion  # noqa: F401
from .elements import sgd as _sgd  # noqa: F401
from .elements import sign as _sign  # noqa: F401
from .named import adamuon as _adamuon  # noqa: F401
from .named import dion as _dion  # noqa: F401
from .named import hyperball as _hyperball  # noqa: F401
from .named import muon_plus as _muon_plus  # noqa: F401
from .named import normuon_aspect as _normuon_aspect  # noqa: F401
from .named import scion as _scion  # noqa: F401
