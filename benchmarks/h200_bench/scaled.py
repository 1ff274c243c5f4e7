"""A layer around torch._scaled_grouped_mm, as torchao trains MoE layers in fp8 with row scales.

Rows are gathered in bf16 and quantised; every expert's first row is at a multiple of 16. The
weights are quantised in every forward and, along their other dimension, in every backward. A row of
an operand has one scale, a power of two. Weight gradients are products of bf16 (torch._grouped_mm).
The operations between the products are compiled PyTorch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .deepgemm import act_backward, add_up, arrange, combine, gather
from .pieces import swiglu, topk_softmax

BF, F8 = torch.bfloat16, torch.float8_e4m3fn
ALIGNMENT = 16
LARGEST = 448.0  # of e4m3


def cast(values):
    """(codes, scales) of the last dimension: the scale is the least power of two that fits."""
    values = values.float()
    most = values.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(most / LARGEST)))
    return (values / scale).to(F8), scale.squeeze(-1)


def gather_cast(x, token):
    return cast(x[token])


def act_cast(h):
    return cast(swiglu(h))


def cast_transposed(weights):
    return cast(weights.transpose(1, 2).contiguous())


def product(rows, row_scales, weights, weight_scales, ends):
    """Rows (C, k) times the transposed weights (E, m, k) of their expert, in bf16."""
    if rows.is_cuda:
        return torch._scaled_grouped_mm(
            rows,
            weights.transpose(1, 2),
            row_scales,
            weight_scales,
            offs=ends,
            out_dtype=BF,
            use_fast_accum=True,
        )
    # The operator needs a GPU: the same numbers, expert by expert.
    out = torch.zeros(rows.shape[0], weights.shape[1], dtype=BF)
    begin = 0
    for e, end in enumerate(ends.tolist()):
        a = rows[begin:end].float() * row_scales[begin:end, None]
        b = weights[e].float() * weight_scales[e, :, None]
        out[begin:end], begin = (a @ b.T).to(BF), end
    return out


def product_over_rows(a, b, ends):
    """a_e^T b_e (E, m, n) of the rows a (C, m) and b (C, n) of each expert."""
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return grouped_mm(a.t(), b, offs=ends)


def scaled_layer(shape):
    parts = (arrange, gather, gather_cast, act_cast, cast, cast_transposed)
    lay_out, take, take_cast, act, quantise, quantise_transposed = map(torch.compile, parts)
    weigh, add, back = map(torch.compile, (combine, add_up, act_backward))

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, ids, weights, w_up, w_down):
            rows = lay_out(ids, shape.E, ALIGNMENT)
            ends = rows.sizes.cumsum(0).to(torch.int32)
            h = product(*take_cast(x, rows.token), *quantise(w_up), ends)
            y = product(*act(h), *quantise(w_down), ends)
            out = weigh(y, rows.row_of_slot, weights)
            ctx.save_for_backward(x, weights, w_up, w_down, h, ends, rows.token, rows.row_of_slot)
            return out

        @staticmethod
        def backward(ctx, dout):
            x, weights, w_up, w_down, h, ends, token, row_of_slot = ctx.saved_tensors
            score = torch.zeros(h.shape[0], device=h.device)
            score = score.scatter(0, row_of_slot.flatten(), weights.flatten()).unsqueeze(-1)
            da = product(*take_cast(dout, token), *quantise_transposed(w_down), ends)
            dh, scaled, dscore = back(h, da, score)
            dx = product(*quantise(dh), *quantise_transposed(w_up), ends)
            dw_down = product_over_rows(take(dout, token), scaled, ends)
            dw_up = product_over_rows(dh, take(x, token), ends)
            return add(dx, row_of_slot), None, dscore[row_of_slot], dw_up, dw_down

    def layer(x, logits, w_up, w_down):
        ids, weights = topk_softmax(logits, shape.K)
        return Layer.apply(x, ids, weights, w_up, w_down)

    return layer
