"""Linear layers of attention in NF4, without another package than this library."""

import torch
import torch.nn.functional as F
from lm.errors import UserError
from sonicmoe_cpp import packed
from torch import nn


class _Multiply(torch.autograd.Function):
    """x W^T + b of a PackedLinear. Backward unpacks the weight again."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.layer.weight, None


class PackedLinear(nn.Linear):
    """A linear layer whose weight is frozen and packed. `weight` unpacks it in each access."""

    def __init__(self, weights: packed.PackedWeights, bias: nn.Parameter | None):
        """weights: (1, out, in)."""
        nn.Module.__init__(self)
        _, self.out_features, self.in_features = weights.shape
        self.packed = packed.PackedExperts(weights)
        self.bias = bias

    @property
    def weight(self) -> torch.Tensor:
        return self.packed().unpack()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Multiply.apply(x, self)


def attention_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of attention by name."""
    modules = model.named_modules()
    found = {name: m for name, m in modules if isinstance(m, nn.Linear) and "attn" in name}
    if not found:
        raise UserError("the model has no linear layers whose names contain attn")
    return found


def replace(model: nn.Module, make) -> None:
    """Packs attention: make(weight) gives PackedWeights (1, out, in)."""
    for name, linear in attention_of(model).items():
        path, _, own = name.rpartition(".")
        layer = PackedLinear(make(linear.weight), linear.bias)
        setattr(model.get_submodule(path), own, layer)


def pack(model: nn.Module) -> None:
    replace(model, lambda weight: packed.pack_nf4(weight.detach()[None]))


def packed_layers(model: nn.Module) -> list[packed.PackedWeights]:
    return [m.packed() for m in model.modules() if isinstance(m, PackedLinear)]
