"""Expert parallelism by torch.ops.symm_mem.all_to_all_vdev_2d and the library's grouped form. The
counts stay on the device. One row is sent for each (token, expert) pair."""

from __future__ import annotations

import sonicmoe_cpp as smoe
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ep2_bench.data import Data
from ep2_bench.rivals import Combine, Order, Spread


def absent() -> str | None:
    """The reason why NVSHMEM cannot be used, or None."""
    import torch.distributed._symmetric_memory as symmetric

    for name in ("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset"):
        if not hasattr(torch.ops.symm_mem, name):
            return f"this torch has no torch.ops.symm_mem.{name}"
    if not symmetric.is_nvshmem_available():
        return "this torch is built without NVSHMEM, or its library is not installed"
    return None


class Buffers:
    """Symmetric tensors for rows on the rank of their tokens (`here`, T * K rows) and on the rank
    of their experts (`there`, capacity * T * K rows)."""

    def __init__(self, data: Data, capacity: float):
        import torch.distributed._symmetric_memory as symmetric

        self.name = dist.group.WORLD.group_name
        device, pairs = data.x.device, data.shape.T * data.shape.K

        def empty(*size, dtype=torch.bfloat16):
            made = symmetric.empty(*size, dtype=dtype, device=device)
            symmetric.rendezvous(made, self.name)
            return made

        d, experts = data.shape.d, data.shape.E
        self.here, self.here_again = empty(pairs, d), empty(pairs, d)
        there = int(capacity * pairs)
        self.there, self.there_again = empty(there, d), empty(there, d)
        self.counts = empty(experts, dtype=torch.int64)
        # Numbers of rows by expert, and the offsets of these groups; the operators write both.
        self.received = empty(2, experts, dtype=torch.int64)
        self.again = empty(2, experts, dtype=torch.int64)
        self.returned = empty(2, experts, dtype=torch.int64)

    def out(self, into: Tensor, record: Tensor) -> Tensor:
        """Sends the rows of `here` to the ranks of their experts."""
        by = torch.ops.symm_mem.all_to_all_vdev_2d
        by(self.here, into, self.counts, record, self.name)
        return into

    def back(self, source: Tensor, into: Tensor) -> Tensor:
        """Sends rows on the experts' ranks back to the ranks of their tokens."""
        by = torch.ops.symm_mem.all_to_all_vdev_2d_offset
        by(source, into, self.received, self.returned, self.name)
        return into


class Out(Function):
    @staticmethod
    def forward(ctx, rows, buffers):
        ctx.buffers = buffers
        buffers.here.copy_(rows)
        return buffers.out(buffers.there, buffers.received).detach()

    @staticmethod
    def backward(ctx, gradient):
        buffers = ctx.buffers
        buffers.there_again.copy_(gradient)
        return buffers.back(buffers.there_again, buffers.here_again).detach(), None


class Back(Function):
    @staticmethod
    def forward(ctx, rows, buffers):
        ctx.buffers = buffers
        buffers.there_again.copy_(rows)
        return buffers.back(buffers.there_again, buffers.here_again).clone()

    @staticmethod
    def backward(ctx, gradient):
        buffers = ctx.buffers
        buffers.here.copy_(gradient)
        return buffers.out(buffers.there_again, buffers.again).detach(), None


def step(data: Data, buffers: Buffers) -> Tensor:
    pairs = Order(data.ids, data.shape.E)
    buffers.counts.copy_(pairs.counts)
    rows = Spread.apply(data.x, pairs.order, pairs.inverse, data.shape.K)
    came = Out.apply(rows, buffers)
    counts, begins = buffers.received.view(2, -1, data.ranks)
    groups = (begins[:, 0].contiguous(), counts.sum(1))
    y = smoe.moe_grouped(came, groups, data.w_up, data.w_down)
    back = Back.apply(y, buffers)
    return Combine.apply(back, data.weights, pairs.order, pairs.inverse)
