"""Update rules: the computation of a step, without ranks."""

# Each registers its rule under a name
from . import muon as _muon  # noqa: F401
from . import normuon as _normuon  # noqa: F401
