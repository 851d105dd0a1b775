"""Coefficient sets: what a name means, where the Gram iteration restarts, and which steps it takes two at a time.

Decides: the polynomials of an iteration. Must not know: how they are applied.
"""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .debug import shortened
from .pairs import PAIRS, Pair

Triple = tuple[float, float, float]
F16, ALL = torch.float16, 100  # no iteration has more steps
LARGEST = torch.finfo(torch.float32).max  # number, in whose arithmetic all is done
KEPT = 256  # answers about sets of coefficients; schedules may bring new ones at every step
REPEATED_LAST = (1.875, -1.25, 0.375)
LONGEST_SEGMENT = {torch.float32: 3, torch.float16: 3, torch.bfloat16: 2}  # steps of the Gram iteration per restart
STEADY, SMALL = ("polar_express", "jordan"), 256  # sets that begin with three steps at once in fp16, but below such n
LONGEST_CUBIC = {torch.float32: 5, torch.float16: 5, torch.bfloat16: 2}  # the same where every c is 0: they grow slowly


def _safe(triple: Triple, s: float) -> Triple:
    """Return the triple of p(x / s): singular values that rounding pushes above 1 stay where p is bounded."""
    a, b, c = triple
    return a / s, b / s**3, c / s**5


def _divided(triples: tuple[Triple, ...], divisor: float) -> tuple[Triple, ...]:
    """Return the iteration that takes U / ||U|| to where `triples` take U / (divisor ||U||)."""
    return _safe(triples[0], divisor), *triples[1:]


# Polar Express (arXiv 2505.16932) computed for 5 steps with a safety factor of 1.02 in each triple.
NANOCHAT: tuple[Triple, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))

SETS: dict[str, tuple[Triple, ...]] = {
    # Keller Jordan's post on Muon; torch.optim.Muon's default
    "jordan": ((3.4445, -4.7750, 2.0315),),
    # YOU: modded-nanogpt's medium track, Emerging-Optimizers' default
    "quintic": ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)),
    # arXiv 2505.16932, with a safety factor of 1.05: less error in fp16 than with 1.02 (docs/math.md)
    "polar_express": tuple(_safe(t, 1.05) for t in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835))),
    # The three peers share their triples and divide U by other numbers before the first step.
    "polar_express_nanochat": _divided(NANOCHAT, 1.01),
    "polar_express_dion": _divided(NANOCHAT, 1.02),
    "polar_express_modded_nanogpt": _divided(NANOCHAT, 1.02),
    # arXiv 2506.10935; unscaled, the composition reaches 1e36 at 1.002
    "cans": tuple(_safe(t, 1.02) for t in (
        (8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074), (2.2737, -1.6447, 0.4162))),
    # arXiv 2512.04632, only after AOL scaling
    "turbo": ((4.6051, -9.6552, 5.6769), (4.7505, -6.0861, 2.1790), (2.7763, -2.3190, 0.5523),
              (2.4231, -2.2861, 0.8193)),
    # Emerging-Optimizers, only after AOL scaling, which promises singular values up to 1; the composition turns
    # negative from 0.884 on, so its argument is divided by 1.2 here
    "aol": (_safe((4.0098, -7.0585, 2.4635), 1.2), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169)),
    # arXiv 2606.00371, lower bound 7e-3; unscaled, the composition is negative from 1.004 on
    "cubic": tuple(_safe(t, 1.02) for t in (
        (3.3656576, -3.3420992, 0.0), (2.5744352, -1.4957376, 0.0), (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0), (2.2230472, -0.9630650, 0.0))),
    # DeepSeek-V4's report
    "deepseek_v4": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
}
ANY_LENGTH = ("jordan", "polar_express")
NEEDS_AOL = ("turbo", "aol")


@dataclass(frozen=True)
class Steps:
    """An iteration: each step is X <- (a I + b A + c A^2) X with A = X X^T; `aol` scales the rows before the first."""

    triples: tuple[Triple, ...]
    aol: bool = False

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self):  # at each call, for what is known of calls
        return hash((self.triples, self.aol))

    def segments(self, dtype: torch.dtype = F16, most: int = ALL, n: int = SMALL) -> tuple:
        """Return the steps between restarts, tuples of triples, for matrices with a short side of `n`: at most `most`
        and what `dtype` allows in each, few segments, the longer first: five steps are cut 3 + 2.

        In fp16 three steps at once may leave the range of the next ones, for the first steps grow the most, and
        rounding with them, the more the smaller n is. So from SMALL on only STEADY sets begin with three, others are
        cut 2 + 3. Smaller matrices take two at most, the longer last, for the first two steps are no `Pair`: 1 + 2 + 2.
        """
        length, total, half = min(most, self._longest(dtype, n)), len(self.triples), dtype == F16
        careful = half and length == 3 and not self.cubic and not _is_steady(self.triples)
        count = math.ceil((total + careful) / length)  # careful: as if the first segment had one step more
        rounded = math.floor if careful or half and length == 2 else math.ceil
        ends = [rounded(total * i / count) for i in range(count + 1)]
        return tuple(self.triples[first:last] for first, last in zip(ends, ends[1:]))

    def _longest(self, dtype, n):
        """Steps between restarts, at most."""
        if self.cubic:
            return LONGEST_CUBIC[dtype]
        return 2 if dtype == F16 and n < SMALL else LONGEST_SEGMENT[dtype]

    def pairs(self, dtype: torch.dtype = F16, most: int = ALL, n: int = SMALL) -> tuple[Pair | None, ...]:
        """Return for each segment the `Pair` that its last two steps are taken as, or None: in other dtypes than fp16,
        which are more exact than pairs, or less than these need.
        """
        lengths = [len(segment) for segment in self.segments(dtype, most, n)]
        return tuple(_pair(self.triples[:end], self.aol) if length > 1 and dtype == F16 else None
                     for length, end in zip(lengths, itertools.accumulate(lengths)))

    @property
    def cubic(self) -> bool:
        """Whether no step has a square of A."""
        return not any(c for _, _, c in self.triples)


def steps_of(ns_coefficients: str | Sequence, ns_steps: int = 5) -> Steps:
    """Return the iteration for a set's name, a triple (a, b, c) to be repeated, or a sequence of ns_steps triples.

    A named set of fixed length takes that length or 5, the default, for ns_steps.
    """
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 1 <= ns_steps < 100:
        raise ValueError(f"ns_steps is {shortened(repr(ns_steps))}; pass a whole number from 1 to 99")
    if not isinstance(ns_coefficients, str):
        return Steps(_checked(ns_coefficients, ns_steps))
    named = _named.__wrapped__ if torch.compiler.is_compiling() else _named  # dynamo warns of a cache
    return named(ns_coefficients, ns_steps)


def _checked(ns_coefficients, ns_steps) -> tuple:
    """So many triples of floats; looked at each time, since a cache takes True and 1.0 for the same."""
    numbers = _as_tuples(ns_coefficients)
    single = len(numbers) == 3 and not any(isinstance(x, tuple) for x in numbers)
    triples = (numbers,) * ns_steps if single else numbers
    for triple in triples:
        _check_triple(triple)
    if len(triples) != ns_steps:
        raise ValueError(f"ns_coefficients holds {len(triples)} triples and ns_steps is {ns_steps}; "
                         f"pass ns_steps={len(triples)}, or {ns_steps} triples")
    return tuple(tuple(map(float, triple)) for triple in triples)


def _as_tuples(numbers):
    """Text and bytes are no sequences of numbers here, and a set has no order."""
    if not _is_sequence(numbers):
        raise ValueError(f"ns_coefficients is {shortened(repr(numbers))}; pass a name, a triple, or a "
                         "sequence of triples")
    return tuple(tuple(x) if _is_sequence(x) else x for x in numbers)


def _is_sequence(x):
    return isinstance(x, Sequence) and not isinstance(x, (str, bytes, bytearray))


def _check_triple(triple):
    if not (isinstance(triple, tuple) and len(triple) == 3 and all(map(is_number, triple))):
        raise ValueError(f"ns_coefficients holds {shortened(repr(triple))}; a triple is three finite "
                         "numbers (a, b, c) that fp32 holds")


def is_number(x):
    """Whether x is a finite number that fp32 holds; True is none."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= LARGEST


@functools.lru_cache(maxsize=KEPT)
def _named(name, ns_steps):
    if name not in SETS:
        raise ValueError(f"ns_coefficients is {shortened(repr(name))}; the sets are {', '.join(SETS)}; or "
                         "pass a triple or triples")
    length = len(SETS[name])
    if name not in ANY_LENGTH and ns_steps not in (5, length):
        raise ValueError(f"ns_steps is {ns_steps}, but the set {name!r} has {length} steps; "
                         f"pass ns_steps={length}, or leave it at 5, the default")
    return Steps(_beginning(name, ns_steps if name in ANY_LENGTH else length), name in NEEDS_AOL)


def _beginning(name, count):
    """The first steps of a set, at most `count`."""
    triples = SETS[name]
    if name in ANY_LENGTH:
        triples += (REPEATED_LAST if name == "polar_express" else triples[-1],) * count
    return triples[:count]


@functools.lru_cache(maxsize=KEPT)
def _is_steady(triples):
    return any(triples == _beginning(name, len(triples)) for name in STEADY)


@functools.lru_cache(maxsize=KEPT)
def _pair(triples, aol):
    """The pair of the last two of these steps, where a set begins with all of them: only then A is in its range."""
    first = len(triples) - 2
    for name, known in PAIRS.items():
        pair = known.get(min(first, len(SETS[name])))  # from there on all steps are alike
        if pair and aol == (name in NEEDS_AOL) and triples == _beginning(name, len(triples)):
            return pair
    return None
