"""Entry points on stacks of matrices: they sort matrices by method, and replay the launches of
known calls.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import torch

from ..kernels.backend import capturing, use_triton
from ..kernels.elementwise.row_scattered import ScatteredRows, memory_of
from ..kernels.launch import precompile
from ..kernels.launch.jit import launch_key, thread_state
from ..kernels.launch.replay import replay, replay_or_record
from ..kernels.launch.tile_config import forced
from ..kernels.onchip import polar
from ..params.errors import shortened
from .coefficients import Steps, is_number, steps_of
from .iteration import IterationPlan, iterate_all, most_of
from .method import WIDE, _key, longest, products_dtype

AKIN = 1 << 26  # bytes of a stack up to which what is akin to it may take memory, for a moment
KEPT = 1024  # kinds of calls that are known; schedules may bring new ones at every step


def orthogonalize(
    X: torch.Tensor,
    ns_coefficients: str | Sequence = "polar_express",
    ns_steps: int = 5,
    eps: float = 1e-7,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return what `op.orthogonalize` returns, without an operator around it, and detached."""
    check(X, eps, dtype)
    return polar_factor(X.detach(), steps_of(ns_coefficients, ns_steps), eps, dtype)


def check(X: torch.Tensor, eps: float = 0.0, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError where X is no tensor of matrices (..., R, C) in fp32, bf16 or fp16; for a
    wrong eps or dtype.
    """
    if not isinstance(X, torch.Tensor):
        raise ValueError(f"X is of type {type(X).__name__}; pass a tensor of matrices (..., R, C)")
    if X.dim() < 2 or X.dtype not in WIDE or X.layout != torch.strided:
        kind = "" if X.layout == torch.strided else f", {X.layout}"
        raise ValueError(
            f"X is {X.dtype} of shape {tuple(X.shape)}{kind}; pass matrices (..., R, C) in fp32, "
            "bf16 or "
            "fp16, dense"
        )
    if not is_number(eps) or eps < 0:
        raise ValueError(
            f"eps={shortened(repr(eps))} is not allowed: it must be a finite number >= 0 that fp32 "
            "holds"
        )
    if dtype not in (None, *WIDE):
        raise ValueError(
            f"dtype={shortened(repr(dtype))} is not allowed: it must be one of {WIDE}, or None"
        )


def polar_factor(
    X: torch.Tensor,
    steps: Steps,
    eps: float,
    dtype: torch.dtype | None = None,
    given: Hashable = None,
) -> torch.Tensor:
    """Return the polar factor of every matrix of X (..., R, C), contiguous, in X's dtype; see
    `op.orthogonalize`. `given`: what the rest stands for, if `replay_known` is to know it.
    """
    out = torch.empty_like(X, memory_format=torch.contiguous_format)
    if X.numel():
        pairs, options = lambda: [(_in_a_row(X), out.view(-1, *X.shape[-2:]))], (steps, eps, dtype)
        kind = _polar((X, out), pairs, options, alone=True)
        if given is not None and kind is not None and forced() is None:
            _remember(_call_key(X, given), kind)
    return out


def replay_known(X: torch.Tensor, given: Hashable) -> torch.Tensor | None:
    """Return the same for a tensor like one before, if that call's launches are on a tape, else
    None: what was found good then, and what came of it, is not looked at again, which takes longer
    than a small matrix.
    """
    kind = _kinds.get(_call_key(X, given))
    if (
        kind is None
        or thread_state.dry_run
        or forced()
        or not use_triton(X.device)
        or capturing(X.device)
    ):
        return None
    out = torch.empty_like(X, memory_format=torch.contiguous_format)
    return out if replay(kind, _room(kind.sizes, X.device), (X, out)) else None


def _call_key(X, given) -> tuple:
    return given, X.dtype, X.shape, X.stride(), X.data_ptr() % 16, X.get_device()


def _in_a_row(X):
    """X as (N, R, C). Where that takes a copy, its matrices keep their order of memory, in which
    their squares are summed: the bits of a matrix do not depend on its batch.
    """
    turned = X.stride(-2) < X.stride(-1)
    X = X.mT if turned else X
    X = X.reshape(-1, *X.shape[-2:])
    return X.mT if turned else X


def orthogonalize_(
    stacks: Sequence[torch.Tensor | ScatteredRows],
    steps: Steps,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    memory=None,
    into: Sequence | None = None,
) -> None:
    """Replace every matrix of stacks (N, R, C) in fp32, bf16 or fp16 by its polar factor; see
    `orthogonalize`.

    Stacks with equal short sides share launches; the bits of a matrix do not depend on its company.
    `memory`: three flat uint8 tensors, apart from the stacks, of the bytes that `scratch` says: two
    of half the first number each, and of the second; None for new memory. `into`: where polar
    factors go instead. Both may be Splits, if `splits` says so.
    """
    if stacks and stacks[0].device.type == "meta":
        raise RuntimeError(
            "meta tensors hold no numbers to orthogonalize: give the model memory before it is "
            "stepped "
            "(model.to_empty() and an initialization)"
        )
    if stacks:
        into = into or stacks
        _polar((*stacks, *into), lambda: list(zip(stacks, into)), (steps, eps, dtype), memory)


class BoundOrthogonalization:
    """`orthogonalize_` of fixed stacks in fixed memory, for a bucket that is stepped many times.

    In torch (CPUs), views of the memory and restart intervals are computed by the first call and
    kept until the coefficients change: later calls compute products only. With Triton, calls are
    known by their `CallSignature`, and replay recorded launches.
    """

    def __init__(
        self,
        stacks: Sequence[torch.Tensor | ScatteredRows],
        into: Sequence[torch.Tensor | ScatteredRows],
        dtype: torch.dtype | None,
        memory: Sequence[torch.Tensor],
    ):
        """Arguments as in `orthogonalize_`."""
        self.stacks = stacks
        self.into = into
        self.dtype = dtype
        self.memory = memory
        self.replays = bool(stacks) and use_triton(stacks[0].device)
        self.steps: Steps | None = None  # for which `plan` was made
        self.plan: IterationPlan | None = None

    def __call__(self, steps: Steps, eps: float) -> None:
        """Write the polar factor of every matrix of `stacks` to its place in `into`."""
        if not self.stacks:
            return
        if self.replays or self.stacks[0].device.type == "meta":
            orthogonalize_(self.stacks, steps, eps, self.dtype, self.memory, self.into)
            return
        if steps is not self.steps:
            pairs = list(zip(self.stacks, self.into))
            # On a CPU every matrix is iterated in memory: onchip kernels need a GPU
            _, batches, own = _sorted(pairs, (steps, eps, self.dtype))
            self.plan = IterationPlan(batches, steps, own, self.memory) if batches else None
            self.steps = steps
        if self.plan is not None:
            self.plan.run(eps)


class CallSignature:
    """Stands for all calls that are alike but for addresses; `sizes`: the bytes that each takes, of
    `iterate`'s memory and of `on_chip.polar`'s.
    """

    def __init__(self, sizes):
        self.sizes = sizes


_kinds: dict = {}  # what decides about launches, or is given with a tensor -> _Kind


def _polar(tensors, pairs, options, memory=None, alone=False):
    """Orthogonalize each U into its out, which may be U: `pairs()` of views of `tensors`. Only
    launches write to out, so a rehearsal leaves it alone. `options`: steps, eps, dtype; `alone`:
    one stack, whose out is new, and others that are akin may well follow. Return what stands for
    such calls, if this one came from a tape.
    """
    device = tensors[0].device
    # In a graph stacks are side by side, which no tape holds
    if not use_triton(device) or capturing(device):
        return _launch(pairs(), options, memory)
    key = options, forced(), alone, launch_key(*tensors[: 1 if alone else None])
    kind = _kinds.get(key) or _make_known(key, pairs(), options, memory, alone)
    if thread_state.dry_run:
        return _launch(pairs(), options, memory)
    sizes = kind.sizes if memory is None else kind.sizes[3:]
    new = _room(sizes, device)

    def launch():
        *own, room = new[0].split(sizes) if new else [None] * len(sizes)
        _launch(pairs(), options, memory or own, room)

    return (
        kind
        if replay_or_record(kind, (*(memory or ()), *new), [*map(memory_of, tensors)], launch)
        else None
    )


def _room(sizes, device) -> tuple:
    """New memory of so many bytes, if it is any."""
    nbytes = sum(sizes)
    return (torch.empty(nbytes, dtype=torch.uint8, device=device),) if nbytes else ()


def _make_known(key, pairs, options, memory, alone) -> CallSignature:
    """Rehearse the first call of a kind."""
    likely = functools.partial(_launch_akin, pairs[0][1], options) if alone else None
    precompile.precompile_kernels(
        pairs[0][0].device, lambda: _launch(pairs, options, memory), likely
    )
    chips, stacks, own = _sorted(pairs, options)
    room = max((polar.scratch_bytes(U, own, len(options[0].triples)) for U, _ in chips), default=0)
    return _remember(key, CallSignature((*most_of(stacks, own.itemsize), room)))


def _remember(key, kind) -> CallSignature:
    if len(_kinds) >= KEPT:
        _kinds.clear()
    _kinds[key] = kind
    return kind


def _launch_akin(U, options):
    """Launch what matrices like these take that a model may well have beside them: wide and tall,
    as square ones and as long ones, which may take another iteration; beside square ones, also what
    is four times as long. For rehearsals: U is spoiled.
    """
    (steps, _, dtype), (N, R, C) = options, U.shape
    n, own = min(R, C), products_dtype(dtype, U.device)
    stacks = [U, U.view(N, C, R)]
    # Rows that lie in each other, for nobody reads them
    if R == C > polar.MAX_SHORT_SIDE and U.nbytes <= AKIN:
        stacks += [U.as_strided((N, *sides), (0, 16, 1)) for sides in ((n, 4 * n), (4 * n, n))]
    for stack in stacks:
        for most in {longest(n, n, steps, own), longest(n, 4 * n, steps, own)}:
            _launch([(stack, stack)], options, most=most)


@torch.no_grad()
def _launch(pairs, options, memory=None, room=None, most=None):
    """In `memory` (`iterate`'s) and `room` (`on_chip.polar`'s), None for new; `most`: see
    `_sorted`.
    """
    (steps, eps, _), (chips, stacks, own) = options, _sorted(pairs, options, most)
    for U, out in chips:
        polar.polar(U, out, steps.segments(own, n=U.shape[1]), eps, own, room)
    if stacks:
        iterate_all(stacks, steps, eps, own, memory)


def _sorted(pairs, options, most=None):
    """(pairs that `on_chip` takes, stacks that `iterate_all` takes, the dtype of products). The
    short side comes first from here on. `most`: steps between restarts, None for what is best.
    """
    steps, _, dtype = options
    chips, together, own = [], {}, products_dtype(dtype, pairs[0][0].device)
    for U, out in pairs:
        if U.numel() == 0:
            continue
        if U.shape[1] > U.shape[2]:
            U, out = U.mT, out.mT
        n, m = U.shape[1:]
        if polar.supports(U, own) and not steps.aol:
            chips.append((U, out))
        else:
            on_cpu = U.device.type == "cpu" and own == torch.float32 and not use_triton(U.device)
            key = _key(n, m, most or longest(n, m, steps, own, on_cpu))
            together.setdefault(key, []).append((U, out))
    return chips, [(members, most) for (_, most, _), members in together.items()], own
