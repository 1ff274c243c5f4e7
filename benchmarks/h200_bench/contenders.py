"""The other contenders: the cuBLAS reference, and layers called as in training code."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import packages
from .loop import loop_layer

BF = torch.bfloat16


class Bound:
    """cuBLAS batched products on balanced, already gathered tokens, activation, sum over K.

    It has no routing, so it is a reference and no usable layer. Its weights are the library's
    memory with other strides; their values are equally random.
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

    def sample(self):
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


class Forward:
    """A layer (x, logits, w_up, w_down) -> out, forward only."""

    def __init__(self, data, layer):
        self.data, self.layer = data, layer
        self.up_first = getattr(layer, "up_first", False)
        w_up = data.w_up.clone() if self.up_first else data.w_up
        self.leaves = [data.x, data.logits, w_up, data.w_down]
        self.sample()

    def sample(self):
        """Copies w_up if the layer has its own order; the other leaves are the data's tensors."""
        if self.up_first:
            with torch.no_grad():
                self.leaves[2].copy_(swap_halves(self.data.w_up))

    def forward(self):
        return self.layer(*self.leaves)

    def results(self):
        """(out, gradients) of one call, with the data's order of gate and up."""
        return self.forward(), None


class Autograd(Forward):
    """A differentiable layer, called as in training code."""

    def __init__(self, data, layer):
        super().__init__(data, layer)
        self.leaves = [t.detach().requires_grad_() for t in self.leaves]

    def both(self):
        out = self.layer(*self.leaves)
        return out, torch.autograd.grad(out, self.leaves, self.data.dout)

    def results(self):
        out, (dx, dlogits, dw_up, dw_down) = self.both()
        return out, (dx, dlogits, swap_halves(dw_up) if self.up_first else dw_up, dw_down)


class ByExpert(Autograd):
    """A differentiable layer whose weights are two lists, with a tensor for each expert."""

    def __init__(self, data, layer):
        super().__init__(data, layer)
        x, logits, *weights = self.leaves
        self.experts = data.shape.E
        each = (w.detach().requires_grad_() for both in weights for w in both.detach().unbind())
        self.leaves = [x, logits, *each]

    def forward(self):
        x, logits, *experts = self.leaves
        return self.layer(x, logits, experts[: self.experts], experts[self.experts :])

    def both(self):
        out = self.forward()
        grads = torch.autograd.grad(out, self.leaves, self.data.dout, allow_unused=True)
        return out, grads

    def results(self):
        out, (dx, dlogits, *experts) = self.both()
        filled = [
            torch.zeros_like(w) if g is None else g
            for w, g in zip(self.leaves[2:], experts, strict=True)
        ]
        ups, downs = filled[: self.experts], filled[self.experts :]
        return out, (dx, dlogits, torch.stack(ups), torch.stack(downs))


def contender(data, layer):
    """A layer as a contender. Its attribute `no_backward`, if any, says why only forward is
    timed; with `by_expert` it takes lists of the experts' weights."""
    if getattr(layer, "by_expert", False):
        return ByExpert(data, layer)
    return (Forward if getattr(layer, "no_backward", None) else Autograd)(data, layer)


def swap_halves(w_up):
    """Swaps gate and up: [gate; up] of every expert to [up; gate], or the inverse."""
    return torch.cat(w_up.chunk(2, dim=1)[::-1], dim=1)


def grouped_mm_layer(shape):
    """Sort, gather, grouped_mm, SwiGLU, grouped_mm, weight, sum: the usual model code."""
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
    """This library's PyTorch package; raises ImportError with the reason if it cannot be used."""
    import sonicmoe_cpp

    reason = sonicmoe_cpp.unsupported_reason(device)
    if reason is not None:
        raise ImportError(reason)

    def layer(x, logits, w_up, w_down):
        ids, weights = sonicmoe_cpp.route(logits, shape.K)
        return sonicmoe_cpp.moe(x, ids, weights, w_up, w_down)

    return layer


# Layers by name: make(shape) gives (x, logits, w_up, w_down) -> out and raises ImportError if the
# package is not installed. A layer with `up_first` gets w_up as [up; gate].
LAYERS = {
    "torch": grouped_mm_layer,
    "loop": loop_layer,
    "ours_torch": torch_front_end,
    **packages.LAYERS,
}
