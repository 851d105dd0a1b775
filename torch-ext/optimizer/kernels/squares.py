"""Squares of 128 x 128 on and below the diagonal of a symmetric matrix of 193 to 256 rows, in shared memory: how groups
of four warps (resident_sm90.py), one for each, compute X X^T, and write them.

Decides: how X arrives. Must not know: what follows. Needs Gluon.
"""
from __future__ import annotations

from .ring import boxes_of, gluon_jit, matrices_of, rounded
from .strip import ask

gl = mbarrier = fence = barrier = multiply = multiplied = load_box = gdc_wait = None  # Gluon, put here


@gluon_jit
def gram(long, squares, flat, matrix, EARLY: gl.constexpr, WHO: gl.constexpr, SIDE: gl.constexpr, HALF: gl.constexpr):
    """Write a square of scale^2 X X^T; return the scale: where that is negative, nothing is written. The memory of all
    squares is a ring until all are `done`, which the first group fills.
    """
    x, scales, steps, full, empty, done = long
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[2]
    AHEAD: gl.constexpr = STAGES - 1
    boxes = boxes_of(squares, x)
    stages = matrices_of(boxes, 2 * SIDE, BLOCK_K)
    if WHO == 0:
        for k in gl.static_range(AHEAD):
            if k < steps:
                ask(x, boxes.index(k), full.index(k), matrix, 0, k * BLOCK_K, BLOCK_K)
    upper, lower = no_sums(WHO, SIDE, HALF)
    for k in range(steps):
        upper, lower = step(stages, full, empty, upper, lower, k, 0, WHO, SIDE, HALF)
        if WHO == 0:
            ahead = k + AHEAD
            stage, more = ahead % STAGES, ahead < steps
            mbarrier.wait(empty.index(stage), (ahead // STAGES + 1) & 1, pred=more)
            mbarrier.expect(full.index(stage), 4 * SIDE * BLOCK_K, pred=more)
            load_box(x, [matrix, 0, ahead * BLOCK_K], full.index(stage), boxes.index(stage), pred=more)
    upper, lower = multiplied(0, deps=(upper, lower))
    if EARLY:
        gdc_wait()
    scale = -1.0
    mbarrier.arrive(done.index(0))
    if steps > 0:
        scale = gl.load(scales + matrix)
    mbarrier.wait(done.index(0), 0)
    if scale >= 0:
        factor = scale * scale
        write(rounded(upper * factor, flat.dtype), rounded(lower * factor, flat.dtype), flat.index(WHO), 0, WHO, HALF)
    return scale


@gluon_jit
def no_sums(WHO: gl.constexpr, SIDE: gl.constexpr, HALF: gl.constexpr):
    """Sums of the upper and the lower half of a square. Of those on the diagonal what is right of the upper half is
    mirrored afterwards.
    """
    WIDTH: gl.constexpr = SIDE if WHO == 1 else HALF
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SIDE, 16])
    return gl.zeros((HALF, WIDTH), gl.float32, narrow), gl.zeros((HALF, SIDE), gl.float32, wide)


@gluon_jit
def step(stages, full, empty, upper, lower, k, first, WHO: gl.constexpr, SIDE: gl.constexpr, HALF: gl.constexpr):
    """Begin step k of those from `first` on; the one before it is done."""
    stage = k % full.shape[0]
    ROW: gl.constexpr = SIDE if WHO > 0 else 0
    COLUMN: gl.constexpr = SIDE if WHO > 1 else 0
    mbarrier.wait(full.index(stage), (k // full.shape[0]) & 1)
    rows, columns = stages.index(stage).slice(ROW, SIDE), stages.index(stage).slice(COLUMN, SIDE)
    upper = multiply(rows.slice(0, HALF), columns.slice(0, upper.shape[1]).permute([1, 0]), upper, is_async=True)
    lower = multiply(rows.slice(HALF, HALF), columns.permute([1, 0]), lower, is_async=True)
    upper, lower = multiplied(2, deps=(upper, lower))
    mbarrier.arrive(empty.index((k + full.shape[0] - 1) % full.shape[0]), pred=k > first)
    return upper, lower


@gluon_jit
def write(upper, lower, own, mirror, WHO: gl.constexpr, HALF: gl.constexpr):
    """Write a square for all to read, whole."""
    corner = own.slice(0, HALF).slice(0, upper.shape[1], 1)
    corner.store(upper)
    own.slice(HALF, HALF).store(lower)
    if WHO != 1:
        below, last = gl.split(gl.permute(gl.reshape(lower, (HALF, 2, HALF)), (0, 2, 1)))
        own.slice(0, HALF).slice(HALF, HALF, 1).permute([1, 0]).store(below)
        if mirror != 0:
            other_corner = own.slice(HALF, HALF).slice(HALF, HALF, 1)
            barrier()
            upper, last = _mirrored(upper, corner), _mirrored(last, other_corner)
            barrier()
            corner.store(upper)
            other_corner.store(last)
    fence()
    barrier()


@gluon_jit
def _mirrored(values, square):
    """What is above the diagonal comes from below it."""
    r, s = places(values)
    return gl.where(r < s, square.permute([1, 0]).load(values.type.layout), values)


@gluon_jit
def places(like):
    """Return rows (.., 1) and columns (1, ..) of what lies like this tensor."""
    r = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, like.type.layout))[:, None]
    return r, gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, like.type.layout))[None, :]
