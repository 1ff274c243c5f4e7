"""Expert parallelism by the usual methods, built from operators of torch and of this library."""

from __future__ import annotations

import functools

import sonicmoe_cpp as smoe
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sonicmoe_cpp.distributed import moe_expert_parallel
from torch import Tensor
from torch.autograd import Function

from ep2_bench.data import Data


@functools.cache
def compiled(function):
    return torch.compile(function, dynamic=False)


# ---- rows by expert ------------------------------------------------------------------------------


class Order:
    """Sorts the (token, expert) pairs by expert; the host does not wait."""

    def __init__(self, ids: Tensor, experts: int):
        key, self.order = ids.flatten().sort(stable=True)
        self.inverse = inverse_of(self.order)
        bounds = torch.arange(experts + 1, device=ids.device)
        self.counts = torch.searchsorted(key, bounds).diff()


def inverse_of(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _sum_by_token(rows: Tensor, inverse: Tensor, k: int) -> Tensor:
    return rows[inverse].view(-1, k, rows.shape[1]).float().sum(1).to(rows.dtype)


def _weighted(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    rows = rows[inverse].view(*weights.shape, -1)
    return (rows.float() * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def _weighted_backward(dout: Tensor, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor):
    gradient = dout[order // weights.shape[1]].float()
    of_weights = (gradient * rows.float()).sum(1)[inverse].view(weights.shape)
    return (gradient * weights.flatten()[order].unsqueeze(1)).to(rows.dtype), of_weights


class Spread(Function):
    """Copies x to one row for each pair, in the order of the pairs."""

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx, gradient):
        (inverse,) = ctx.saved_tensors
        return compiled(_sum_by_token)(gradient, inverse, ctx.k), None, None, None


class Combine(Function):
    """The weighted sum of each token's rows."""

    @staticmethod
    def forward(ctx, rows, weights, order, inverse):
        ctx.save_for_backward(rows, weights, order, inverse)
        return compiled(_weighted)(rows, weights, inverse)

    @staticmethod
    def backward(ctx, dout):
        return *compiled(_weighted_backward)(dout, *ctx.saved_tensors), None, None


class Permute(Function):
    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


# ---- all-to-all by NCCL --------------------------------------------------------------------------


def _all_to_all(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    found = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(found, rows.contiguous(), received, sent)
    return found


class Travel(Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = sent, received
        return _all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.counts
        return _all_to_all(gradient, received, sent), None, None


def by_all_to_all(data: Data, experts) -> Tensor:
    """Sends one row for each (token, expert) pair; the host reads the counts."""
    shape, ranks = data.shape, data.ranks
    pairs = Order(data.ids, shape.E)
    theirs = torch.empty_like(pairs.counts)
    dist.all_to_all_single(theirs, pairs.counts)
    both = torch.stack((pairs.counts, theirs)).view(2, ranks, -1)
    sent, received = both.sum(2).tolist()
    rows = Spread.apply(data.x, pairs.order, pairs.inverse, shape.K)
    came = Travel.apply(rows, sent, received)
    held = shape.E // ranks
    expert = torch.arange(held, device=came.device).repeat(ranks)
    expert = expert.repeat_interleave(theirs, output_size=sum(received))
    order = expert.sort(stable=True).indices
    inverse = inverse_of(order)
    ends = both[1].sum(0).cumsum(0)
    y = experts(Permute.apply(came, order, inverse), F.pad(ends, (1, 0)), data.w_up, data.w_down)
    back = Travel.apply(Permute.apply(y, inverse, order), received, sent)
    return Combine.apply(back, data.weights, pairs.order, pairs.inverse)


def _grouped_mm(rows: Tensor, offsets: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    ends = offsets[1:].to(torch.int32)
    gate, up = product(rows, w_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
    return product(F.silu(gate) * up, w_down.transpose(1, 2), offs=ends)


def _grouped_form(rows: Tensor, offsets: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return smoe.moe_grouped(rows, offsets, w_up, w_down)


# ---- all-gather and reduce-scatter ---------------------------------------------------------------


def _gather(rows: Tensor, ranks: int) -> Tensor:
    found = rows.new_empty((ranks * rows.shape[0], rows.shape[1]))
    dist.all_gather_into_tensor(found, rows.contiguous())
    return found


def _scatter(rows: Tensor, ranks: int) -> Tensor:
    if not rows.is_cuda:  # gloo has no reduce-scatter
        total = rows.float()
        dist.all_reduce(total)
        return total.chunk(ranks)[dist.get_rank()].to(rows.dtype)
    found = rows.new_empty((rows.shape[0] // ranks, rows.shape[1]))
    dist.reduce_scatter_tensor(found, rows.contiguous())
    return found


class Gather(Function):
    @staticmethod
    def forward(ctx, rows, ranks):
        ctx.ranks = ranks
        return _gather(rows, ranks)

    @staticmethod
    def backward(ctx, gradient):
        return _scatter(gradient, ctx.ranks), None


class Scatter(Function):
    @staticmethod
    def forward(ctx, rows, ranks):
        ctx.ranks = ranks
        return _scatter(rows, ranks)

    @staticmethod
    def backward(ctx, gradient):
        return _gather(gradient, ctx.ranks), None


def by_all_gather(data: Data) -> Tensor:
    """Every rank gets all tokens and computes the pairs of its experts; ids of other experts are
    empty slots."""
    first = data.rank * (data.shape.E // data.ranks)
    ids = _gather(data.ids, data.ranks) - first
    x, weights = (Gather.apply(t, data.ranks) for t in (data.x, data.weights))
    return Scatter.apply(smoe.moe(x, ids, weights, data.w_up, data.w_down), data.ranks)


# ---- ours ----------------------------------------------------------------------------------------


def alone(data: Data) -> Tensor:
    """The layer on one GPU: as many routed rows, this rank's experts, no communication."""
    return smoe.moe(data.x, data.local_ids, data.weights, data.w_up, data.w_down)


def ours(data: Data, **options) -> Tensor:
    tensors = (data.x, data.ids, data.weights, data.w_up, data.w_down)
    return moe_expert_parallel(*tensors, timeout=60.0, **options)


def in_fp8(data: Data, transport: str, capacity: float) -> dict:
    """This library's layer in bf16 and in fp8, with weights that are quantised before the calls."""
    with torch.no_grad():
        codes = smoe.quantize_weights(data.w_up, data.w_down)
    arena = {"transport": transport, "max_tokens": data.shape.T, "capacity": capacity}
    rows = {"transport": "all_to_all"}
    fp8 = {"precision": "fp8", "fp8_weights": codes}
    routed = (data.x, data.local_ids, data.weights, data.w_up, data.w_down)
    return {
        "ours_torch": lambda: ours(data, **arena),
        "alone_torch": lambda: alone(data),
        "ours_fp8": lambda: ours(data, **arena, **fp8),
        "alone_fp8": lambda: smoe.moe(*routed, **fp8),
        "ours_all_to_all": lambda: ours(data, **rows),
        "fp8_all_to_all": lambda: ours(data, **rows, **fp8),
    }


def contenders(data: Data, transport: str, capacity: float) -> dict:
    """Maps names to calls that return the output. The results of ours_torch are the reference."""
    arena = {"transport": transport, "max_tokens": data.shape.T, "capacity": capacity}
    exact = {"transport": transport, "max_tokens": data.shape.T}
    expected = compiled(_grouped_mm)
    return {
        "ours_torch": lambda: ours(data, **arena),
        "alone_torch": lambda: alone(data),
        "ours_exact": lambda: ours(data, **exact),
        "ours_all_to_all": lambda: ours(data, transport="all_to_all"),
        "nccl_grouped": lambda: by_all_to_all(data, _grouped_form),
        "nccl_grouped_mm": lambda: by_all_to_all(data, expected),
        "gather_scatter": lambda: by_all_gather(data),
    }
