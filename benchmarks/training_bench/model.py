"""A decoder around torchtitan's MoE, with torchtitan's own experts or this library's.

Only layers of torchtitan 0.3 are imported (models.common, config.override, activation
checkpointing), so that it runs with torch 2.11, with which torchtitan's models and trainer do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sonicmoe_cpp.integrations.torchtitan.sizes import Size
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtitan.config.configurable import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

OVERRIDES = "sonicmoe_cpp.integrations.torchtitan.overrides"
OURS = [f"{OVERRIDES}.{name}" for name in ("routed_experts", "router", "selective_ac")]
# Of activation checkpointing. "selective" is torchtitan's default; "attention" keeps the results of
# attention alone, "attention+H" also what this library's forward keeps.
POLICIES = ("none", "selective", "attention+H", "attention", "full")
DENSE = ["wqkv", "wo", "moe.router.gate"]  # "attention" computes their products again
# cuDNN's attention is the fastest on Hopper; the others serve what it does not.
ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Job(Configurable):
    """The configuration that overrides change: a layer's MoE and the policy of checkpointing."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        moe: MoE.Config
        checkpointing: SelectiveAC.Config | FullAC.Config | None = None


def job(size: Size, ours: bool, policy: str) -> Job.Config:
    experts = GroupedExperts.Config(dim=size.d, hidden_dim=size.n, num_experts=size.E)
    dispatcher = LocalTokenDispatcher.Config(num_experts=size.E, top_k=size.K)
    router = TokenChoiceTopKRouter.Config(
        num_experts=size.E,
        gate=Linear.Config(in_features=size.d, out_features=size.E),
        top_k=size.K,
        score_func="sigmoid",
        route_norm=True,
    )
    policies = {
        "none": None,
        "selective": SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[]),
        "attention+H": SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=DENSE),
        "attention": SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=DENSE),
        "full": FullAC.Config(),
    }
    config = Job.Config(
        moe=MoE.Config(
            num_experts=size.E,
            routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
            router=router,
        ),
        checkpointing=policies[policy],
    )
    if ours:
        keeps_h = policy in ("selective", "attention+H")
        names = [name for name in OURS if keeps_h or "selective" not in name]
        apply_overrides(OverrideConfig(imports=names), config)
    return config


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, L, heads, head); cos and sin (L, 1, head / 2)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size: Size, moe: nn.Module):
        super().__init__()
        self.heads, head = size.heads, size.d // size.heads
        self.attention_norm, self.ffn_norm = Norm(size.d), Norm(size.d)
        self.query_norm, self.key_norm = Norm(head), Norm(head)
        self.wqkv = nn.Linear(size.d, 3 * size.d, bias=False)
        self.wo = nn.Linear(size.d, size.d, bias=False)
        self.moe = moe

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, L, d = x.shape
        q, k, v = self.wqkv(x).view(B, L, 3, self.heads, d // self.heads).unbind(2)
        q, k = rotate(self.query_norm(q), cos, sin), rotate(self.key_norm(k), cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(ATTENTION, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(B, L, d))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.moe(self.ffn_norm(x))


def chunk_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the losses, its gradient in the logits), of logits (rows, vocabulary)."""
    values = logits.float()
    lse = values.logsumexp(-1, keepdim=True)
    loss = (lse - values.gather(1, labels[:, None])).sum()
    chosen = torch.arange(values.shape[1], device=values.device) == labels[:, None]
    return loss, ((values - lse).exp() - chosen.float()).to(logits.dtype)


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of the logits h W^T. The forward computes the loss and its gradients by
    chunks of rows, because all logits at once would be the largest tensor of the step."""

    CHUNKS = 8
    gradient = staticmethod(chunk_gradient)

    @staticmethod
    def forward(ctx, h, weight, labels):
        dh, dw = torch.empty_like(h), torch.zeros_like(weight, dtype=torch.float32)
        total = h.new_zeros((), dtype=torch.float32)
        parts = zip(*(t.chunk(ChunkedLoss.CHUNKS) for t in (h, labels, dh)), strict=True)
        for rows, wanted, gradient in parts:
            loss, dlogits = ChunkedLoss.gradient(rows @ weight.T, wanted)
            total += loss
            gradient.copy_(dlogits @ weight)
            dw += dlogits.T @ rows
        ctx.save_for_backward(dh / len(h), (dw / len(h)).to(weight.dtype))
        return total / len(h)

    @staticmethod
    def backward(ctx, dloss):
        dh, dw = ctx.saved_tensors
        return dh * dloss, dw * dloss, None


class Model(nn.Module):
    def __init__(self, size: Size, config: Job.Config, sequence: int):
        super().__init__()
        self.size, self.sequence = size, sequence
        self.embeddings = nn.Embedding(size.vocabulary, size.d)
        self.layers = nn.ModuleList(Block(size, config.moe.build()) for _ in range(size.layers))
        self.norm = Norm(size.d)
        self.head = nn.Linear(size.d, size.vocabulary, bias=False)

    def rope(self, device) -> tuple[Tensor, Tensor]:
        half = self.size.d // self.size.heads // 2
        frequencies = 1e6 ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(self.sequence, device=device)[:, None, None] * frequencies
        return angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The mean loss of (B, sequence + 1) tokens."""
        h = self.embeddings(tokens[:, :-1])
        for layer in self.layers:
            h = layer(h, cos, sin)
        rows = self.norm(h).flatten(0, 1)
        return ChunkedLoss.apply(rows, self.head.weight, tokens[:, 1:].flatten())

    def flops_per_token(self) -> float:
        """Of forward and backward: 6 a parameter that multiplies the token, and attention's
        products over the causal half. Recomputation is not counted."""
        s = self.size
        layer = 4 * s.d * s.d + s.d * s.E + 3 * s.K * s.d * s.n
        attention = 6 * s.layers * s.d * self.sequence
        return 6 * (s.layers * layer + s.d * s.vocabulary) + attention
