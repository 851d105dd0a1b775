"""Products that load and store by pointers, for all architectures of Triton, dtypes and strides.
Launched by api.py.
"""

from __future__ import annotations

from ..elementwise.row_scattered import rows_at
from ..launch.jit import jit

tl = None  # Triton's language, put here by jit


@jit
def _product_kernel(
    A,
    B,
    C,
    D,
    E,
    OUT,
    scales,
    a_strides,
    b_strides,
    c_strides,
    d_strides,
    e_strides,
    out_strides,
    sizes,
    factors,
    SYMMETRIC: tl.constexpr,
    EVEN: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write alpha A B + beta C + delta D + epsilon E + diagonal I to OUT, a tile per program.

    sizes: (rows, columns, inner). factors: (alpha, diagonal, beta, delta, epsilon). With `scales`
    (an fp32 number per matrix) alpha is the matrix's scale, of a SYMMETRIC result the square of the
    scale; a negative scale then leaves the matrix in OUT as before. C, D and E may be None. OUT may
    be an addend: only the program that writes an element reads the same element of an addend.

    SYMMETRIC: only tiles of the lower triangle are computed, and stored twice, the second time
    transposed; BLOCK_R equals BLOCK_C. EVEN: BLOCK_K divides `inner`. Without out_strides OUT is a
    table of row addresses (row_scattered.py), of columns if TURNED. Offsets of matrices and rows
    are 64 bits wide.
    """
    rows, columns, inner = sizes
    alpha, diagonal, beta, delta, epsilon = factors
    matrix, i, j = _tile_coord(rows, columns, SYMMETRIC, BLOCK_R, BLOCK_C, GROUP)
    if scales is not None:
        alpha = tl.load(scales + matrix)
        if SYMMETRIC:
            skipped = alpha < 0
            alpha = alpha * alpha
    r = i * BLOCK_R + tl.arange(0, BLOCK_R)
    c = j * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the edge wrap round: read and multiplied, but never stored. So the
    # loads in the loop need no mask over rows and columns.
    a = (
        A
        + matrix * a_strides[0]
        + (r % rows).to(tl.int64)[:, None] * a_strides[1]
        + k[None, :] * a_strides[2]
    )
    b = B + matrix * b_strides[0] + (c % columns).to(tl.int64)[None, :] * b_strides[2]
    b += k.to(tl.int64)[:, None] * b_strides[1]
    sums = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for first in range(0, inner, BLOCK_K):
        if EVEN:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=k[None, :] < inner - first, other=0.0)
            right = tl.load(b, mask=k[:, None] < inner - first, other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        a += BLOCK_K * a_strides[2]
        b += tl.full((), BLOCK_K, tl.int64) * b_strides[1]
    if out_strides is None and TURNED:
        out = rows_at(OUT, matrix, columns, c, c < columns)[None, :]
    elif out_strides is None:
        out = rows_at(OUT, matrix, rows, r, r < rows)[:, None]
    r, c = r.to(tl.int64)[:, None], c.to(tl.int64)[None, :]
    inside = (r < rows) & (c < columns)
    if scales is not None and SYMMETRIC:
        inside = inside & (skipped == 0)
    if C is not None:
        addend = tl.load(
            C + matrix * c_strides[0] + r * c_strides[1] + c * c_strides[2], mask=inside, other=0.0
        )
        sums = tl.fma(sums, alpha, beta * addend.to(tl.float32))
    else:
        sums *= alpha
    if D is not None:
        addend = tl.load(
            D + matrix * d_strides[0] + r * d_strides[1] + c * d_strides[2], mask=inside, other=0.0
        )
        sums += delta * addend.to(tl.float32)
    if E is not None:
        addend = tl.load(
            E + matrix * e_strides[0] + r * e_strides[1] + c * e_strides[2], mask=inside, other=0.0
        )
        sums += epsilon * addend.to(tl.float32)
    if SYMMETRIC and i == j:
        down, across = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_C)[None, :]
        sums += tl.where(down == across, diagonal, 0.0)
        sums = tl.where(down >= across, sums, tl.trans(sums))
    result = sums.to(OUT.dtype.element_ty)
    if out_strides is None:
        tl.store(out + (r if TURNED else c), result, mask=inside)
    else:
        out = OUT + matrix * out_strides[0]
        tl.store(out + r * out_strides[1] + c * out_strides[2], result, mask=inside)
    if SYMMETRIC and i != j:
        tl.store(out + c * out_strides[1] + r * out_strides[2], result, mask=inside)


@jit
def _tile_coord(
    rows,
    columns,
    SYMMETRIC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return this program's (matrix, tile row, tile column).

    SYMMETRIC: the tiles of the lower triangle, row by row. Otherwise GROUP rows of tiles at a time,
    column by column: concurrent programs share operands in the L2 cache.
    """
    program = tl.program_id(0)
    down = tl.cdiv(rows, BLOCK_R)
    if SYMMETRIC:
        count = down * (down + 1) // 2
        tile = program % count
        i = ((tl.sqrt((8 * tile + 1).to(tl.float32)) - 1) * 0.5).to(tl.int32)
        i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)  # The square root may be off by 1
        i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
        j = tile - i * (i + 1) // 2
    else:
        across = tl.cdiv(columns, BLOCK_C)
        count = down * across
        tile = program % count
        first = tile // (GROUP * across) * GROUP
        size = min(down - first, GROUP)
        within = tile % (GROUP * across)
        i = first + within % size
        j = within // size
    return (program // count).to(tl.int64), i, j


@jit
def _linear_kernel(A, OUT, n, a_strides, out_strides, b, a, SIDE: tl.constexpr):
    """Write b A + a I to OUT, (n, n) matrices; a tile of SIDE x SIDE per program."""
    down = tl.cdiv(n, SIDE)
    matrix, tile = (
        (tl.program_id(0) // (down * down)).to(tl.int64),
        tl.program_id(0) % (down * down),
    )
    r = (tile // down * SIDE + tl.arange(0, SIDE)).to(tl.int64)[:, None]
    c = (tile % down * SIDE + tl.arange(0, SIDE)).to(tl.int64)[None, :]
    inside = (r < n) & (c < n)
    values = tl.load(
        A + matrix * a_strides[0] + r * a_strides[1] + c * a_strides[2], mask=inside, other=0.0
    )
    result = b * values.to(tl.float32) + tl.where(r == c, a, 0.0)
    address = OUT + matrix * out_strides[0] + r * out_strides[1] + c * out_strides[2]
    tl.store(address, result.to(OUT.dtype.element_ty), mask=inside)
