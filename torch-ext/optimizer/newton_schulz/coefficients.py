"""Coefficients of the Newton-Schulz iteration: named sets, restart intervals, fused pairs of steps.

A step (a, b, c) is X <- (a I + b A + c A^2) X with A = X X^T; it maps each singular value x of X to
p(x) = a x + b x^3 + c x^5. `steps_of` turns the options of a group into `Steps`, the sequence of
triples. `Steps.intervals` cuts the sequence into restart intervals for the Gram iteration
(iteration.py). `Pair` holds two steps as one polynomial.

An interval is the tuple of triples of one restart interval.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..params.errors import shortened


class Pair(NamedTuple):
    """The last two steps of a restart interval as one polynomial of degree 12 in A, in four n x n
    products instead of five (docs/math.md, "Two steps at a time").

    With P1 = a I + b A + c A^2 of the first and P2 of the second step, Q = P2(P1 A P1) P1 is
    approximated by

        S = S[0] A A + S[1] A
        C = C[0] A S + C[1] A + C[2] S
        H = H[0] C C + H[1] A + H[2] S + H[3] C + H[4] I
        Q = H H + Q[0] S + Q[1] C + Q[2] I

    tools/fit_pairs.py fits the thirteen numbers to the range of A before the two steps.
    """

    S: tuple[float, float]
    C: tuple[float, float, float]
    H: tuple[float, float, float, float, float]
    Q: tuple[float, float, float]


JORDAN = Pair(
    (0.598923969, -1.54780642),
    (1.33875617, 1.67397696, -0.465356319),
    (13.0330836, -2.83023773, -4.09826998, -15.5234775, 3.04269224),
    (-2.00700166, -4.11949379, 2.6062715),
)

# The fourth and fifth step of nanochat's triples; error 3.7e-4. The three sets with these triples
# divide the norm by different numbers, which does not change the range of A before the fourth step.
# The second and third step have no pair: the error would be 1.4e-3.
NANOCHAT_PAIR = Pair(
    (0.165460584, -0.813536952),
    (0.565342165, 0.542160403, -0.822663684),
    (10.8447924, -0.737644894, -2.74387177, -12.4578859, 2.35967698),
    (0.720822965, -1.14333639, 2.14073821),
)

# Set -> index of the first of two steps, from 0 -> pair. A comment in each pair states the largest
# relative error of Q (tests/test_coefficients.py). No pair begins with step 0, whose A is so small
# that fp16 rounds away most of A^2.
PAIRS: dict[str, dict[int, Pair]] = {
    "polar_express": {
        1: Pair(
            (0.106289081, -0.652044041),
            (0.704174304, 0.669932001, -0.924596087),  # 6.3e-4
            (13.9816065, -1.12013961, -5.30125738, -18.4358236, 3.7678923),
            (-0.581943756, -0.817612252, 0.50921521),
        ),
        2: Pair(
            (0.131492116, -0.72524119),
            (0.615164641, 0.529175985, -1.07127331),  # 4.9e-4
            (11.8734149, -0.774332966, -3.83324826, -15.6538119, 3.28746025),
            (0.233990008, -0.612255583, 1.07558059),
        ),
        3: Pair(
            (0.151031312, -0.777256353),
            (0.575097711, 0.553056223, -0.899099409),  # 1.5e-4
            (7.65761481, -0.668713475, -2.32535226, -9.65414489, 2.21446522),
            (0.743211776, -0.905487909, 2.02043602),
        ),
        4: Pair(
            (0.318631063, -1.12894899),
            (0.316366038, 0.460110784, -0.607342881),  # 8e-7
            (3.31182606, -0.459152568, -0.508858199, -3.94303707, 1.43186248),
            (0.314369032, -1.00924709, 1.89645862),
        ),
        5: Pair(
            (0.334602767, -1.20414845),
            (0.439329264, 0.769224713, -0.571051299),  # 5e-8
            (1.25422984, -0.306790706, -0.0982375506, -2.02066567, 1.30318614),
            (0.216980289, -0.640812315, 1.67902976),
        ),
        6: Pair(
            (2.34269679, -3.06117448),
            (0.0869952457, 0.704170778, -0.498441915),  # 4e-7
            (0.575126067, -0.383307985, 0.168134522, -1.1676031, 1.2914393),
            (-0.299549291, -1.10123352, 1.84780873),
        ),
    },
    "polar_express_nanochat": {3: NANOCHAT_PAIR},
    "polar_express_dion": {3: NANOCHAT_PAIR},
    "polar_express_modded_nanogpt": {3: NANOCHAT_PAIR},
    "cans": {
        # 3.0e-4. No pair from step 1: it would spoil singular values near 1
        3: Pair(
            (0.169788468, -0.824110649),
            (0.551946851, 0.534807042, -0.807212223),
            (9.92550141, -0.715036496, -2.44801327, -11.3101407, 2.24170512),
            (0.749754428, -1.11913383, 2.15634575),
        )
    },
    "quintic": {
        1: Pair(
            (0.600104068, -1.54933671),
            (1.74670221, 1.80974949, -0.704495919),  # 7.4e-4
            (15.5575845, -3.21170031, -5.71384057, -19.1802996, 3.64269353),
            (-0.259217657, -1.41679544, 1.50878582),
        ),
        3: Pair(
            (0.385351343, -1.24155132),
            (1.07409078, 1.58737128, -0.177571671),  # 2.2e-4
            (9.01992925, -1.78121584, -1.23572571, -9.12882367, 2.29180252),
            (-0.74576963, -3.1157132, 2.90725846),
        ),
    },
    "turbo": {
        2: Pair(
            (0.256801533, -1.01351559),
            (0.547901863, 0.555284569, -0.714323151),  # 1.9e-4
            (10.2467693, -0.774373462, -2.01063105, -10.7805421, 2.0720353),
            (0.736525707, -1.43260339, 2.43325022),
        )
    },
    "aol": {
        2: Pair(
            (0.557424806, -1.49444395),
            (1.13187795, 1.62751319, -0.362515035),  # 3.9e-5
            (6.38286477, -1.26399791, -0.599217684, -7.16145862, 2.1367241),
            (-0.264983989, -2.44158719, 2.93823562),
        )
    },
    "jordan": {1: JORDAN},  # 5.7e-5
    "deepseek_v4": {
        **dict.fromkeys(range(1, 7), JORDAN),
        8: Pair(
            (2.34214936, -3.06082623),
            (0.143541039, 0.737925932, -0.369215227),  # 1.2e-6
            (1.16944596, 1.04140385, 0.174542147, -2.57459275, 1.58228958),
            (-1.45702836, -3.12916125, 1.49636263),
        ),
    },
    "anvil": {
        1: Pair(
            (0.378718446, -1.23080323),
            (1.04564936, 1.09095693, -0.918096992),  # 2.9e-5
            (8.06455777, -1.79835808, -3.54821361, -11.7440371, 3.12980388),
            (-2.64100231, -2.72745543, 1.00473612),
        ),
        2: Pair(
            (1.49212137, -2.44305512),
            (0.598567499, 0.621580695, -0.980988579),  # 2.7e-5
            (7.94786345, -0.146315406, -1.34200839, -11.4675787, 3.16915439),
            (0.137442911, -0.932841891, 1.61540094),
        ),
        4: Pair(
            (1.75782269, -2.65167168),
            (0.227326646, 0.677634511, -0.397087711),  # 4.9e-7
            (5.46707796, -0.520654731, -0.291387681, -6.28514488, 1.88033601),
            (0.0842676763, -1.83521565, 2.57099388),
        ),
    },
}

Triple = tuple[float, float, float]
F16 = torch.float16
NO_RESTART = 100  # as a restart interval: more steps than an iteration may have
FP32_MAX = torch.finfo(torch.float32).max  # coefficients and eps are used in fp32
MAX_CACHED_SETS = 256  # a bound, since schedules may bring new coefficients at every step
# polar_express from the seventh step on: the classical Newton-Schulz step of degree 5, for singular
# values near 1
REPEATED_LAST = (1.875, -1.25, 0.375)
# Most steps between restarts, by dtype of products: rounding makes A indefinite later
MAX_INTERVAL = {torch.float32: 3, torch.float16: 3, torch.bfloat16: 2}
# Cubic steps (c = 0) let small singular values grow slowly, and rounding errors with them
MAX_INTERVAL_CUBIC = {torch.float32: 5, torch.float16: 5, torch.bfloat16: 2}
# In fp32, for iterations of more than five cubic steps
REPEATED_CUBIC = 4
# Sets that grow slowly beyond their range: in fp16, for short sides from SMALL_SHORT_SIDE on, the
# first interval of up to five steps may have three
STEADY_SETS = ("jordan",)
SMALL_SHORT_SIDE = 256
# Iterations of more steps are cut into intervals of two steps in fp16: a singular value that leaves
# the range of the polynomials grows in each further step, up to Inf (docs/math.md, "Cuts of more
# than five steps")
MAX_STEPS_CUT_LONG = 5
# In fp16, such iterations of polar_express have intervals of up to MAX_LATE_INTERVAL steps from
# this step on, counted from 0: a is smaller there
FIRST_LATE_STEP = 4
MAX_LATE_INTERVAL = 5


def _with_safety(triple: Triple, s: float) -> Triple:
    """Return the triple of p(x / s): singular values that rounding pushes above 1 stay where p is
    bounded.
    """
    a, b, c = triple
    return a / s, b / s**3, c / s**5


def _with_divisor(triples: tuple[Triple, ...], divisor: float) -> tuple[Triple, ...]:
    """Return triples that give for U / ||U|| the results of `triples` for U / (divisor ||U||)."""
    return _with_safety(triples[0], divisor), *triples[1:]


# Polar Express (arXiv 2505.16932) computed for 5 steps with a safety factor of 1.02 in each triple.
NANOCHAT: tuple[Triple, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# arXiv 2505.16932, with a safety factor of 1.05: less error in fp16 than with 1.02 (docs/math.md)
POLAR_EXPRESS: tuple[Triple, ...] = tuple(
    _with_safety(t, 1.05)
    for t in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    )
)

SETS: dict[str, tuple[Triple, ...]] = {
    # Keller Jordan's post on Muon; torch.optim.Muon's default
    "jordan": ((3.4445, -4.7750, 2.0315),),
    # YOU: modded-nanogpt's medium track, Emerging-Optimizers' default
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": POLAR_EXPRESS,
    # nanochat, Dion and modded-nanogpt share the triples above and divide U by 1.01 or 1.02 ||U||
    "polar_express_nanochat": _with_divisor(NANOCHAT, 1.01),
    "polar_express_dion": _with_divisor(NANOCHAT, 1.02),
    "polar_express_modded_nanogpt": _with_divisor(NANOCHAT, 1.02),
    # arXiv 2506.10935; unscaled, the composition reaches 1e36 at 1.002
    "cans": tuple(
        _with_safety(t, 1.02)
        for t in (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        )
    ),
    # arXiv 2512.04632, only after AOL scaling
    "turbo": (
        (4.6051, -9.6552, 5.6769),
        (4.7505, -6.0861, 2.1790),
        (2.7763, -2.3190, 0.5523),
        (2.4231, -2.2861, 0.8193),
    ),
    # Emerging-Optimizers, only after AOL scaling. AOL permits singular values up to 1, but the
    # composition of these steps is negative from 0.884 on: the argument is divided by 1.2
    "aol": (
        _with_safety((4.0098, -7.0585, 2.4635), 1.2),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    # arXiv 2606.00371, lower bound 7e-3; unscaled, the composition is negative from 1.004 on
    "cubic": tuple(
        _with_safety(t, 1.02)
        for t in (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        )
    ),
    # DeepSeek-V4's report
    "deepseek_v4": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
    # Qwen3.8 runs eight steps of Polar Express: `polar_express` with ns_steps=8
    "qwen3_8": POLAR_EXPRESS + (REPEATED_LAST,) * 2,
    # modded-nanogpt's pull request 349, which divides U by 1.02 ||U||
    "anvil": _with_divisor(
        (
            (4.447393659248992, -8.6592834371539, 4.484453950130224),
            (3.0003381342927278, -3.180035633097396, 0.959298544318381),
            (3.5997737315685896, -5.129961939372116, 1.94624091228252),
            (3.238755176943844, -3.988313284248892, 1.4073635628857994),
            (2.558664852492382, -2.5626431459988033, 0.9815933969681315),
            (2.38665846260798, -2.223181615281231, 0.835162681686761),
        ),
        1.02,
    ),
}
# Sets that are defined for any number of steps, and sets of singular values after AOL scaling
ANY_LENGTH = ("jordan", "polar_express")
NEEDS_AOL = ("turbo", "aol")


@dataclass(frozen=True)
class Steps:
    """A Newton-Schulz iteration: the triples (a, b, c) of its steps, and whether AOL (arXiv
    2208.03160) scales the rows of X before the first step, in place of the Frobenius norm.
    """

    triples: tuple[Triple, ...]
    aol: bool = False

    def __hash__(self) -> int:
        return self._hash

    # Computed once: `Steps` is part of every key under which calls are known
    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.triples, self.aol))

    def intervals(
        self, dtype: torch.dtype = F16, max_steps: int = NO_RESTART, n: int = SMALL_SHORT_SIDE
    ) -> tuple[tuple[Triple, ...], ...]:
        """Cut the steps into restart intervals: as few as possible, about equal, each of at most
        `max_steps` steps and of at most as many as the dtype of products and the short side n
        allow.

        Five steps are cut, with `max_steps` >= 3:

        - fp32: 3 + 2. bf16: 2 + 2 + 1.
        - fp16, n >= SMALL_SHORT_SIDE: 2 + 3. The first steps grow X and rounding errors the most;
          after three, singular values may lie beyond the range of the next polynomials, where most
          sets grow fast. For STEADY_SETS 3 + 2, which is more exact (docs/math.md).
        - fp16, smaller n: 1 + 2 + 2, as for every n with `max_steps` = 2. Errors weigh more the
          smaller n is. The longer intervals come last, because the first two steps have no `Pair`.

        More than five steps are cut into intervals of at most two in fp16. With n >=
        SMALL_SHORT_SIDE, the steps of `polar_express` after the fourth are cut into intervals of
        at most MAX_LATE_INTERVAL: 2 + 2 + 4 for eight steps. Late steps multiply rounding errors by
        less.
        """
        length = min(max_steps, self._max_interval(dtype, n))
        half = dtype == F16
        total = len(self.triples)
        # Large matrices in fp16, up to five steps. Careful: cut as if the first interval had one
        # step more
        careful = half and length == 3 and not self.cubic and not self.steady
        # Rounding down gives the first intervals fewer steps, rounding up the last ones
        rounded = math.floor if careful or half and length == 2 else math.ceil
        large = half and n >= SMALL_SHORT_SIDE and max_steps > 2
        if large and _has_late_steps(self.triples):
            late = total - FIRST_LATE_STEP
            ends = _ends(FIRST_LATE_STEP, FIRST_LATE_STEP // 2, rounded)[:-1]
            count = math.ceil(late / min(max_steps, MAX_LATE_INTERVAL))
            ends += [FIRST_LATE_STEP + end for end in _ends(late, count, rounded)]
        else:
            ends = _ends(total, math.ceil((total + careful) / length), rounded)
        return tuple(self.triples[first:last] for first, last in zip(ends, ends[1:]))

    def _max_interval(self, dtype: torch.dtype, n: int) -> int:
        """Return the most steps between restarts that dtype and short side allow."""
        if self.cubic:
            longest = MAX_INTERVAL_CUBIC[dtype]
            # Ten steps cut 5 + 5 have three times the error of the standard iteration in fp32, cut
            # 4 + 3 + 3 they have 1.3 times. Five steps in all stay together: their error is small,
            # and a restart costs time.
            restarts = dtype == torch.float32 and len(self.triples) > longest
            return REPEATED_CUBIC if restarts else longest
        short = n < SMALL_SHORT_SIDE or len(self.triples) > MAX_STEPS_CUT_LONG
        return 2 if dtype == F16 and short else MAX_INTERVAL[dtype]

    def pairs(
        self, dtype: torch.dtype = F16, max_steps: int = NO_RESTART, n: int = SMALL_SHORT_SIDE
    ) -> tuple[Pair | None, ...]:
        """Return for each interval the `Pair` that replaces the last two steps, or None.

        Pairs exist in fp16 only: an error of up to 7e-4 is below the rounding of fp16, but above
        that of fp32; bf16 is too coarse for the products of a pair.
        """
        lengths = [len(interval) for interval in self.intervals(dtype, max_steps, n)]
        return tuple(
            _pair(self.triples[:end], self.aol) if length > 1 and dtype == F16 else None
            for length, end in zip(lengths, itertools.accumulate(lengths))
        )

    def intervals_with_pairs(
        self, dtype: torch.dtype, max_steps: int, n: int
    ) -> list[tuple[tuple[Triple, ...], Pair | None]]:
        """Return [(triples, `Pair` of the last two or None)], an entry per restart interval."""
        return [*zip(self.intervals(dtype, max_steps, n), self.pairs(dtype, max_steps, n))]

    @property
    def steady(self) -> bool:
        """Whether the first interval may have three steps in fp16, see STEADY_SETS."""
        return _is_steady(self.triples)

    @property
    def cubic(self) -> bool:
        """Whether c = 0 in every step: no step needs A^2."""
        return not any(c for _, _, c in self.triples)


def steps_of(ns_coefficients: str | Sequence, ns_steps: int = 5) -> Steps:
    """Return the iteration for the name of a set, a triple (a, b, c) for every step, or a sequence
    of ns_steps triples.

    A named set of fixed length takes ns_steps equal to the length, or 5, the default. Raises
    ValueError for an unknown name, a wrong number of triples, and numbers that fp32 does not hold.
    """
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 1 <= ns_steps < 100:
        raise ValueError(
            f"ns_steps is {shortened(repr(ns_steps))}; pass a whole number from 1 to 99"
        )
    if not isinstance(ns_coefficients, str):
        return Steps(_checked(ns_coefficients, ns_steps))
    # Dynamo warns of a cache
    named = _named.__wrapped__ if torch.compiler.is_compiling() else _named
    return named(ns_coefficients, ns_steps)


def _checked(ns_coefficients: object, ns_steps: int) -> tuple[Triple, ...]:
    """Return ns_steps triples of floats, or raise ValueError.

    Not cached: True == 1.0 as a key, and a cache would return a valid result for True.
    """
    numbers = _as_tuples(ns_coefficients)
    single = len(numbers) == 3 and not any(isinstance(x, tuple) for x in numbers)
    triples = (numbers,) * ns_steps if single else numbers
    for triple in triples:
        _check_triple(triple)
    if len(triples) != ns_steps:
        raise ValueError(
            f"ns_coefficients holds {len(triples)} triples and ns_steps is {ns_steps}; "
            f"pass ns_steps={len(triples)}, or {ns_steps} triples"
        )
    return tuple(tuple(map(float, triple)) for triple in triples)


def _as_tuples(numbers: object) -> tuple:
    """Return a sequence, of numbers or of sequences, as tuples; raise ValueError for anything else,
    such as a set, which has no order.
    """
    if not _is_sequence(numbers):
        raise ValueError(
            f"ns_coefficients is {shortened(repr(numbers))}; pass a name, a triple, or a "
            "sequence of triples"
        )
    return tuple(tuple(x) if _is_sequence(x) else x for x in numbers)


def _is_sequence(x: object) -> bool:
    """Whether x may hold numbers; text and bytes may not."""
    return isinstance(x, Sequence) and not isinstance(x, (str, bytes, bytearray))


def _check_triple(triple: object) -> None:
    """Raise ValueError unless `triple` is a tuple of three numbers."""
    if not (isinstance(triple, tuple) and len(triple) == 3 and all(map(is_number, triple))):
        raise ValueError(
            f"ns_coefficients holds {shortened(repr(triple))}; a triple is three finite "
            "numbers (a, b, c) that fp32 holds"
        )


def is_number(x: object) -> bool:
    """Whether x is a finite int or float in the range of fp32. A bool is no number."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= FP32_MAX


@functools.lru_cache(maxsize=MAX_CACHED_SETS)
def _named(name: str, ns_steps: int) -> Steps:
    """Return the iteration of a named set; raise ValueError for a wrong name or length."""
    if name not in SETS:
        raise ValueError(
            f"ns_coefficients is {shortened(repr(name))}; the sets are {', '.join(SETS)}; or "
            "pass a triple or triples"
        )
    length = len(SETS[name])
    if name not in ANY_LENGTH and ns_steps not in (5, length):
        raise ValueError(
            f"ns_steps is {ns_steps}, but the set {name!r} has {length} steps; "
            f"pass ns_steps={length}, or leave it at 5, the default"
        )
    return Steps(_beginning(name, ns_steps if name in ANY_LENGTH else length), name in NEEDS_AOL)


def _beginning(name: str, count: int) -> tuple[Triple, ...]:
    """Return the first `count` steps of a set, fewer if a set of fixed length has fewer."""
    triples = SETS[name]
    if name in ANY_LENGTH:
        triples += (REPEATED_LAST if name == "polar_express" else triples[-1],) * count
    return triples[:count]


@functools.lru_cache(maxsize=MAX_CACHED_SETS)
def _is_steady(triples: tuple[Triple, ...]) -> bool:
    """Whether the triples are the beginning of one of STEADY_SETS."""
    return any(triples == _beginning(name, len(triples)) for name in STEADY_SETS)


def _has_late_steps(triples: tuple[Triple, ...]) -> bool:
    """Whether the triples are more than five steps of `polar_express`: late intervals are long."""
    count = len(triples)
    return count > MAX_STEPS_CUT_LONG and triples == _beginning("polar_express", count)


def _ends(total: int, count: int, rounded: Callable[[float], int]) -> list[int]:
    """Return [0, ..., total]: where `count` intervals of about equal length begin and end."""
    return [rounded(total * i / count) for i in range(count + 1)]


@functools.lru_cache(maxsize=MAX_CACHED_SETS)
def _pair(triples: tuple[Triple, ...], aol: bool) -> Pair | None:
    """Return the pair of the last two triples, or None.

    `triples`: all steps from the first one of the iteration on. A pair is valid only after the
    steps of its set from the beginning, which bring A into the range of the fit.
    """
    first = len(triples) - 2
    for name, known in PAIRS.items():
        # Beyond its own triples a set repeats the last one, so any two steps there have one pair
        pair = known.get(min(first, len(SETS[name])))
        if pair and aol == (name in NEEDS_AOL) and triples == _beginning(name, len(triples)):
            return pair
    return None
