"""The whole layer as a module: router, experts and the router's losses."""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import _checks
from ._names import GATED
from .layer import LAYOUTS, Activation, _activation, autocast_dtype, moe, moe_pairs
from .lora import LoRA, lora_moe, new_factors
from .routing import MODES, SCORES, route, router_losses, token_round

ROUTINGS = ("topk", "token_rounding")


class MoEAux(NamedTuple):
    """What a MoE says beside its output."""

    loss: Tensor  # () lb_coef * load_balancing + z_coef * z: add it to the model's loss
    load_balancing: Tensor  # ()
    z: Tensor  # ()
    tokens_per_expert: Tensor  # (E,) int64, the top-k choice before rounding
    logits: Tensor  # (T, E)


@functools.cache
def _warn_few_tokens(num_experts: int, top_k: int, tile: int) -> None:
    warnings.warn(
        f"token rounding needs T*K >= E*tile/2 = {num_experts * tile // 2} rows "
        f"(E={num_experts}, K={top_k}, tile={tile}): smaller batches use plain top-k",
        stacklevel=3,
    )


class MoE(nn.Module):
    """A router and E experts, K of them a token. forward(x) returns (out, MoEAux).

    routing="token_rounding" rounds every expert's tokens to multiples of `tile` by `rounding` while
    training; evaluation always uses plain top-k, and so do batches with T*K < E*tile/2 (with one
    warning, which compiled code leaves out). rounding="stochastic" draws its seed from torch's
    CPU generator on every step (torch.manual_seed reproduces a run, and recomputation under
    activation checkpointing sees the same draw); `seed` is mixed in.

    Parameters: router.weight (E, d), w_up (E, G*n, d), w_down (E, d, n) and, with bias=True,
    b_up (E, G*n), b_down (E, d). gate_layout says where gate and up lie in w_up and b_up.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        gate_layout: str = "concatenated",
        routing: str = "topk",
        score: str = "softmax_after_topk",
        renormalize: bool = False,
        scale: float = 1.0,
        n_group: int | None = None,
        topk_group: int | None = None,
        tile: int = 128,
        rounding: str = "nearest",
        seed: int = 0,
        lb_coef: float = 0.0,
        z_coef: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size}
        sizes |= {"intermediate_size": intermediate_size, "tile": tile}
        _checks.integer("top_k", top_k)
        for name, size in sizes.items():
            _checks.integer(name, size)
            if size < 1:
                raise ValueError(f"{name} is {size}, must be at least 1")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k is {top_k}, must be between 1 and num_experts = {num_experts}")
        for name, value, allowed in (
            ("gate_layout", gate_layout, LAYOUTS),
            ("routing", routing, ROUTINGS),
            ("score", score, SCORES),
            ("rounding", rounding, MODES),
        ):
            _checks.one_of(name, value, allowed)
        self.num_experts = num_experts
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = _activation(activation)
        self.gate_layout = gate_layout
        self.routing = routing
        self.route_options = {"score": score, "renormalize": renormalize, "scale": scale}
        self.route_options |= {"n_group": n_group, "topk_group": topk_group}
        self.tile = tile
        self.rounding = rounding
        self.seed = seed
        self.lb_coef = lb_coef
        self.z_coef = z_coef

        where = {"device": device, "dtype": dtype}
        rows = intermediate_size * (2 if self.activation.name in GATED else 1)
        self.router = nn.Linear(hidden_size, num_experts, bias=False, **where)
        self.w_up = nn.Parameter(torch.empty(num_experts, rows, hidden_size, **where))
        self.w_down = nn.Parameter(
            torch.empty(num_experts, hidden_size, intermediate_size, **where)
        )
        if bias:
            self.b_up = nn.Parameter(torch.empty(num_experts, rows, **where))
            self.b_down = nn.Parameter(torch.empty(num_experts, hidden_size, **where))
        else:
            self.register_parameter("b_up", None)
            self.register_parameter("b_down", None)
        self.lora: LoRA | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights ~ N(0, 1/fan_in), router too; biases zero."""
        for weight in (self.router.weight, self.w_up, self.w_down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        for bias in (self.b_up, self.b_down):
            if bias is not None:
                nn.init.zeros_(bias)

    def add_lora(self, rank: int, alpha: float, *, dtype=None) -> None:
        """Freezes the experts and trains low-rank factors beside them: parameters lora.*.

        scale = alpha / rank. Not for routing="token_rounding".
        """
        if self.routing == "token_rounding":
            raise NotImplementedError(
                'routing is "token_rounding", low-rank factors need routing="topk"'
            )
        self.lora = new_factors(self, (self.w_up, self.w_down), rank, alpha, dtype)
        for parameter in (self.w_up, self.w_down, self.b_up, self.b_down):
            if parameter is not None:
                parameter.requires_grad_(False)

    def extra_repr(self) -> str:
        text = (
            f"num_experts={self.num_experts}, top_k={self.top_k}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation.name}, "
            f"bias={self.b_up is not None}, routing={self.routing}"
        )
        if self.routing == "token_rounding":
            text += f", tile={self.tile}, rounding={self.rounding}"
        return text

    def _rounds(self, tokens) -> bool:
        if not self.training or self.routing != "token_rounding":
            return False
        if 2 * tokens * self.top_k >= self.num_experts * self.tile:
            return True
        if tokens > 0 and not torch.compiler.is_compiling():  # dynamo cannot trace warnings
            _warn_few_tokens(self.num_experts, self.top_k, self.tile)
        return False

    def _seed(self) -> Tensor | int:
        if self.rounding != "stochastic":
            return 0
        return torch.randint(2**62, (), dtype=torch.int64) ^ self.seed

    def forward(
        self, x: Tensor, *, selection_bias: Tensor | None = None, grad_accum: tuple | None = None
    ) -> tuple[Tensor, MoEAux]:
        """x (..., d) -> out (..., d), MoEAux. selection_bias (E,) needs score="sigmoid".

        grad_accum=(g_up, g_down) as in moe(): backward adds to these buffers.
        """
        _checks.tensor("x", x)
        if x.dtype != self.router.weight.dtype and autocast_dtype(x) is None:
            raise TypeError(
                f"x has dtype {_checks.names([x.dtype])}, must be the module's "
                f"{_checks.names([self.router.weight.dtype])}, or cast by autocast"
            )
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, its last dimension must be {self.hidden_size}"
            )
        rows = x.reshape(-1, self.hidden_size)
        logits = self.router(rows)
        options = self.route_options | {"bias": selection_bias}
        ids, weights = route(logits, self.top_k, **options)
        experts = {"b_up": self.b_up, "b_down": self.b_down, "activation": self.activation}
        experts |= {"gate_layout": self.gate_layout}
        if grad_accum is not None:
            if self.lora is not None:
                raise ValueError("grad_accum is given, but the experts are frozen beside lora")
            experts["grad_accum"] = grad_accum
        if self._rounds(rows.shape[0]):
            rule = {"tile": self.tile, "mode": self.rounding, "seed": self._seed()}
            pairs = token_round(logits, self.top_k, **rule, **options)
            out = moe_pairs(rows, pairs, self.w_up, self.w_down, **experts)
        elif self.lora is None:
            out = moe(rows, ids, weights, self.w_up, self.w_down, **experts)
        else:
            experts |= self.lora.factors()
            out = lora_moe(rows, ids, weights, self.w_up, self.w_down, **experts)
        load_balancing, z, counts = router_losses(logits, ids, **options)
        loss = self.lb_coef * load_balancing + self.z_coef * z
        if x.dim() != 2:  # not a view where none is needed: FSDP2 warns about views
            out = out.view(x.shape)
        return out, MoEAux(loss, load_balancing, z, counts, logits)
