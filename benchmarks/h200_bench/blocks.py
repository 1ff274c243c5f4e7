"""A layer around the grouped fp8 products of DeepGEMM (github.com/deepseek-ai/DeepGEMM).

The package has products and no layer. The operations between the products are compiled PyTorch.
Rows are gathered in bf16 and quantised with a scale for each 128 elements. Every expert's first row
is at a multiple of the alignment, as DeepGEMM's contiguous layout requires. The weights have a
scale for each 128 x 128 elements. quantise() makes their codes once for all calls with the same
values, in both orientations, because the depth of a product must be contiguous. Weight gradients
are products of bf16 (torch._grouped_mm).
"""

from __future__ import annotations

import torch

from .deepgemm import DEPTH, Rows, act_backward, add_up, arrange, combine, gather
from .pieces import swiglu, topk_softmax
from .scaled import BF, F8, LARGEST, product_over_rows

BLOCK = 128


def cast_rows(values):
    """(codes, scales) of values (C, k). The scales (C, k / 128) of a column are contiguous."""
    blocks = values.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=1e-30) / LARGEST
    codes = (blocks / scales.unsqueeze(-1)).to(F8)
    return codes.flatten(1), scales.t().contiguous().t()


def cast_weights(weights):
    """(codes, scales) of weights (E, m, k); the scales are (E, m / 128, k / 128)."""
    blocks = weights.float().unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax((2, 4)).clamp(min=1e-30) / LARGEST
    codes = (blocks / scales[:, :, None, :, None]).to(F8)
    return codes.flatten(3, 4).flatten(1, 2), scales


def cast_transposed(weights):
    return cast_weights(weights.transpose(1, 2).contiguous())


def gather_cast(x, token):
    return cast_rows(x[token])


def act_cast(h):
    return cast_rows(swiglu(h))


def back_cast(h, da, score):
    """dH, its codes and scales, the activation times the score, and the score's gradient."""
    dh, scaled, dscore = act_backward(h, da, score)
    return dh, cast_rows(dh), scaled, dscore


def product(rows, weights, expert):
    """Rows (C, k) times the transposed weights (E, m, k) of their expert, in bf16. Both are
    (codes, scales)."""
    out = torch.empty(rows[0].shape[0], weights[0].shape[1], dtype=BF, device=expert.device)
    if expert.is_cuda:
        from deep_gemm import m_grouped_fp8_gemm_nt_contiguous

        m_grouped_fp8_gemm_nt_contiguous(rows, weights, out, expert)
        return out
    # The package needs a GPU: the same numbers, expert by expert.
    values = rows[0].float() * rows[1].repeat_interleave(BLOCK, 1)
    for e, (codes, scales) in enumerate(zip(*weights, strict=True)):
        scales = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        out[expert == e] = (values[expert == e] @ (codes.float() * scales).T).to(BF)
    return out


def version() -> dict:
    """{"deep_gemm": the package's version}, empty if it cannot be imported."""
    try:
        import deep_gemm
    except (ImportError, OSError):
        return {}
    return {"deep_gemm": deep_gemm.__version__}


def alignment(device):
    if device.type != "cuda":
        return DEPTH
    from deep_gemm import get_mk_alignment_for_contiguous_layout

    return int(get_mk_alignment_for_contiguous_layout())


class Parts:
    """The operations between the products, compiled."""

    def __init__(self):
        self.arrange, self.take, self.take_cast, self.act = map(
            torch.compile, (arrange, gather, gather_cast, act_cast)
        )
        self.weigh, self.add, self.back = map(torch.compile, (combine, add_up, back_cast))
        self.cast, self.cast_transposed = map(torch.compile, (cast_weights, cast_transposed))


class BlocksLayer:
    """(x, logits, w_up, w_down) -> out, with the weights' codes that quantise() made."""

    def __init__(self, shape, device):
        self.shape, self.parts, self.alignment = shape, Parts(), alignment(device)

    def quantise(self, w_up, w_down):
        weights = (w_up.detach(), w_down.detach())
        self.up, self.down = map(self.parts.cast, weights)
        self.up_transposed, self.down_transposed = map(self.parts.cast_transposed, weights)

    def __call__(self, x, logits, w_up, w_down):
        ids, weights = topk_softmax(logits, self.shape.K)
        return Blocks.apply(self, x, ids, weights, w_up, w_down)


class Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, ids, weights, _w_up, _w_down):
        parts = layer.parts
        rows = parts.arrange(ids, layer.shape.E, layer.alignment)
        h = product(parts.take_cast(x, rows.token), layer.up, rows.expert)
        y = product(parts.act(h), layer.down, rows.expert)
        ctx.layer = layer
        ctx.save_for_backward(x, weights, h, *rows)
        return parts.weigh(y, rows.row_of_slot, weights)

    @staticmethod
    def backward(ctx, dout):
        layer, parts = ctx.layer, ctx.layer.parts
        x, weights, h, *rows = ctx.saved_tensors
        rows = Rows(*rows)
        ends = rows.sizes.cumsum(0).to(torch.int32)
        score = torch.zeros(h.shape[0], device=h.device)
        score = score.scatter(0, rows.row_of_slot.flatten(), weights.flatten()).unsqueeze(-1)
        da = product(parts.take_cast(dout, rows.token), layer.down_transposed, rows.expert)
        dh, dh_cast, scaled, dscore = parts.back(h, da, score)
        dx = parts.add(product(dh_cast, layer.up_transposed, rows.expert), rows.row_of_slot)
        dw_down = product_over_rows(parts.take(dout, rows.token), scaled, ends)
        dw_up = product_over_rows(dh, parts.take(x, rows.token), ends)
        return None, dx, None, dscore[rows.row_of_slot], dw_up, dw_down
