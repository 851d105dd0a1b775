"""What kernels with specialised warps share: a warp fetches tiles through TMA into a ring of stages, in which groups of
four warps find the operands of their products. For sm90.

Decides: how stages change hands. Needs Gluon, the part of Triton in which this can be said. Must not know: which group
takes which tile, nor what becomes of the sums.
"""
from __future__ import annotations

from . import jit

gl = mbarrier = multiply = multiplied = load_box = view = None  # Gluon's language, put here by gluon_jit


def description(tensor, rows, columns):
    """A descriptor for boxes of (rows, columns) in one matrix, checked."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, rows, columns], layout)


def blank(descriptor):
    """A descriptor without its tensor."""
    descriptor.base = None
    return descriptor


def filled(blank, tensor):
    """A descriptor of another tensor of the same shape and strides, without the checks."""
    descriptor = object.__new__(type(blank))
    vars(descriptor).update(vars(blank), base=tensor)
    return descriptor


class gluon_jit(jit):
    """Decorator: the same for a Gluon kernel."""

    slow = True

    def decorate(self, scope):
        from triton.experimental import gluon
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

        def either(owner, one, other):
            return getattr(owner, one, None) or getattr(owner, other)

        scope.update(
            gl=language, mbarrier=hopper.mbarrier, tma=hopper.tma, fence=hopper.fence_async_shared,
            gdc_wait=gdc_wait, gdc_launch_dependents=gdc_launch_dependents, multiply=hopper.warpgroup_mma,
            multiplied=hopper.warpgroup_mma_wait,
            barrier=either(language, "thread_barrier", "barrier"),
            load_box=either(hopper.tma, "async_load", "async_copy_global_to_shared"),
            store_box=either(hopper.tma, "async_store", "async_copy_shared_to_global"),
            view=either(language.shared_memory_descriptor, "reinterpret", "_reinterpret"))
        return gluon.jit


@gluon_jit
def boxes_of(memory, descriptor):
    """View `memory` as boxes of a descriptor, one after another: all of it, for Triton 3.8 views no part."""
    ROWS: gl.constexpr = descriptor.block_type.shape[1]
    COLUMNS: gl.constexpr = descriptor.block_type.shape[2]
    LAYOUT: gl.constexpr = descriptor.layout
    return view(memory, descriptor.dtype, [memory.numel // (ROWS * COLUMNS), 1, ROWS, COLUMNS], LAYOUT)


@gluon_jit
def matrices_of(memory, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The same as matrices, which is what is multiplied, loaded and stored."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return view(memory, memory.dtype, [memory.numel // (ROWS * COLUMNS), ROWS, COLUMNS], LAYOUT)


@gluon_jit
def rounded(sums, DTYPE: gl.constexpr):
    """Round, two at a time."""
    low = sums
    if DTYPE == gl.float16:
        low = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [sums], gl.float16, True, 2)
    elif DTYPE == gl.bfloat16:
        low = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [sums], gl.bfloat16, True, 2)
    return low


@gluon_jit
def make_ring(a, b, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Return (left, right, full, empty): room for boxes of a and b, and what stages wait for; GROUPS read each."""
    left = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return left, right, full, empty


@gluon_jit
def path_of(count, tiles):
    """Return (tiles of a matrix, the matrix that is taken first) of a launch of so many tiles, `count` for each matrix;
    if that is negative, matrices are taken from the last one to the first.
    """
    size = gl.where(count < 0, -count, count)
    return size, gl.where(count < 0, tiles // size - 1, 0)


@gluon_jit
def matrix_of(path, turn):
    """Return the matrix that a turn is of."""
    count, first = path
    return gl.where(first > 0, first - turn // count, turn // count)


@gluon_jit
def place(order, path, turn):
    """Return (matrix, tile row, tile column)."""
    at = order + turn % path[0] * 2
    return matrix_of(path, turn), gl.load(at), gl.load(at + 1)


@gluon_jit
def place_of_half(order, path, whole, ACROSS: gl.constexpr):
    """Return the same of this program's half tile (tiles.divide): in columns of left and right halves if ACROSS, else
    in rows of upper and lower ones. Of a pair it is one of the squares.
    """
    matrix, i, j = place(order, path, whole + gl.program_id(0) // 2)
    if ACROSS:
        second = gl.program_id(0) % 2
        i = gl.where((j < 0) & (second > 0), -j, i)
        j = gl.where(j < 0, i, 2 * j + second)
    else:
        i = 2 * i + gl.program_id(0) % 2
    return matrix, i, j


@gluon_jit
def fetch(a, b, a_half, b_half, ring, work, ACROSS: gl.constexpr, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr,
          STAGES: gl.constexpr):
    """Fill the ring with the operands of all tiles of this program, one after another. Of a pair (order.py,
    `order_of`) the rows of one square are left operands, those of the other one right ones.
    """
    order, path, whole, halves, steps = work
    number = 0
    for turn in range(gl.program_id(0), whole, gl.num_programs(0)):
        matrix, i, j = place(order, path, turn)
        if j < 0:
            fill(a, b_half, ring, matrix, matrix, i, -j, number, 0, steps, SYMMETRIC, TURNED, STAGES)
        else:
            fill(a, b, ring, matrix, matrix, i, j, number, 0, steps, SYMMETRIC, TURNED, STAGES)
        number += steps
    if gl.program_id(0) < halves:
        matrix, i, j = place_of_half(order, path, whole, ACROSS)
        fill(a_half, b_half, ring, matrix, matrix, i, j, number, 0, steps, SYMMETRIC, TURNED, STAGES)


@gluon_jit
def fill(a, b, ring, of_a, of_b, i, j, number, start, stop, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr,
         STAGES: gl.constexpr):
    """Fetch steps of the operands of tile (i, j), of these matrices of a and b, as large as their boxes, into the ring
    from stage `number` on.
    """
    left, right, full, empty = ring
    BLOCK_K: gl.constexpr = a.block_type.shape[1 if TURNED else 2]
    ROWS: gl.constexpr = a.block_type.shape[2 if TURNED else 1]
    COLUMNS: gl.constexpr = b.block_type.shape[1 if SYMMETRIC else 2]
    for k in range(start * BLOCK_K, stop * BLOCK_K, BLOCK_K):
        stage = number % STAGES
        arrived = full.index(stage)
        rows, columns = boxes_of(left.index(stage), a).index(0), boxes_of(right.index(stage), b).index(0)
        mbarrier.wait(empty.index(stage), (number // STAGES + 1) & 1)
        mbarrier.expect(arrived, 2 * (ROWS + COLUMNS) * BLOCK_K)
        if TURNED:
            load_box(a, [of_a, k, i * ROWS], arrived, rows)
        else:
            load_box(a, [of_a, i * ROWS, k], arrived, rows)
        if SYMMETRIC:
            load_box(b, [of_b, j * COLUMNS, k], arrived, columns)
        else:
            load_box(b, [of_b, k, j * COLUMNS], arrived, columns)
        number += 1


@gluon_jit
def multiply_ring(ring, number, steps, next_one, part, SYMMETRIC: gl.constexpr, TURNED: gl.constexpr,
                  ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Return sums of products in fp32, from stage `number` of the ring on: of the left box the `part` of ROWS rows.

    `next_one`, or None: whom to tell when this group has its last operands.
    """
    left, right, full, empty = ring
    shape: gl.constexpr = [16, COLUMNS, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=shape)
    sums = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    for k in range(steps):
        stage = number % STAGES
        mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        if TURNED:
            rows = matrices_of(left.index(stage), BLOCK_K, ROWS).index(part).permute([1, 0])
        else:
            rows = matrices_of(left.index(stage), ROWS, BLOCK_K).index(part)
        if SYMMETRIC:
            columns = matrices_of(right.index(stage), COLUMNS, BLOCK_K).index(0).permute([1, 0])
        else:
            columns = matrices_of(right.index(stage), BLOCK_K, COLUMNS).index(0)
        sums = multiply(rows, columns, sums, is_async=True)
        sums = multiplied(1, deps=(sums,))
        mbarrier.arrive(empty.index((number + STAGES - 1) % STAGES), pred=k > 0)
        number += 1
    if next_one is not None:
        mbarrier.arrive(next_one)
    sums = multiplied(0, deps=(sums,))
    mbarrier.arrive(empty.index((number + STAGES - 1) % STAGES))
    return sums
