"""The kernel of gram_chain.py in Gluon: X X^T and a program of products of symmetric matrices, a
matrix per CTA, see [Note: program of products].

A matrix of up to 256 x 256 is three squares of 128 x 128: 0 and 2 on the diagonal, 1 below the
diagonal. Three warpgroups compute a square each. The square above the diagonal is never stored in
shared memory: square 1 is read transposed.
"""
from __future__ import annotations

from ..launch.jit import gluon_jit
from ..matmul.sm90_pipeline import (
    add_diagonal,
    index_grid,
    load_addend,
    matrices_of,
    rounded,
    tma_boxes,
)

# Gluon's names, put here by gluon_jit
gl = mbarrier = tma = fence = barrier = multiply = multiplied = load_box = None
store_box = gdc_wait = gdc_launch_dependents = None


@gluon_jit.unspecialized("steps", "products", "keep")
def gram_chain_kernel(x, a, z, one_box, other_box, one_half, other_half, one, other, apart, scales,
                      steps, codes, factors, products, keep, EARLY: gl.constexpr):
    """Run the program of a restart interval on a matrix per CTA.

    Descriptors: x: X in boxes of 2 SIDE rows, `steps` boxes, from which A = scale^2 X X^T is
    computed; a: A in squares, loaded if `steps` is 0 or the scale is negative; z: result, and a
    saved matrix, in squares. one_box, other_box, one_half, other_half: the two slots in squares and
    in upper and lower halves of squares. one, other: the addresses of the slots, `apart` elements
    per matrix.

    codes: `products` codes (`_code` in gram_chain.py); factors: five fp32 numbers per product.
    keep: not 0 to store A in the first slot. EARLY: x was complete before the previous launch
    began, so X X^T does not wait for the previous kernel.
    """
    SIDE: gl.constexpr = a.block_type.shape[1]
    STAGES: gl.constexpr = 4  # Six would fit, and gain nothing
    # Three squares of U, then three of V; before, the stages of X
    squares = gl.allocate_shared_memory(a.dtype, [6, 1, SIDE, SIDE], a.layout)
    staging = gl.allocate_shared_memory(a.dtype, [2, 1, SIDE // 2, SIDE], a.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    restored = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    staging_loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    square_written = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    operands_read = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=3)
    mbarrier.init(done.index(0), count=3)
    for group in gl.static_range(3):
        mbarrier.init(loaded.index(group), count=1)
        mbarrier.init(restored.index(group), count=1)
        mbarrier.init(square_written.index(group), count=1)
        mbarrier.init(operands_read.index(group), count=1)
    mbarrier.init(staging_loaded.index(0), count=1)
    mbarrier.init(staging_loaded.index(1), count=1)
    fence()
    if not EARLY:
        gdc_wait()
    matrix = gl.program_id(0)
    offset = matrix.to(gl.int64) * apart
    slots = one + offset, other + offset, one_half, other_half
    long = x, scales, steps, full, empty, done
    arguments = long, a, z, one_box, other_box, slots, codes, factors, products, keep, matrix
    shared = squares, staging, loaded, restored, staging_loaded, square_written, operands_read
    # Warpgroup 1 computes whole squares and needs more registers than those on the diagonal
    gl.warp_specialize([
        (_compute_products, (arguments, shared, EARLY, 0, SIDE)),
        (_compute_products, (arguments, shared, EARLY, 1, SIDE)),
        (_compute_products, (arguments, shared, EARLY, 2, SIDE)),
    ], [4, 4], [184, 160])


@gluon_jit
def _compute_products(arguments, shared, EARLY: gl.constexpr, GROUP: gl.constexpr,
                      SIDE: gl.constexpr):
    """Warpgroup GROUP: compute square GROUP of all products.

    mbarrier square_written: a warpgroup's square of the product before is in shared memory;
    operands_read: a warpgroup's products have read their operands. A warpgroup waits for the
    squares to multiply, and, before writing a square, for the warpgroups that read the old square.
    """
    long, a, z, one_box, other_box, slots, codes, factors, products, keep, matrix = arguments
    squares, staging, loaded, restored, staging_loaded, square_written, operands_read = shared
    ROW: gl.constexpr = SIDE if GROUP > 0 else 0
    COLUMN: gl.constexpr = SIDE if GROUP > 1 else 0
    HALF: gl.constexpr = SIDE // 2
    matrices, boxes = matrices_of(squares, SIDE, SIDE), tma_boxes(squares, a)
    scale = _gram(long, squares, matrices, matrix, EARLY, GROUP, SIDE, HALF)
    if scale < 0:
        load_addend(a, boxes.index(GROUP), loaded.index(GROUP), matrix, ROW, COLUMN, SIDE)
        mbarrier.wait(loaded.index(GROUP), 0)
    mbarrier.arrive(square_written.index(GROUP))
    if keep != 0:
        store_box(one_box, [matrix, GROUP * SIDE, 0], boxes.index(GROUP))
    for number in range(products):
        code, factor = _product_of(codes, factors, number)
        to, then = _result_of(code)
        # In the last product (STORE_RESULT), not before: the next kernel's programs would occupy
        # multiprocessors while they wait, on which kernels of another stream could run
        if then == 4:
            gdc_launch_dependents()
        _prefetch_slot(code, slots, staging, staging_loaded, matrix, 0, GROUP, SIDE)
        _wait_for_others(square_written, number, GROUP)
        # Square 2 is multiplied last: warpgroup 0 begins the next product without it
        if GROUP == 2:
            _wait_for_others(operands_read, number, GROUP)
        upper, lower = _start_product(matrices, code, GROUP, SIDE, HALF)
        upper = _add_and_round(multiplied(2, deps=(upper,)), code, factor, matrices, slots, staging,
                               staging_loaded, 0, GROUP)
        lower = multiplied(0, deps=(lower,))
        barrier()
        mbarrier.arrive(operands_read.index(GROUP))
        _prefetch_slot(code, slots, staging, staging_loaded, matrix, HALF, GROUP, SIDE)
        lower = _add_and_round(lower, code, factor, matrices, slots, staging, staging_loaded, HALF,
                               GROUP)
        if GROUP != 2:
            _wait_for_others(operands_read, number, GROUP)
        if _waits_for_stores(code):
            _wait_for_stores()
        else:
            tma.store_wait(0)
        barrier()
        _write_square(upper, lower, matrices.index(to + GROUP), _has_mirror(code), GROUP, HALF)
        if _restores_from_z(code):
            load_addend(z, boxes.index(GROUP), restored.index(GROUP), matrix, ROW, COLUMN, SIDE)
            mbarrier.wait(restored.index(GROUP), 0)
        mbarrier.arrive(square_written.index(GROUP))
        # STORE_FIRST_SLOT, STORE_SECOND_SLOT, SAVE_TO_Z and STORE_RESULT in gram_chain.py
        if then == 1:
            store_box(one_box, [matrix, GROUP * SIDE, 0], boxes.index(to + GROUP))
        elif then == 2:
            store_box(other_box, [matrix, GROUP * SIDE, 0], boxes.index(to + GROUP))
        elif then > 2:
            store_box(z, [matrix, ROW, COLUMN], boxes.index(to + GROUP))
        if GROUP == 1:
            _store_mirrored(upper, lower, z, matrices.index(1), boxes.index(1), matrix, then, SIDE)
    tma.store_wait(0)


@gluon_jit
def _wait_for_others(barriers, number, GROUP: gl.constexpr):
    """Wait for the warpgroups whose squares this warpgroup multiplies: 1 for 0 and 2; 0 and 2 for
    1.
    """
    if GROUP == 1:
        mbarrier.wait(barriers.index(0), number & 1)
        mbarrier.wait(barriers.index(2), number & 1)
    else:
        mbarrier.wait(barriers.index(1), number & 1)


@gluon_jit
def _start_product(matrices, code, GROUP: gl.constexpr, SIDE: gl.constexpr, HALF: gl.constexpr):
    """Issue the products of the upper and the lower half of square GROUP; return their sums."""
    left, right = _operands_of(code)
    if GROUP == 0:
        rows, more_rows = matrices.index(left), matrices.index(left + 1).permute([1, 0])
    else:
        rows, more_rows = matrices.index(left + 1), matrices.index(left + 2)
    if GROUP == 2:
        columns, more_columns = matrices.index(right + 1).permute([1, 0]), matrices.index(right + 2)
    else:
        columns, more_columns = matrices.index(right), matrices.index(right + 1)
    upper, lower = _zero_sums(GROUP, SIDE, HALF)
    WIDTH: gl.constexpr = upper.shape[1]
    upper = multiply(rows.slice(0, HALF), columns.slice(0, WIDTH, 1), upper, use_acc=False,
                     is_async=True)
    upper = multiply(more_rows.slice(0, HALF), more_columns.slice(0, WIDTH, 1), upper,
                     is_async=True)
    lower = multiply(rows.slice(HALF, HALF), columns, lower, use_acc=False, is_async=True)
    lower = multiply(more_rows.slice(HALF, HALF), more_columns, lower, is_async=True)
    return upper, lower


@gluon_jit
def _prefetch_slot(code, slots, staging, staging_loaded, matrix, ROW: gl.constexpr,
                   GROUP: gl.constexpr, SIDE: gl.constexpr):
    """Start the TMA load of half a square, from ROW on, from a slot into the staging buffer, if the
    product has such an addend. Not for square 0, for which shared memory has no staging buffer.
    """
    one, other, one_half, other_half = slots
    if GROUP > 0:
        if ROW > 0:
            barrier()  # All threads have read the upper half from the buffer
        if (code >> 3 & 3) == 2:
            load_addend(one_half, staging.index(GROUP - 1), staging_loaded.index(GROUP - 1), matrix,
                        GROUP * SIDE + ROW, 0, SIDE)
        if (code >> 5 & 3) == 2:
            load_addend(other_half, staging.index(GROUP - 1), staging_loaded.index(GROUP - 1),
                        matrix, GROUP * SIDE + ROW, 0, SIDE)


@gluon_jit
def _add_and_round(sums, code, factor, matrices, slots, staging, staging_loaded, ROW: gl.constexpr,
                   GROUP: gl.constexpr):
    """Scale sums, add the addends and the diagonal, and round: half a square, from ROW on.

    A loop instead of unrolled code, because long code stalls on instruction fetches. Each branch
    has an fma of its own, because the compiler would move the registers of a tensor chosen by a
    branch.
    """
    one, other, one_half, other_half = slots
    for k in range(_addend_count(code)):
        source, alpha, beta = _addend_of(code, factor, k)
        if source == 2:  # SLOT
            slot = gl.where(k == 0, one, other)
            sums = gl.fma(sums, alpha, beta * _load_slot(slot, sums, staging, staging_loaded, ROW,
                                                         GROUP))
        else:
            sums = gl.fma(sums, alpha, beta * _part_of(matrices.index(source * 3 + GROUP), sums,
                                                       ROW))
    if GROUP != 1:
        if _has_diagonal(code):
            sums = add_diagonal(sums, factor[1], ROW, 0)
    return rounded(sums, matrices.dtype)


@gluon_jit
def _load_slot(slot, like, staging, staging_loaded, ROW: gl.constexpr, GROUP: gl.constexpr):
    """Load half a square of a slot as fp32 in the layout of `like`: from the staging buffer, or,
    for square 0, from global memory.

    There the address is split into a part that depends on the thread and a part that does not:
    otherwise each address would take registers.
    """
    if GROUP > 0:
        # A product with an addend from a slot loads both halves, so each half has a fixed phase
        mbarrier.wait(staging_loaded.index(GROUP - 1), ROW // like.shape[0])
        values = _part_of(matrices_of(staging, like.shape[0], 2 * like.shape[0]).index(GROUP - 1),
                          like, 0)
    else:
        row, column = index_grid(like)
        address = row // 16 * 2048 + row % 8 * 128 + column % 8
        values = gl.load(slot + address + row // 8 % 2 * 1024 + column // 8 * 8 +
                         ROW * 128).to(gl.float32)
    return values


@gluon_jit
def _store_mirrored(upper, lower, z, square, box, matrix, then, SIDE: gl.constexpr):
    """Store the transpose of result square 1 above the diagonal of z, in the last product only.
    Square 1 of U is the buffer, which no product reads any more.
    """
    if then == 4:
        transposed = square.permute([1, 0])
        transposed.slice(0, SIDE // 2).store(upper)
        transposed.slice(SIDE // 2, SIDE // 2).store(lower)
        fence()
        barrier()
        store_box(z, [matrix, 0, SIDE], box)


@gluon_jit
def _wait_for_stores():
    """Wait until this thread's TMA stores are visible in global memory. `tma.store_wait` only waits
    until the source is read. Side effect: empties the L1 cache.
    """
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [lanes],
                              gl.int32, False, 1)


@gluon_jit
def _gram(long, squares, matrices, matrix, EARLY: gl.constexpr, GROUP: gl.constexpr,
          SIDE: gl.constexpr, HALF: gl.constexpr):
    """Write a square of scale^2 X X^T, and return the scale; -1 if there is no X. With a negative
    scale nothing is written.

    The memory of all squares is the pipeline of X, filled by warpgroup 0; `done` completes when all
    warpgroups have multiplied.
    """
    x, scales, steps, full, empty, done = long
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[2]
    AHEAD: gl.constexpr = STAGES - 1
    boxes = tma_boxes(squares, x)
    stages = matrices_of(boxes, 2 * SIDE, BLOCK_K)
    if GROUP == 0:
        for k in gl.static_range(AHEAD):
            if k < steps:
                load_addend(x, boxes.index(k), full.index(k), matrix, 0, k * BLOCK_K, BLOCK_K)
    upper, lower = _zero_sums(GROUP, SIDE, HALF)
    for k in range(steps):
        upper, lower = _multiply_step(stages, full, empty, upper, lower, k, GROUP, SIDE, HALF)
        if GROUP == 0:
            ahead = k + AHEAD
            stage, more = ahead % STAGES, ahead < steps
            mbarrier.wait(empty.index(stage), (ahead // STAGES + 1) & 1, pred=more)
            mbarrier.expect(full.index(stage), 4 * SIDE * BLOCK_K, pred=more)
            load_box(x, [matrix, 0, ahead * BLOCK_K], full.index(stage), boxes.index(stage),
                     pred=more)
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
        _write_square(rounded(upper * factor, matrices.dtype),
                      rounded(lower * factor, matrices.dtype), matrices.index(GROUP), 0, GROUP,
                      HALF)
    return scale


@gluon_jit
def _zero_sums(GROUP: gl.constexpr, SIDE: gl.constexpr, HALF: gl.constexpr):
    """Zeros for the sums of the upper and the lower half of a square. On the diagonal the upper
    half has HALF columns: the rest is mirrored from the lower half.
    """
    WIDTH: gl.constexpr = SIDE if GROUP == 1 else HALF
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, WIDTH, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                   instr_shape=[16, SIDE, 16])
    return gl.zeros((HALF, WIDTH), gl.float32, narrow), gl.zeros((HALF, SIDE), gl.float32, wide)


@gluon_jit
def _multiply_step(stages, full, empty, upper, lower, k, GROUP: gl.constexpr,
                   SIDE: gl.constexpr, HALF: gl.constexpr):
    """Issue the products of step k, and wait until the step before is done."""
    stage = k % full.shape[0]
    ROW: gl.constexpr = SIDE if GROUP > 0 else 0
    COLUMN: gl.constexpr = SIDE if GROUP > 1 else 0
    mbarrier.wait(full.index(stage), (k // full.shape[0]) & 1)
    rows, columns = stages.index(stage).slice(ROW, SIDE), stages.index(stage).slice(COLUMN, SIDE)
    upper = multiply(rows.slice(0, HALF), columns.slice(0, upper.shape[1]).permute([1, 0]), upper,
                     is_async=True)
    lower = multiply(rows.slice(HALF, HALF), columns.permute([1, 0]), lower, is_async=True)
    upper, lower = multiplied(2, deps=(upper, lower))
    mbarrier.arrive(empty.index((k + full.shape[0] - 1) % full.shape[0]), pred=k > 0)
    return upper, lower


@gluon_jit
def _write_square(upper, lower, square, mirror, GROUP: gl.constexpr, HALF: gl.constexpr):
    """Write a whole square to shared memory, visible to TMA and wgmma. On the diagonal the upper
    right quarter is the transpose of the lower left quarter; if `mirror` is not 0, the other
    quarters are made symmetric, too.
    """
    upper_corner = square.slice(0, HALF).slice(0, upper.shape[1], 1)
    upper_corner.store(upper)
    square.slice(HALF, HALF).store(lower)
    if GROUP != 1:
        below, lower_right = gl.split(gl.permute(gl.reshape(lower, (HALF, 2, HALF)), (0, 2, 1)))
        square.slice(0, HALF).slice(HALF, HALF, 1).permute([1, 0]).store(below)
        if mirror != 0:
            lower_corner = square.slice(HALF, HALF).slice(HALF, HALF, 1)
            barrier()
            upper = _mirrored(upper, upper_corner)
            lower_right = _mirrored(lower_right, lower_corner)
            barrier()
            upper_corner.store(upper)
            lower_corner.store(lower_right)
    fence()
    barrier()


@gluon_jit
def _mirrored(values, square):
    """Replace the elements above the diagonal by those of the transposed square."""
    r, s = index_grid(values)
    return gl.where(r < s, square.permute([1, 0]).load(values.type.layout), values)


@gluon_jit
def _product_of(codes, factors, number):
    """Load a product's code and the five factors, before any wait for operands."""
    code, address = gl.load(codes + number), factors + 5 * number
    return code, (gl.load(address), gl.load(address + 1), gl.load(address + 2),
                  gl.load(address + 3), gl.load(address + 4))


@gluon_jit
def _operands_of(code):
    """Index of the first square of each operand: 0 for U, 3 for V."""
    return (code & 1) * 3, (code >> 1 & 1) * 3


@gluon_jit
def _result_of(code):
    """Index of the first square of the result (0 or 3), and where the result is stored besides."""
    return (code >> 2 & 1) * 3, code >> 8 & 7


@gluon_jit
def _has_mirror(code):
    """Flag MIRROR."""
    return code >> 11 & 1


@gluon_jit
def _restores_from_z(code):
    """Flag RESTORE_FROM_Z."""
    return (code >> 12 & 1) != 0


@gluon_jit
def _has_diagonal(code):
    """Flag DIAGONAL."""
    return (code >> 13 & 1) != 0


@gluon_jit
def _waits_for_stores(code):
    """Flag WAIT_STORES."""
    return (code >> 14 & 1) != 0


@gluon_jit
def _addend_count(code):
    """Number of addends."""
    return 1 + ((code >> 5 & 3) != 0) + (code >> 7 & 1)


@gluon_jit
def _addend_of(code, factor, k):
    """(U, V or SLOT, the place of addend k; factor of the sums so far; factor of the addend)."""
    source = gl.where(k == 0, code >> 3 & 3, gl.where(k == 1, code >> 5 & 3, 0))
    alpha = gl.where(k == 0, factor[0], 1.0)
    beta = gl.where(k == 0, factor[2], gl.where(k == 1, factor[3], factor[4]))
    return source, alpha, beta


@gluon_jit
def _part_of(square, like, ROW: gl.constexpr):
    """Load the part of an addend's square that corresponds to `like`, from row ROW on, as fp32."""
    return square.slice(ROW, like.shape[0]).slice(0, like.shape[1],
                                                  1).load(like.type.layout).to(gl.float32)
