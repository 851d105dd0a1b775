"""Orthogonalization of stacks of matrices: choice of method, and replay of known calls.

`orthogonalize_` replaces every matrix U = P S Q^T of several stacks by the polar factor P Q^T,
approximately. `polar_factor` writes the polar factors of a tensor to a new tensor.
`BoundOrthogonalization` is `orthogonalize_` of fixed stacks, for a bucket.

A call sorts matrices by method (`_by_method`): small matrices are iterated in one kernel
(kernels/onchip/polar.py), larger ones in batches by iteration.py.

[Note: known calls]
With Triton, the first call of a kind (shapes, dtypes, options: a `CallSignature`) dry-runs the
launches, to compile all kernels together, and computes the bytes of scratch. The launches are
recorded, and later calls replay the recording (kernels/launch/replay.py), in a few microseconds per
launch. From the third call of `custom_op.orthogonalize` on, `replay_known` also skips all checks.
Inside a CUDA graph nothing is recorded or replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import torch

from ..kernels.backend import capturing, use_triton
from ..kernels.elementwise.row_scattered import memory_of
from ..kernels.launch import precompile
from ..kernels.launch.jit import launch_key, thread_state
from ..kernels.launch.replay import replay, replay_or_record
from ..kernels.launch.tile_config import forced
from ..kernels.onchip import polar
from ..params.errors import shortened
from .coefficients import Steps, is_number, steps_of
from .iteration import Batch, IterationPlan, Memory, Stack, iterate_all, max_scratch_bytes
from .method import MATRIX_DTYPES, batch_key, products_dtype, restart_interval

# Bytes of a stack up to which a dry run allocates scratch for stacks of four times its size
MAX_COMPANION_BYTES = 1 << 26
# Signatures that are kept; a bound, since schedules may bring new options at every step
MAX_SIGNATURES = 1024

# (steps, eps, dtype of products or None)
Options = tuple[Steps, float, torch.dtype | None]
# [(U, out)]: out may be U
Pairs = Sequence[tuple[Stack, Stack]]


def orthogonalize(
    X: torch.Tensor,
    ns_coefficients: str | Sequence = "polar_express",
    ns_steps: int = 5,
    eps: float = 1e-7,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the result of `custom_op.orthogonalize`, without the torch operator, detached."""
    check(X, eps, dtype)
    return polar_factor(X.detach(), steps_of(ns_coefficients, ns_steps), eps, dtype)


def check(X: torch.Tensor, eps: float = 0.0, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless X is a dense tensor of matrices (..., R, C) in fp32, bf16 or fp16,
    eps a finite number >= 0, and dtype fp32, bf16, fp16 or None.
    """
    if not isinstance(X, torch.Tensor):
        raise ValueError(f"X is of type {type(X).__name__}; pass a tensor of matrices (..., R, C)")
    if X.dim() < 2 or X.dtype not in MATRIX_DTYPES or X.layout != torch.strided:
        kind = "" if X.layout == torch.strided else f", {X.layout}"
        raise ValueError(
            f"X is {X.dtype} of shape {tuple(X.shape)}{kind}; pass matrices (..., R, C) in fp32, "
            "bf16 or fp16, dense"
        )
    if not is_number(eps) or eps < 0:
        raise ValueError(
            f"eps={shortened(repr(eps))} is not allowed: it must be a finite number >= 0 that "
            "fp32 holds"
        )
    if dtype not in (None, *MATRIX_DTYPES):
        raise ValueError(
            f"dtype={shortened(repr(dtype))} is not allowed: it must be one of {MATRIX_DTYPES}, or "
            "None"
        )


def polar_factor(
    X: torch.Tensor,
    steps: Steps,
    eps: float,
    dtype: torch.dtype | None = None,
    given: Hashable = None,
) -> torch.Tensor:
    """Return the polar factor of every matrix of X (..., R, C), contiguous, in X's dtype.

    Formulas and options as in `custom_op.orthogonalize`. `given`: the caller's options, under which
    `replay_known` finds the call again; None if `replay_known` must not.
    """
    out = torch.empty_like(X, memory_format=torch.contiguous_format)
    if X.numel():
        options = steps, eps, dtype
        signature = _run(
            (X, out), lambda: [(_as_stack(X), out.view(-1, *X.shape[-2:]))], options, single=True
        )
        # Not while a tool forces tiles: `replay_known` would replay the forced tiles later
        if given is not None and signature is not None and forced() is None:
            _remember(_call_key(X, given), signature)
    return out


def replay_known(X: torch.Tensor, given: Hashable) -> torch.Tensor | None:
    """Return the polar factor of X if a call with equal `given` and an equal layout of X has been
    replayed before, else None.

    Skips the checks of options and tensor: an earlier call has passed the checks, which take longer
    than a small matrix.
    """
    signature = _signatures.get(_call_key(X, given))
    if (
        signature is None
        or thread_state.dry_run
        or forced()
        or not use_triton(X.device)
        or capturing(X.device)
    ):
        return None
    out = torch.empty_like(X, memory_format=torch.contiguous_format)
    return out if replay(signature, _allocate(signature.sizes, X.device), (X, out)) else None


def _call_key(X: torch.Tensor, given: Hashable) -> tuple:
    """Return the key of a call of `polar_factor`: options, and all of X that launches depend on."""
    return given, X.dtype, X.shape, X.stride(), X.data_ptr() % 16, X.get_device()


def _as_stack(X: torch.Tensor) -> torch.Tensor:
    """Return X (..., R, C) as (N, R, C), a view if possible.

    A copy keeps transposed matrices transposed in memory: squares are summed in the order of
    memory, and the bits of a matrix must not depend on whether the batch needs a copy.
    """
    transposed = X.stride(-2) < X.stride(-1)
    X = X.mT if transposed else X
    X = X.reshape(-1, *X.shape[-2:])
    return X.mT if transposed else X


def orthogonalize_(
    stacks: Sequence[Stack],
    steps: Steps,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    memory: Memory | None = None,
    into: Sequence[Stack] | None = None,
) -> None:
    """Replace every matrix of the stacks (N, R, C), in fp32, bf16 or fp16, by its polar factor.

    Stacks with equal short sides share launches; the bits of a matrix do not depend on the batch.
    `eps` is added to the norm in units of the largest element. `dtype`: of products, None for the
    default of the device. `memory`: three flat uint8 scratch tensors, apart from the stacks; by
    `scratch_bytes`, the first two of half the first number each, the third of the second number.
    None allocates. `into`: where to write the polar factors instead. Stacks and `into` may be
    `ScatteredRows` if `supports_scattered_rows`. Raises RuntimeError for meta tensors.
    """
    if stacks and stacks[0].device.type == "meta":
        raise RuntimeError(
            "meta tensors hold no numbers to orthogonalize: give the model memory before it is "
            "stepped (model.to_empty() and an initialization)"
        )
    if stacks:
        into = into or stacks
        _run((*stacks, *into), lambda: list(zip(stacks, into)), (steps, eps, dtype), memory)


class BoundOrthogonalization:
    """`orthogonalize_` of fixed stacks in fixed memory, for a bucket that is stepped many times.

    In torch (CPUs), the first call computes views of the memory and restart intervals, valid until
    the coefficients change: later calls compute products only. With Triton, later calls replay
    recorded launches, see [Note: known calls].
    """

    def __init__(
        self,
        stacks: Sequence[Stack],
        into: Sequence[Stack],
        dtype: torch.dtype | None,
        memory: Memory,
    ):
        """Arguments as in `orthogonalize_`."""
        self.stacks = stacks
        self.into = into
        self.dtype = dtype
        self.memory = memory
        self.replays = bool(stacks) and use_triton(stacks[0].device)
        self.steps: Steps | None = None  # the steps of `iteration_plan`
        self.iteration_plan: IterationPlan | None = None

    def __call__(self, steps: Steps, eps: float) -> None:
        """Write the polar factor of every matrix of `stacks` to its counterpart in `into`."""
        if not self.stacks:
            return
        if self.replays or self.stacks[0].device.type == "meta":
            orthogonalize_(self.stacks, steps, eps, self.dtype, self.memory, self.into)
            return
        if steps is not self.steps and steps != self.steps:
            pairs = list(zip(self.stacks, self.into))
            # No matrix goes to an onchip kernel: those need a GPU
            _, batches, products = _by_method(pairs, (steps, eps, self.dtype))
            # The iteration plan is stored: a step outside of torch.inference_mode could not write
            # to tensors made inside of it
            with torch.inference_mode(False), torch.no_grad():
                self.iteration_plan = (
                    IterationPlan(batches, steps, products, self.memory) if batches else None
                )
            self.steps = steps
        if self.iteration_plan is not None:
            self.iteration_plan.run(eps)


class CallSignature:
    """Identity of all calls that are equal but for addresses. The object itself is the key of the
    recorded launches.
    """

    def __init__(self, sizes: tuple[int, ...]):
        # Bytes of scratch: the three tensors of `iteration.Memory`, and of `polar.polar`
        self.sizes = sizes


# Key of `_run` or of `_call_key` -> signature
_signatures: dict[tuple, CallSignature] = {}


def _run(
    tensors: Sequence[Stack],
    pairs: Callable[[], Pairs],
    options: Options,
    memory: Memory | None = None,
    single: bool = False,
) -> CallSignature | None:
    """Orthogonalize each U into its out: replay the launches of a known call, or launch and record.

    `pairs()` returns [(U, out)], views of `tensors`; called only to launch, since a replay needs
    addresses only. `single`: one stack into a new tensor, from a user; calls with companion shapes
    may follow. Return the signature if the call was replayed, else None.
    """
    device = tensors[0].device
    # In a CUDA graph batches run side by side on several streams; a recording holds one stream
    if not use_triton(device) or capturing(device):
        return _launch(pairs(), options, memory)
    # For a single stack out is new and contiguous: launches depend on X only
    key = options, forced(), single, launch_key(*tensors[: 1 if single else None])
    signature = _signatures.get(key) or _make_signature(key, pairs(), options, memory, single)
    if thread_state.dry_run:
        return _launch(pairs(), options, memory)
    sizes = signature.sizes if memory is None else signature.sizes[3:]
    # A recording is valid for one address of scratch. The allocator tends to return the address of
    # the last call for a single allocation of equal size
    new = _allocate(sizes, device)

    def launch() -> None:
        *own, onchip_memory = new[0].split(sizes) if new else [None] * len(sizes)
        _launch(pairs(), options, memory or own, onchip_memory)

    scratch = (*(memory or ()), *new)
    replayed = replay_or_record(signature, scratch, [*map(memory_of, tensors)], launch)
    return signature if replayed else None


def _allocate(sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return one flat uint8 tensor of all sizes together; () if no bytes are needed."""
    nbytes = sum(sizes)
    return (torch.empty(nbytes, dtype=torch.uint8, device=device),) if nbytes else ()


def _make_signature(
    key: tuple, pairs: Pairs, options: Options, memory: Memory | None, single: bool
) -> CallSignature:
    """Compile the kernels of a new kind of call in a dry run, and return its signature."""
    likely = functools.partial(_launch_companions, pairs[0][1], options) if single else None
    precompile.precompile_kernels(
        pairs[0][0].device, lambda: _launch(pairs, options, memory), likely
    )
    onchip, batches, products = _by_method(pairs, options)
    steps = len(options[0].triples)
    onchip_bytes = max((polar.scratch_bytes(U, products, steps) for U, _ in onchip), default=0)
    batch_bytes = max_scratch_bytes(batches, products.itemsize)
    return _remember(key, CallSignature((*batch_bytes, onchip_bytes)))


def _remember(key: tuple, signature: CallSignature) -> CallSignature:
    """Keep a signature under a key; forget all once MAX_SIGNATURES are kept."""
    if len(_signatures) >= MAX_SIGNATURES:
        _signatures.clear()
    _signatures[key] = signature
    return signature


def _launch_companions(U: torch.Tensor, options: Options) -> None:
    """Launch the kernels of likely companion shapes of a stack, in a dry run only: the transpose,
    the Gram and the standard iteration, and, of square matrices, aspect ratios 1:4 and 4:1. All
    kernels then compile in one batch. Overwrites U if launched for real.
    """
    steps, _, dtype = options
    N, R, C = U.shape
    n = min(R, C)
    products = products_dtype(dtype, U.device)
    stacks = [U, U.view(N, C, R)]
    if R == C > polar.MAX_SHORT_SIDE and U.nbytes <= MAX_COMPANION_BYTES:
        # Overlapping rows within the memory of U, since nothing is read in a dry run. A stride of
        # 16 elements keeps rows aligned, as those of real matrices
        stacks += [U.as_strided((N, *sides), (0, 16, 1)) for sides in ((n, 4 * n), (4 * n, n))]
    square = restart_interval(n, n, steps, products)
    long = restart_interval(n, 4 * n, steps, products)
    for stack in stacks:
        for max_steps in {square, long}:
            _launch([(stack, stack)], options, max_steps=max_steps)


@torch.no_grad()
def _launch(
    pairs: Pairs,
    options: Options,
    memory: Memory | None = None,
    onchip_memory: torch.Tensor | None = None,
    max_steps: int | None = None,
) -> None:
    """Launch everything that orthogonalizes each U into its out.

    `memory`: scratch of the batches, `onchip_memory`: of `polar.polar`, flat uint8; None allocates.
    `max_steps`: as in `_by_method`.
    """
    steps, eps, _ = options
    onchip, batches, products = _by_method(pairs, options, max_steps)
    for U, out in onchip:
        intervals = steps.intervals(products, n=U.shape[1])
        polar.polar(U, out, intervals, eps, products, onchip_memory)
    if batches:
        iterate_all(batches, steps, eps, products, memory)


def _by_method(
    pairs: Pairs, options: Options, max_steps: int | None = None
) -> tuple[list[tuple[Stack, Stack]], list[Batch], torch.dtype]:
    """Sort pairs by method. Return (pairs for the onchip kernel, batches for `iterate_all`, dtype
    of products).

    In the result U and out are (N, n, m) with n <= m, transposed if necessary; empty stacks are
    dropped. `max_steps`: most steps between restarts, None for `restart_interval` of each shape.
    """
    steps, _, dtype = options
    onchip = []
    batches = {}
    products = products_dtype(dtype, pairs[0][0].device)
    for U, out in pairs:
        if U.numel() == 0:
            continue
        if U.shape[1] > U.shape[2]:
            U, out = U.mT, out.mT
        n, m = U.shape[1:]
        # The onchip kernel has no AOL scaling
        if polar.supports(U, products) and not steps.aol:
            onchip.append((U, out))
        else:
            on_cpu = (
                U.device.type == "cpu" and products == torch.float32 and not use_triton(U.device)
            )
            key = batch_key(n, m, max_steps or restart_interval(n, m, steps, products, on_cpu))
            batches.setdefault(key, []).append((U, out))
    return onchip, [(members, most) for (_, most, _), members in batches.items()], products
