"""What this rank stores: gradients, weights and state of its pieces, as views of local memory; and memory lent to
buckets.

Decides where state is created and how a piece is found in a shard. Knows nothing of routes and issues no collective.
"""
from __future__ import annotations

from collections import defaultdict

import torch

from .kernels import use_triton
from .kernels.table import Source
from .layout import is_dtensor, layout_of, local_of, this_rank
from .plan import ALIGNMENT
from .recipe import scale_of


class Store:
    """The tensors of one parameter group at this rank, seen piece by piece.

    `layouts`, `row_layouts`: of each parameter and of its row state (None without). `state`: the optimizer's.
    """

    def __init__(self, params, layouts, row_layouts, state):
        self.params, self.state, self.rank = params, state, this_rank()
        self.layouts = {"update": layouts, "row": row_layouts}
        self.device = local_of(params[0]).device
        self.read()

    def read(self):
        """Take this step's gradients, which autograd may have put elsewhere; a missing one counts as zero."""
        self.gradients = [_gradient(p) for p in self.params]
        self.addresses = None
        if use_triton(self.device):
            addresses = torch.tensor([g.data_ptr() for g in self.gradients], dtype=torch.int64)
            pinned = addresses.pin_memory() if self.device.type == "cuda" else addresses
            self.addresses = pinned.to(self.device, non_blocking=True)

    def sources(self, pieces):
        """Where each piece lies in the gradients, for launches that are told only the gradients' addresses."""
        return [self._source(p.matrix.param, self._view(self.gradients[p.matrix.param], p)) for p in pieces]

    def _source(self, param, view):
        offset = view.storage_offset() - self.gradients[param].storage_offset()
        return Source(param, offset, tuple(view.stride()))

    def weights(self, pieces):
        """W of each piece, (rows, cols) views."""
        return [self._view(local_of(self.params[p.matrix.param]), p) for p in pieces]

    def states(self, pieces, key):
        """State `key` of each piece, (rows, cols) views. Of a chunk, the owner stores no more than that."""
        locals_ = [local_of(self.state[self.params[p.matrix.param]][key]) for p in pieces]
        return [s.view(p.shape) if p.kind == "chunk" else self._view(s, p) for s, p in zip(locals_, pieces)]

    def all_of(self, number) -> list:
        """The local tensors of one parameter: its weight and all its state."""
        param = self.params[number]
        return [local_of(param), *(local_of(t) for t in self.state[param].values())]

    def locals(self, key=None):
        """The local tensors of the parameters, or of their state `key`."""
        return [local_of(self.state[p][key] if key else p) for p in self.params]

    def _view(self, local, piece):
        """The (rows, cols) of `piece` in this rank's shard."""
        if piece.kind == "chunk":
            (start, stop), (_, cols) = piece.box
            return local.view(-1, cols)[start:stop]
        box = self.layouts[piece.kind][piece.matrix.param].boxes[self.rank]
        return local[tuple(i - start for i, (start, _) in zip(piece.matrix.at, box))]


def _gradient(param):
    if param.grad is None:
        return torch.zeros_like(local_of(param))
    if param.grad.is_sparse:
        raise RuntimeError(f"a parameter of shape {tuple(param.shape)} has a sparse gradient; Muon and its AdamW take "
                           "dense ones: use sparse=False in nn.Embedding, or step it with torch.optim.SparseAdam")
    return local_of(param.grad)


def create_state(state, param, keys, dtype, rows=None) -> None:
    """Zeros for the state of one parameter, placed like it, on every rank alike: checkpoint keys may not differ.

    `keys`: "momentum_buffer", "exp_avg" and "exp_avg_sq" of the parameter's shape in `dtype`; "second_moment" (...,
    R, 1) in fp32 (bf16 has too few bits for an average over 20 steps); "step", a scalar. `rows`: how many rows of the
    state this rank keeps where it is not stored like the parameter; None means like the parameter.
    """
    for key in [k for k in keys if k not in state]:
        if key == "step":
            state[key] = torch.zeros((), dtype=torch.float32, device=param.device if param.is_cuda else "cpu")
        elif rows is not None:
            last = param.shape[1:-1] + (1,) if key == "second_moment" else param.shape[1:]
            wide = torch.float32 if key == "second_moment" else dtype
            state[key] = torch.zeros((rows, *last), dtype=wide, device=param.device)
        elif key == "second_moment":
            state[key] = _zero_rows(param)
        else:
            state[key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)


def _zero_rows(param):
    shape = (*param.shape[:-1], 1)
    if not is_dtensor(param):
        return torch.zeros(shape, dtype=torch.float32, device=param.device)
    from torch.distributed.tensor import DTensor
    layout = layout_of(param, shape=shape)
    box = layout.boxes[this_rank()]
    local = torch.zeros([b - a for a, b in box], dtype=torch.float32, device=param.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False,
                              shape=torch.Size(shape), stride=stride)


class Workspace:
    """Flat memory that buckets use in turn. First every bucket reserves what it needs, then each takes its part."""

    def __init__(self, slots):
        self.slots, self.sizes, self.buffers = slots, {}, {}

    def reserve(self, number, needs) -> None:
        """`needs`: use -> bytes, for bucket `number`; buckets share memory with those `slots` before and after."""
        for use, nbytes in needs.items():
            key = number % self.slots, use
            self.sizes[key] = max(self.sizes.get(key, 0), nbytes)

    def take(self, number, needs, device) -> dict:
        """use -> flat uint8 tensor of the reserved size."""
        for use in needs:
            key = number % self.slots, use
            if key not in self.buffers:
                self.buffers[key] = torch.empty(self.sizes[key], dtype=torch.uint8, device=device)
        return {use: self.buffers[number % self.slots, use] for use in needs}


class Bound:
    """One bucket at this rank: its share of the plan, the tensors of its pieces, its process group and its memory."""

    def __init__(self, bucket, share, store, options, group, hp):
        self.bucket, self.share, self.store = bucket, share, store
        self.options, self.group, self.hp = options, group, hp
        self.rank, self.memory = store.rank, None
        self.weights, self.states, self.sources = store.weights, store.states, store.sources

    def pieces(self, end, kind="update"):
        """The pieces that are stored ("home") or computed ("owned") at this rank."""
        return [p for p in getattr(self.share, end) if p.kind == kind]

    def gradients(self):
        return self.store.gradients, self.store.addresses

    def scales(self, pieces):
        return [scale_of(p.matrix, self.hp["adjust_lr_fn"]) for p in pieces]

    def needs(self) -> dict:
        """use -> bytes of workspace. What arrives is copied into the stack before answers leave from the same memory.
        """
        inbound, outbound = self.share.inbound, self.share.outbound
        numel = sum(m.numel for m in self.share.matrices)
        return {"leave": sum(inbound.send_bytes), "return": sum(outbound.recv_bytes),
                "arrive": max(sum(inbound.recv_bytes), sum(outbound.send_bytes)),
                "stack": numel * self.options.wire_dtype.itemsize + ALIGNMENT * len(self.share.matrices),
                "rows": sum(4 * m.rows for m in self.share.matrices),
                "mean": 4 * (numel + ALIGNMENT) if self.bucket.route.startswith("reduce") else 0}

    def stacks(self):
        """([(N, R, C) of each shape], [its (N, R, 1) row state], {piece computed here: its view in them})."""
        members, stacks, rows, of, at, row = defaultdict(list), [], [], {}, 0, 0
        for matrix in self.share.matrices:
            members[matrix.rows, matrix.cols].append(matrix)
        for (R, C), matrices in members.items():
            N, dtype = len(matrices), self.options.wire_dtype
            stacks.append(piece_at(self.memory["stack"], at, (N * R, C), dtype).view(N, R, C))
            rows.append(piece_at(self.memory["rows"], row, (N * R, 1), torch.float32).view(N, R, 1))
            at, row = at + N * R * C * dtype.itemsize, row + 4 * N * R
            at += -at % ALIGNMENT
            of.update({(m, "update"): t for m, t in zip(matrices, stacks[-1])})
            of.update({(m, "row"): t for m, t in zip(matrices, rows[-1])})
        return stacks, rows, {p: _window(of[p.matrix, p.kind], p.box) for p in self.share.owned}


def _window(matrix, box):
    (r0, r1), (c0, c1) = box
    return matrix[r0:r1, c0:c1]


def piece_at(flat, offset, shape, dtype):
    """The (rows, cols) view of a flat uint8 buffer that begins at a byte offset."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return flat[offset:offset + nbytes].view(dtype).view(shape)
