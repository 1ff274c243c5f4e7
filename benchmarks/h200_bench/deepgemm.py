"""A layer around the grouped bf16 products of DeepGEMM (github.com/deepseek-ai/DeepGEMM).

The package has products and no layer. The operations between the products are compiled PyTorch.
Rows are gathered; every expert's first row is at a multiple of the alignment, as DeepGEMM's
contiguous layout requires. The products of the weight gradients need the experts' sizes on the
host, so the host waits for the device. Their results are in fp32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .pieces import swiglu, topk_softmax

BF = torch.bfloat16
DEPTH = 128  # for weight gradients, an expert's rows are padded to a multiple of DEPTH


class Rows(NamedTuple):
    """Routed rows grouped by expert; each expert is padded with rows whose score is 0."""

    token: torch.Tensor  # (C,)
    expert: torch.Tensor  # (C,) int32, -1 after the last expert's
    row_of_slot: torch.Tensor  # (T, K)
    sizes: torch.Tensor  # (E,) int32, with padding


def arrange(ids, experts: int, alignment: int) -> Rows:
    T, K = ids.shape
    capacity = math.ceil((T * K + experts * (alignment - 1)) / alignment) * alignment
    flat = ids.flatten()
    by_expert, order = flat.sort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat))
    sizes = (counts + alignment - 1) // alignment * alignment
    ends = sizes.cumsum(0)
    first = (ends - sizes) - (counts.cumsum(0) - counts)
    row = torch.arange(T * K, device=ids.device) + first[by_expert]
    row_of_slot = torch.empty_like(flat).scatter(0, order, row).view(T, K)
    token = flat.new_zeros(capacity).scatter(0, row, order // K)
    expert = torch.searchsorted(ends, torch.arange(capacity, device=ids.device), right=True)
    expert = torch.where(expert < experts, expert, -1).to(torch.int32)
    return Rows(token, expert, row_of_slot, sizes.to(torch.int32))


def gather(x, token):
    return x[token]


def combine(rows, row_of_slot, weights):
    return (rows[row_of_slot].float() * weights.unsqueeze(-1)).sum(1).to(BF)


def add_up(rows, row_of_slot):
    return rows[row_of_slot].float().sum(1).to(BF)


def act_backward(h, da, score):
    """dH, the activation times the score, and the score's gradient, row by row."""
    gate, up = h.float().chunk(2, dim=-1)
    da, sigmoid = da.float(), gate.sigmoid()
    a = gate * sigmoid * up
    slope = sigmoid + gate * sigmoid * (1 - sigmoid)
    dh = torch.cat([up * slope, gate * sigmoid], -1) * (da * score).repeat(1, 2)
    return dh.to(BF), (a * score).to(BF), (a * da).sum(-1)


class OnHost:
    """Copies sizes to the host asynchronously."""

    def __init__(self, sizes):
        cuda = sizes.is_cuda
        self.copy = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=cuda)
        self.copy.copy_(sizes, non_blocking=True)
        self.arrived = torch.cuda.Event() if cuda else None
        if cuda:
            self.arrived.record()

    def wait(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.copy.tolist()


def deepgemm_layer(shape):
    import deep_gemm
    from deep_gemm import get_mk_alignment_for_contiguous_layout, m_grouped_bf16_gemm_nt_contiguous

    over_rows = getattr(deep_gemm, "k_grouped_bf16_gemm_tn_contiguous", None)
    alignment = math.lcm(get_mk_alignment_for_contiguous_layout(), DEPTH)
    parts = (arrange, gather, combine, add_up, swiglu, act_backward)
    lay_out, take, weigh, add, act, back = map(torch.compile, parts)

    def product(rows, weights, expert):
        """Rows (C, k) times the transposed weights (E, m, k) of their expert."""
        out = torch.empty(rows.shape[0], weights.shape[1], dtype=BF, device=rows.device)
        m_grouped_bf16_gemm_nt_contiguous(rows, weights, out, expert)
        return out

    def product_over_rows(a, b, sizes, on_host):
        """a_e^T b_e (E, m, n) from the rows a (C, m) and b (C, n) of each expert."""
        total = sum(on_host)
        out = torch.zeros(shape.E, a.shape[1], b.shape[1], device=a.device)
        over_rows(a[:total], b[:total], out, on_host, sizes, out)
        return out.to(BF)

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, ids, weights, w_up, w_down):
            rows = lay_out(ids, shape.E, alignment)
            h = product(take(x, rows.token), w_up, rows.expert)
            out = weigh(product(act(h), w_down, rows.expert), rows.row_of_slot, weights)
            ctx.save_for_backward(x, weights, w_up, w_down, h, *rows)
            if over_rows is not None:
                ctx.sizes = OnHost(rows.sizes)
            return out

        @staticmethod
        def backward(ctx, dout):
            x, weights, w_up, w_down, h, *rows = ctx.saved_tensors
            rows = Rows(*rows)
            score = torch.zeros(h.shape[0], device=h.device)
            score = score.scatter(0, rows.row_of_slot.flatten(), weights.flatten()).unsqueeze(-1)
            dout = take(dout, rows.token)
            da = product(dout, w_down.transpose(1, 2), rows.expert)
            dh, scaled, dscore = back(h, da, score)
            dx = add(product(dh, w_up.transpose(1, 2), rows.expert), rows.row_of_slot)
            sizes = ctx.sizes.wait()
            dw_down = product_over_rows(dout, scaled, rows.sizes, sizes)
            dw_up = product_over_rows(dh, take(x, rows.token), rows.sizes, sizes)
            return dx, None, dscore[rows.row_of_slot], dw_up, dw_down

    def layer(x, logits, w_up, w_down):
        ids, weights = topk_softmax(logits, shape.K)
        return Layer.apply(x, ids, weights, w_up, w_down)

    if over_rows is None:
        layer.no_backward = "it has no k_grouped_bf16_gemm_tn_contiguous for the weights' gradients"
    return layer
