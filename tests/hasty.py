"""A kernel that reads sums before their product is through, which the assembler lets wait, and says so."""
from __future__ import annotations

from tests.ranks import part

gl = multiply = multiplied = None  # Gluon's language, put here by gluon_jit


@part("kernels.launch.jit").gluon_jit
def hasty_kernel(out):
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], swizzled)
    sums = multiply(tile, tile, gl.zeros((64, 64), gl.float32, layout), is_async=True)
    row, column = gl.arange(0, 64, gl.SliceLayout(1, layout)), gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out + row[:, None] * 64 + column[None, :], multiplied(1, deps=(sums,)))
