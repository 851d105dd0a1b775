"""The polar factor: coefficient sets, and the iteration that applies them to a stack of matrices.

Decides: what a set's name means, standard or Gram iteration, where the Gram iteration restarts, in which precision, and
which matrices share launches. Must not know: where the matrices come from, or that there are other ranks.
"""
from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .iteration import iterate_all, takes
from .kernels import ahead, on_chip
from .kernels.split import Split

Triple = tuple[float, float, float]
REPEATED_LAST = (1.875, -1.25, 0.375)
WIDE = torch.float32, torch.bfloat16, torch.float16  # dtypes of matrices
LONGEST_SEGMENT = {torch.float32: 3, torch.float16: 3, torch.bfloat16: 2}  # steps of the Gram iteration per restart
LONGEST_CUBIC = {torch.float32: 5, torch.float16: 5, torch.bfloat16: 2}  # the same where every c is 0: they grow slowly


def _safe(triple: Triple, s: float) -> Triple:
    """Return the triple of p(x / s): singular values that rounding pushes above 1 stay where p is bounded."""
    a, b, c = triple
    return a / s, b / s**3, c / s**5


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
    # the same algorithm with a safety factor of 1.02 inside: nanochat, modded-nanogpt, Dion
    "polar_express_nanochat": ((8.156554524902461, -22.48329292557795, 15.878769915207462),
                               (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                               (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                               (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                               (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)),
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

    name: str
    triples: tuple[Triple, ...]
    aol: bool = False

    def segments(self, dtype: torch.dtype = torch.float16) -> tuple[tuple[Triple, ...], ...]:
        """Return the steps between restarts of the Gram iteration: few segments; of 5 steps in fp16, 3 and then 2."""
        cubic = not any(c for _, _, c in self.triples)
        count = math.ceil(len(self.triples) / (LONGEST_CUBIC if cubic else LONGEST_SEGMENT)[dtype])
        ends = [math.ceil(len(self.triples) * i / count) for i in range(count + 1)]
        return tuple(self.triples[first:last] for first, last in zip(ends, ends[1:]))


def steps_of(ns_coefficients: str | Sequence, ns_steps: int = 5) -> Steps:
    """Return the iteration for a set's name, a triple (a, b, c) to be repeated, or a sequence of ns_steps triples.

    A named set of fixed length takes that length or 5, the default, for ns_steps.
    """
    if not isinstance(ns_coefficients, str):
        ns_coefficients = _as_tuples(ns_coefficients)
    if torch.compiler.is_compiling():  # dynamo warns of a cache
        return _steps_of.__wrapped__(ns_coefficients, ns_steps)
    try:
        return _steps_of(ns_coefficients, ns_steps)
    except TypeError:  # what a cache cannot hold is no number
        return _steps_of.__wrapped__(ns_coefficients, ns_steps)


def _as_tuples(numbers):
    """Text and bytes are no sequences of numbers here, and a set has no order."""
    if not _is_sequence(numbers):
        raise ValueError(f"ns_coefficients is {numbers!r}; pass a name, a triple, or a sequence of triples")
    return tuple(tuple(x) if _is_sequence(x) else x for x in numbers)


def _is_sequence(x):
    return isinstance(x, Sequence) and not isinstance(x, (str, bytes, bytearray))


@functools.lru_cache(maxsize=None, typed=True)  # True is no number of steps
def _steps_of(ns_coefficients, ns_steps):
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 1 <= ns_steps < 100:
        raise ValueError(f"ns_steps is {ns_steps!r}; pass a whole number from 1 to 99")
    if isinstance(ns_coefficients, str):
        return _named(ns_coefficients, ns_steps)
    single = len(ns_coefficients) == 3 and not any(isinstance(x, tuple) for x in ns_coefficients)
    triples = (ns_coefficients,) * ns_steps if single else ns_coefficients
    for triple in triples:
        _check_triple(triple)
    if len(triples) != ns_steps:
        raise ValueError(f"ns_coefficients holds {len(triples)} triples and ns_steps is {ns_steps}; "
                         f"pass ns_steps={len(triples)}, or {ns_steps} triples")
    return Steps("custom", tuple(tuple(map(float, t)) for t in triples))


def _check_triple(triple):
    if not (isinstance(triple, tuple) and len(triple) == 3 and all(map(_is_number, triple))):
        raise ValueError(f"ns_coefficients holds {triple!r}; a triple is three finite numbers (a, b, c)")


def _is_number(x):
    """Whether x is a finite number; True is none."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


def _named(name, ns_steps):
    if name not in SETS:
        raise ValueError(f"ns_coefficients is {name!r}; the sets are {', '.join(SETS)}; or pass a triple or triples")
    triples = SETS[name]
    if name in ANY_LENGTH:
        last = REPEATED_LAST if name == "polar_express" else triples[-1]
        triples = (triples + (last,) * ns_steps)[:ns_steps]
    elif ns_steps not in (5, len(triples)):
        raise ValueError(f"ns_steps is {ns_steps}, but the set {name!r} has {len(triples)} steps; "
                         f"pass ns_steps={len(triples)}, or leave it at 5, the default")
    return Steps(name, triples, name in NEEDS_AOL)


def cost(R: int, C: int, steps: Steps) -> int:
    """Return the FLOPs that one (R, C) matrix needs, a symmetric result counted once; owners are balanced by it."""
    n, m = sorted((R, C))
    return min(_cost_standard(n, m, steps), _cost_gram(n, m, steps))


def _cost_standard(n, m, steps):
    squares = sum(c != 0 for _, _, c in steps.triples)
    return 3 * len(steps.triples) * n * n * m + squares * n**3


def _cost_gram(n, m, steps):
    squares = sum(c != 0 for _, _, c in steps.triples)
    segments = len(steps.segments())
    return 3 * segments * n * n * m + (squares + 3 * (len(steps.triples) - segments)) * n**3


def launches(n: int, m: int, steps: Steps) -> dict[str, int]:
    """Return how many products of each kind a stack of (n, m) matrices takes, n <= m, in 16 bits outside the chip."""
    squares, count = sum(c != 0 for _, _, c in steps.triples), len(steps.triples)
    if not _uses_gram(n, m, steps):
        return {"gram": count, "symmetric": squares, "product": count}
    segments = len(steps.segments())
    return {"gram": segments, "symmetric": squares + 3 * (count - segments), "product": segments}


def _uses_gram(n, m, steps):
    """Choose the Gram iteration where it saves a tenth: it has more launches and a little more rounding.

    Of cubic steps always: it costs no more, and a I + b A, rounded to 16 bits, loses more of b A than of b A + c A^2.
    """
    cubic = not any(c for _, _, c in steps.triples)
    return cubic or _cost_gram(n, m, steps) < 0.9 * _cost_standard(n, m, steps)


def orthogonalize(X: torch.Tensor, ns_coefficients: str | Sequence = "polar_express", ns_steps: int = 5,
                  eps: float = 1e-7, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return what `op.orthogonalize` returns, without an operator around it, and detached."""
    check(X, eps, dtype)
    return polar_factor(X.detach(), steps_of(ns_coefficients, ns_steps), eps, dtype)


def check(X: torch.Tensor, eps: float = 0.0, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError where X is no tensor of matrices (..., R, C) in fp32, bf16 or fp16; for a wrong eps or dtype."""
    if not isinstance(X, torch.Tensor):
        raise ValueError(f"X is of type {type(X).__name__}; pass a tensor of matrices (..., R, C)")
    if X.dim() < 2 or X.dtype not in WIDE or X.layout != torch.strided:
        kind = "" if X.layout == torch.strided else f", {X.layout}"
        raise ValueError(f"X is {X.dtype} of shape {tuple(X.shape)}{kind}; pass matrices (..., R, C) in fp32, bf16 or "
                         "fp16, dense")
    if not _is_number(eps) or eps < 0:
        raise ValueError(f"eps={eps!r} is not allowed: it must be a finite number >= 0")
    if dtype not in (None, *WIDE):
        raise ValueError(f"dtype={dtype!r} is not allowed: it must be one of {WIDE}, or None")


def polar_factor(X: torch.Tensor, steps: Steps, eps: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the polar factor of every matrix of X (..., R, C), contiguous, in X's dtype; see `op.orthogonalize`."""
    out = torch.empty(X.shape, dtype=X.dtype, device=X.device)
    if X.numel():
        whole = out.view(-1, *X.shape[-2:])
        likely = functools.partial(_launch_akin, whole, steps, eps, dtype)
        _polar([(X.reshape(whole.shape), whole)], steps, eps, dtype, likely=likely)
    return out


def products_dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of products: the chosen one, else fp32 on a CPU and fp16 elsewhere."""
    return dtype or (torch.float32 if device.type == "cpu" else torch.float16)


def scratch(R: int, C: int, steps: Steps, itemsize: int) -> tuple:
    """What one (R, C) matrix takes of the `memory` of `orthogonalize_`: (key, bytes of the first two, of the third).

    Matrices of one key are iterated together and need the sum of it; keys follow each other and share their memory.
    """
    n, m = sorted((R, C))
    gram_form = _uses_gram(n, m, steps)
    return (n if gram_form else (n, m), *takes(n, m, itemsize, gram_form))


def splits(R: int, C: int, steps: Steps) -> bool:
    """Say whether (R, C) matrices may be Splits: those that are small, or scaled row by row, are read as a whole. So
    are rows of other lengths than multiples of 16, which the compiler would read in other orders than a whole matrix.
    """
    return not (C % 16 or steps.aol or on_chip.is_small(*sorted((R, C))))


def orthogonalize_(stacks: Sequence[torch.Tensor | Split], steps: Steps, eps: float = 1e-7,
                   dtype: torch.dtype | None = None, memory=None, into: Sequence | None = None) -> None:
    """Replace every matrix of stacks (N, R, C) in fp32, bf16 or fp16 by its polar factor; see `orthogonalize`.

    Stacks with equal short sides share launches; the bits of a matrix do not depend on its company. `memory`: three
    flat uint8 tensors, apart from the stacks, of the bytes that `scratch` says: two of half the first number each, and
    of the second; None for new memory. `into`: where polar factors go instead. Both may be Splits, if `splits` says so.
    """
    if stacks and stacks[0].device.type == "meta":
        raise RuntimeError("meta tensors hold no numbers to orthogonalize: give the model memory before it is stepped "
                           "(model.to_empty() and an initialization)")
    _polar(list(zip(stacks, into or stacks)), steps, eps, dtype, memory)


def _polar(pairs, steps, eps, dtype, memory=None, likely=None):
    """Orthogonalize each U into its out, which may be U. Only launches write to out, so a rehearsal leaves it alone.
    `likely`: see `ahead.rehearse`.
    """
    kind = steps, dtype, *((U.dtype, U.device, U.shape, U.stride()) for U, _ in pairs)
    if pairs:
        ahead.rehearse(pairs[0][0].device, lambda: _launch(pairs, steps, eps, dtype, memory), kind, likely)
    _launch(pairs, steps, eps, dtype, memory)


def _launch_akin(U, steps, eps, dtype):
    """Launch what matrices like these take that a model may well have beside them: wide and tall, by both iterations,
    since square matrices take the one and long ones the other. For rehearsals: U is spoiled.
    """
    for stack in (U, U.view(len(U), U.shape[2], U.shape[1])):
        for gram_form in (True, False):
            _launch([(stack, stack)], steps, eps, dtype, None, gram_form)


@torch.no_grad()
def _launch(pairs, steps, eps, dtype, memory, gram_form=None):
    """Sort by what shares launches. The short side comes first from here on. `gram_form`: None for the better one."""
    together = {}
    for U, out in pairs:
        if U.numel() == 0:
            continue
        if U.shape[1] > U.shape[2]:
            U, out = U.mT, out.mT
        n, m = U.shape[1:]
        own = products_dtype(dtype, U.device)
        if on_chip.fits(U, own) and not steps.aol:
            on_chip.polar(U, out, steps.segments(own), eps, own)
        else:
            form = _uses_gram(n, m, steps) if gram_form is None else gram_form
            together.setdefault((n if form else (n, m), form), []).append((U, out))
    if together:
        own = products_dtype(dtype, pairs[0][0].device)
        stacks = [(members, form) for (_, form), members in together.items()]
        iterate_all(stacks, steps, float(eps), own, memory)
