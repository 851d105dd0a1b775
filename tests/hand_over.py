"""A kernel that only hands work to groups of warps, without and with a barrier among some of a program's warps:
`python -m tests.hand_over alone|barrier` under compute-sanitizer.
"""
import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def put(out, BARRIER: gl.constexpr, WHO: gl.constexpr):
    if BARRIER:
        gl.thread_barrier()
    gl.store(out + gl.program_id(0) * 3 + WHO, WHO)


@gluon.jit
def hand_over(out, BARRIER: gl.constexpr):
    gl.warp_specialize([(put, (out, BARRIER, 0)), (put, (out, BARRIER, 1)), (put, (out, False, 2))], [4, 1], [232, 24])


if __name__ == "__main__":
    out = torch.zeros(3 * 264, dtype=torch.int32, device="cuda")
    hand_over[(264,)](out, sys.argv[1] == "barrier", num_warps=4)
    assert out.tolist() == [0, 1, 2] * 264
