"""A decoder-only language model whose feed-forward layers are sonicmoe_cpp.MoE."""

import torch
import torch.nn.functional as F
from sonicmoe_cpp import MoE
from torch import nn

from lm.config import Config
from lm.device import autocast
from lm.errors import TrainingFailed

ROUTINGS = {"topk": "topk", "rounded": "token_rounding"}


def rotary_table(context: int, head_width: int) -> torch.Tensor:
    """Cosines and sines of the rotary position embedding, (2, context, head_width / 2) in fp32."""
    frequency = 10000.0 ** (-torch.arange(0, head_width, 2).double() / head_width)
    angle = torch.arange(context).double()[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (x[i], x[i + half]) of every head by the angles of their position."""
    cos, sin = table[:, : x.shape[-2]].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            rotate(q, table), rotate(k, table), v, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def main_gradients(moe: MoE) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The experts' .grad in fp32, for backward to add to in place.

    Without these buffers autocast's bf16 weights would get bf16 gradients, which would then be cast
    and added.
    """
    if not torch.is_grad_enabled():
        return None
    for weight in (moe.w_up, moe.w_down):
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    return moe.w_up.grad, moe.w_down.grad


class Block(nn.Module):
    """Attention, then a mixture of experts; each has a norm before it and a residual."""

    def __init__(self, config: Config, routing: str):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config.width, config.heads)
        self.moe_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.moe = MoE(
            config.experts,
            config.top_k,
            config.width,
            config.expert_width,
            routing=routing,
            tile=config.tile,
            rounding=config.rounding,
            lb_coef=config.lb_coef,
            z_coef=config.z_coef,
            precision="fp8" if config.precision == "fp8" else None,
        )

    def forward(self, x: torch.Tensor, table: torch.Tensor):
        x = x + self.attention(self.attention_norm(x), table)
        out, aux = self.moe(self.moe_norm(x), grad_accum=main_gradients(self.moe))
        return x + out, aux


class LanguageModel(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocab)."""

    def __init__(self, config: Config, routing: str):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, routing) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        table = rotary_table(config.context, config.width // config.heads)
        self.register_buffer("table", table, persistent=False)
        self._initialise(config)

    @torch.no_grad()
    def _initialise(self, config: Config) -> None:
        """Matrices keep the variance of their input; residual branches start smaller, and the head
        is zero."""
        branch = (2 * config.layers) ** -0.5
        nn.init.normal_(self.embedding.weight)
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            nn.init.normal_(block.attention.qkv.weight, std=config.width**-0.5)
            nn.init.normal_(block.attention.out.weight, std=branch * config.width**-0.5)
            nn.init.normal_(block.moe.router.weight, std=config.width**-0.5)
            nn.init.normal_(block.moe.w_up, std=config.width**-0.5)
            nn.init.normal_(block.moe.w_down, std=branch * config.expert_width**-0.5)

    def forward(self, tokens: torch.Tensor):
        x = self.embedding(tokens)
        auxes = []
        for block in self.blocks:
            x, aux = block(x, self.table)
            auxes.append(aux)
        return self.head(self.norm(x)), auxes


def build(config: Config, run: str) -> LanguageModel:
    """The model of a run. Both runs start from the same weights, on every device."""
    torch.manual_seed(config.seed)
    return LanguageModel(config, ROUTINGS[run]).to(config.device)


@torch.no_grad()
def generate(model: LanguageModel, prompt: list[int], count: int, config: Config) -> list[int]:
    """Samples `count` tokens after the prompt at temperature 0.8, the same for the same seed."""
    model.eval()
    generator = torch.Generator().manual_seed(config.seed)
    tokens = list(prompt)
    for _ in range(count):
        with autocast(config.device, config.precision):
            logits, _ = model(torch.tensor([tokens[-config.context :]], device=config.device))
        weights = torch.softmax(logits[0, -1].float().cpu() / 0.8, dim=-1)
        if not weights.isfinite().all():
            raise TrainingFailed("the model's logits are not finite: no sample can be written")
        tokens.append(int(torch.multinomial(weights, 1, generator=generator)))
    return tokens
