"""The language model of the studies: dense parts that torch.compile fuses, experts of this library.

Parameters are fp32 and products bf16 on a GPU. Token rounding is done for each micro-batch of a
step, and the pairs of all micro-batches go through one call of the layer. This is what gradient
accumulation over these micro-batches computes, in less time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lm.model import main_gradients, rotary_table, rotate
from sonicmoe_cpp import MoE, Pairs, moe_pairs, route, router_losses, token_round
from torch import Tensor, nn

from quality.settings import ARCHITECTURES, SIZES, Architecture, Size


@dataclass(frozen=True)
class Rule:
    """Token rounding of micro-batches of `group` tokens."""

    mode: str
    tile: int
    group: int


class Routed(NamedTuple):
    """The experts' output of a layer, its loss, and the rows of the experts."""

    out: Tensor  # (T, d)
    loss: Tensor  # ()
    counts: Tensor  # (E,) rows of top-K
    # If rounded: the experts of top-K, (P, T/P * K) for P micro-batches, and (P, E + 1) the offsets
    # of their pairs.
    ids: Tensor | None = None
    offsets: Tensor | None = None


def attend(x: Tensor, weights: tuple[Tensor, ...], table: Tensor, heads: int) -> tuple:
    """(x + attention(norm(x)), norm of that) for x (B, S, d)."""
    norm, qkv, out, second_norm = (w.to(x.dtype) for w in weights)
    batch, length, width = x.shape
    rows = F.linear(F.rms_norm(x, (width,), norm, 1e-6), qkv)
    q, k, v = rows.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, is_causal=True)
    x = x + F.linear(mixed.transpose(1, 2).reshape(batch, length, width), out)
    return x, F.rms_norm(x, (width,), second_norm, 1e-6)


def join(x: Tensor, experts: Tensor, rows: Tensor, shared: tuple[Tensor, Tensor] | None) -> Tensor:
    """x + experts' output + the output of the shared expert."""
    x = x + experts
    if shared is None:
        return x
    up, down = (w.to(x.dtype) for w in shared)
    gate, value = F.linear(rows, up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * value, down)


def cross_entropy(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean nats a token."""
    x = F.rms_norm(x, (x.shape[-1],), norm.to(x.dtype), 1e-6)
    logits = F.linear(x, head.to(x.dtype)).flatten(0, 1)
    return F.cross_entropy(logits.float(), targets.flatten())


class Parts(NamedTuple):
    """The dense functions, compiled or not."""

    attend: Callable
    join: Callable
    cross_entropy: Callable


EAGER = Parts(attend, join, cross_entropy)


def compiled() -> Parts:
    """The dense functions compiled; all models of a process share them."""
    torch._dynamo.config.recompile_limit = 64
    return Parts(*(torch.compile(part, dynamic=False, fullgraph=True) for part in EAGER))


def joined(parts: list[Pairs], group: int) -> Pairs:
    """The pairs of consecutive micro-batches as one list. moe_pairs() takes any order."""
    token = torch.cat([p.token + i * group for i, p in enumerate(parts)])
    expert, weight = (torch.cat([getattr(p, of) for p in parts]) for of in ("expert", "weight"))
    return Pairs(token, expert, weight, sum(p.offsets for p in parts))


def changed_rows(routed: Routed) -> Tensor:
    """(2,): rows that rounding added to top-K's and dropped, in all micro-batches."""
    if routed.ids is None:
        return torch.zeros(2, dtype=torch.int64, device=routed.counts.device)
    rows = routed.offsets.diff()
    chosen = torch.zeros_like(rows).scatter_add(1, routed.ids, torch.ones_like(routed.ids))
    more = rows - chosen
    return torch.stack([more.clamp(min=0).sum(), (-more).clamp(min=0).sum()])


def run_experts(moe: MoE, rows: Tensor, rule: Rule | None) -> Routed:
    """The layer for rows (T, d): with top-K, or with token rounding in each micro-batch."""
    accum = None if moe.lora is not None or not moe.w_up.requires_grad else main_gradients(moe)
    if rule is None:
        out, aux = moe(rows, grad_accum=accum)
        return Routed(out, aux.loss, aux.tokens_per_expert)
    logits = moe.router(rows)
    options = moe.route_options | {"bias": moe.selection_bias}
    ids, _ = route(logits.detach(), moe.top_k, **options)
    balance, z, counts = router_losses(logits, ids, **options)
    seeds = torch.randint(2**62, (), device="cpu") if rule.mode == "stochastic" else None
    parts = []
    for i, part in enumerate(logits.split(rule.group)):
        seed = 0 if seeds is None else seeds + i
        parts.append(
            token_round(part, moe.top_k, tile=rule.tile, mode=rule.mode, seed=seed, **options)
        )
    pairs = parts[0] if len(parts) == 1 else joined(parts, rule.group)
    out = moe_pairs(rows, pairs, moe.w_up, moe.w_down, grad_accum=accum)
    loss = moe.lb_coef * balance + moe.z_coef * z
    return Routed(
        out, loss, counts, ids.view(len(parts), -1), torch.stack([p.offsets for p in parts])
    )


class Block(nn.Module):
    """The parameters of a layer; Model computes with them."""

    def __init__(self, size: Size, architecture: Architecture):
        super().__init__()
        d, n = size.width, size.expert_rows // architecture.experts
        self.attention_norm = nn.Parameter(torch.ones(d))
        self.moe_norm = nn.Parameter(torch.ones(d))
        self.qkv = nn.Parameter(torch.empty(3 * d, d))
        self.out = nn.Parameter(torch.empty(d, d))
        a = architecture
        self.moe = MoE(
            a.experts,
            a.top_k,
            d,
            n,
            score=a.score,
            renormalize=a.renormalize,
            scale=a.scale,
            n_group=a.n_group,
            topk_group=a.topk_group,
            selection_bias=a.selection_bias,
            lb_coef=a.lb_coef,
            z_coef=a.z_coef,
            router_dtype=torch.float32,
        )
        self.shared_up = nn.Parameter(torch.empty(2 * n, d)) if a.shared else None
        self.shared_down = nn.Parameter(torch.empty(d, n)) if a.shared else None
        branch = (2 * size.layers) ** -0.5
        matrices = [(self.qkv, 1.0), (self.out, branch), (self.moe.w_down, branch)]
        matrices += [(self.shared_up, 1.0), (self.shared_down, branch)] if a.shared else []
        for weight, scale in matrices:
            nn.init.normal_(weight, std=scale * weight.shape[-1] ** -0.5)

    def dense(self) -> tuple[Tensor, ...]:
        return self.attention_norm, self.qkv, self.out, self.moe_norm

    def shared(self) -> tuple[Tensor, Tensor] | None:
        return None if self.shared_up is None else (self.shared_up, self.shared_down)


class Model(nn.Module):
    """Tokens (batch, length) and targets to the mean loss of a token."""

    def __init__(self, size: str, architecture: str, vocab: int, parts: Parts = EAGER):
        super().__init__()
        self.size, self.parts = SIZES[size], parts
        width = self.size.width
        self.embedding = nn.Parameter(torch.empty(vocab, width))
        self.head = nn.Parameter(torch.zeros(vocab, width))
        self.norm = nn.Parameter(torch.ones(width))
        nn.init.normal_(self.embedding)
        self.blocks = nn.ModuleList(
            Block(self.size, ARCHITECTURES[architecture]) for _ in range(self.size.layers)
        )
        table = rotary_table(self.size.context, width // self.size.heads)
        self.register_buffer("table", table, persistent=False)

    def forward(
        self, inputs: Tensor, targets: Tensor, rule: Rule | None
    ) -> tuple[Tensor, list[Routed]]:
        half = inputs.device.type == "cuda"
        x = F.embedding(inputs, self.embedding)
        x = x.bfloat16() if half else x
        layers = []
        for block in self.blocks:
            x, normed = self.parts.attend(x, block.dense(), self.table, self.size.heads)
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=half):
                found = run_experts(block.moe, normed.flatten(0, 1), rule)
            x = self.parts.join(x, found.out.view(x.shape), normed, block.shared())
            layers.append(found)
        return self.parts.cross_entropy(x, self.norm, self.head, targets), layers


def count_parameters(model: nn.Module) -> dict[str, Any]:
    total = sum(p.numel() for p in model.parameters())
    return {
        "total": total,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
