"""What the library is timed beside: the cuBLAS bound and the compiled grouped_mm layer."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F

BF = torch.bfloat16


class Bound:
    """cuBLAS batched products on balanced, already gathered tokens, activation, sum over K.

    Nobody can use it, there is no routing: a bound. Its weights are the library's memory under
    other strides, which is as random.
    """

    def __init__(self, data):
        s = self.shape = data.shape
        T, d, n, E, K = s.T, s.d, s.n, s.E, s.K
        if T * K % E:
            raise ValueError(
                f"T*K is {T * K}, must be a multiple of E = {E}: the bound is balanced"
            )
        rows = T * K // E
        self.w1, self.w2 = data.w_up.view(E, d, 2 * n), data.w_down.view(E, n, d)
        self.xe, self.doe = (torch.empty(E, rows, d, dtype=BF, device=data.device) for _ in "ab")
        self.score = torch.empty(E * rows, 1, device=data.device)
        self.h = None

        def act(h):
            return F.silu(h[..., :n]) * h[..., n:]

        def aggregate(y, score):
            return (y.view(T, K, d).float() * score.view(T, K, 1)).sum(1).to(BF)

        def aggregate_plain(y):
            return y.view(T, K, d).float().sum(1).to(BF)

        def act_backward(h, da, score):
            gate, up, da = h[..., :n].float(), h[..., n:].float(), da.float()
            sigmoid = torch.sigmoid(gate)
            silu = gate * sigmoid
            a, scaled = silu * up, da * score.view(E, rows, 1)
            dgate = scaled * up * sigmoid * (1 + gate * (1 - sigmoid))
            dh = torch.cat([dgate, scaled * silu], -1).to(BF)
            return dh, (a * score.view(E, rows, 1)).to(BF), (a * da).sum(-1)

        self.act, self.act_backward = torch.compile(act), torch.compile(act_backward)
        self.aggregate = torch.compile(aggregate)
        self.aggregate_plain = torch.compile(aggregate_plain)

    def draw(self):
        self.xe.normal_()
        self.doe.normal_()
        self.score.uniform_()

    def forward(self):
        self.h = torch.bmm(self.xe, self.w1)
        y = torch.bmm(self.act(self.h), self.w2)
        return self.aggregate(y.view(-1, self.shape.d), self.score)

    def backward(self):
        da = torch.bmm(self.doe, self.w2.transpose(1, 2))
        dh, scaled, _ = self.act_backward(self.h, da, self.score)
        dw2 = torch.bmm(scaled.transpose(1, 2), self.doe)
        dxe = torch.bmm(dh, self.w1.transpose(1, 2))
        dw1 = torch.bmm(self.xe.transpose(1, 2), dh)
        return dw1, dw2, self.aggregate_plain(dxe.view(-1, self.shape.d))


class Autograd:
    """A differentiable layer (x, logits, w_up, w_down) -> out, called as training code would."""

    def __init__(self, data, layer):
        self.data, self.layer = data, layer
        self.leaves = [data.x, data.logits, data.w_up, data.w_down]
        self.leaves = [t.detach().requires_grad_() for t in self.leaves]

    def draw(self):
        """Its leaves are the data's memory."""

    def forward(self):
        return self.layer(*self.leaves)

    def both(self):
        out = self.layer(*self.leaves)
        return out, torch.autograd.grad(out, self.leaves, self.data.dout)


def grouped_mm_layer(shape):
    """Sort, gather, grouped_mm, SwiGLU, grouped_mm, weight, sum: what model code does today."""
    n, E, K = shape.n, shape.E, shape.K
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def layer(x, logits, w_up, w_down):
        chosen, ids = logits.topk(K, dim=-1)
        weights = F.softmax(chosen.float(), dim=-1)
        order = ids.flatten().argsort()
        inverse, token = order.argsort(), order // K
        counts = torch.histc(ids.flatten().float(), bins=E, min=0, max=E - 1)
        offsets = counts.cumsum(0).to(torch.int32)
        h = grouped_mm(x[token], w_up.transpose(1, 2), offs=offsets)
        a = F.silu(h[:, :n]) * h[:, n:]
        y = grouped_mm(a, w_down.transpose(1, 2), offs=offsets)
        y = y * weights.flatten()[order].unsqueeze(-1).to(BF)
        return y[inverse].view(x.shape[0], K, -1).sum(1)

    return torch.compile(layer)


def torch_front_end(shape, device="cuda"):
    """This library through its PyTorch package, or why that cannot be."""
    import sonicmoe_cpp

    reason = sonicmoe_cpp.unsupported_reason(device)
    if reason is not None:
        raise ImportError(reason)

    def layer(x, logits, w_up, w_down):
        ids, weights = sonicmoe_cpp.route(logits, shape.K)
        return sonicmoe_cpp.moe(x, ids, weights, w_up, w_down)

    return layer


def topk_softmax(logits, k):
    chosen, ids = logits.topk(k, dim=-1)
    return ids, F.softmax(chosen.float(), dim=-1)


def transformers_layer(shape):
    """The grouped_mm experts of Hugging Face transformers 5, as its models call them."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    experts = types.SimpleNamespace(
        num_experts=shape.E,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        is_concatenated=True,
        _is_expert_parallel=False,
        _apply_gate=lambda h: F.silu(h[..., : shape.n]) * h[..., shape.n :],
    )

    def layer(x, logits, w_up, w_down):
        experts.gate_up_proj, experts.down_proj = w_up, w_down
        ids, weights = topk_softmax(logits, shape.K)
        return grouped_mm_experts_forward(experts, x, ids, weights.to(x.dtype))

    return layer


def sonicmoe_layer(shape):
    """The package sonicmoe (github.com/Dao-AILab/sonic-moe), on lists of routed pairs."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    def layer(x, logits, w_up, w_down):
        ids, weights = topk_softmax(logits, shape.K)
        token = torch.arange(shape.T, device=x.device, dtype=torch.int32)
        out, _ = moe_general_routing_inputs(
            x,
            weights.flatten(),
            token.repeat_interleave(shape.K),
            ids.flatten().to(torch.int32),
            w_up.permute(1, 2, 0),
            None,
            w_down.permute(1, 2, 0),
            None,
            shape.E,
            None,
            ActivationType.SWIGLU,
            concat_layout=True,
        )
        return out

    return layer


def scattermoe_layer(shape):
    """The grouped products of the package scattermoe (github.com/shawntan/scattermoe) around a
    SwiGLU: its own layer takes the gate as the second half."""
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    def layer(x, logits, w_up, w_down):
        ids, weights = topk_softmax(logits, shape.K)
        order = flatten_sort_count(ids, num_experts=shape.E)  # experts, pairs, ends of experts
        up, down = w_up.transpose(1, 2), w_down.transpose(1, 2)
        h = parallel_linear(x, up, shape.K, *order, grouped_out=True)
        gate, linear = h.chunk(2, dim=-1)
        a = F.silu(gate) * linear
        return parallel_linear(a, down, 1, *order, grouped_in=True, gates=weights.to(x.dtype))

    return layer


# Layers (x, logits, w_up, w_down) -> out by name; what is not installed raises ImportError.
LAYERS = {
    "torch": grouped_mm_layer,
    "ours_torch": torch_front_end,
    "transformers": transformers_layer,
    "sonicmoe": sonicmoe_layer,
    "scattermoe": scattermoe_layer,
}
# Known peers without an adapter here: named, not timed. DeepGEMM has products, no layer.
NOT_ADAPTED = {"momoe": "momoe", "DeepGEMM": "deep_gemm"}
