"""The layer as a module: router, experts and the router's losses."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree

from . import _checks, _library
from ._arguments import autocast_dtype
from ._fake import check_format, fake_quantize
from ._names import GATED, POINTWISE
from ._router import Router
from ._weights import LAYOUTS, Activation, activation_of
from .fp8 import Fp8Cache, check_request, kept_weights
from .layer import moe, moe_grouped, moe_pairs
from .lora import LoRA, lora_moe, lora_moe_pairs, new_factors
from .packed import PackedExperts, pack_parameters
from .routing import (
    MODES,
    SCORES,
    Pairs,
    counted,
    expert_choice,
    one_or_nan,
    plain_losses,
    route,
    router_losses,
    sequence_losses,
    token_round,
)

BALANCES = ("batch", "sequence")
ROUTINGS = ("topk", "token_rounding", "expert_choice")


class MoEAux(NamedTuple):
    """The second result of a MoE."""

    loss: Tensor  # () lb_coef * load_balancing + z_coef * z: add it to the model's loss
    load_balancing: Tensor  # ()
    z: Tensor  # ()
    # (E,) int64: the top-k choice, before token rounding; in expert choice the pairs taken
    tokens_per_expert: Tensor
    logits: Tensor  # (T, E)


# torch.export.save writes these names in place of the types.
_pytree._register_namedtuple(MoEAux, serialized_type_name="sonicmoe_cpp.MoEAux")
_pytree._register_namedtuple(Pairs, serialized_type_name="sonicmoe_cpp.Pairs")


@functools.cache
def _warn_few_tokens(num_experts: int, top_k: int, tile: int) -> None:
    warnings.warn(
        f"token rounding needs T*K >= E*tile/2 = {num_experts * tile // 2} rows "
        f"(E={num_experts}, K={top_k}, tile={tile}): smaller batches use plain top-k",
        stacklevel=3,
    )


def _memory_budget() -> float:
    """The share of activations that torch.compile keeps; it recomputes the others in backward."""
    return torch._functorch.config.activation_memory_budget


# torch.compiler.assume_constant_result() sets the same attribute, but imports the compiler.
_memory_budget._dynamo_marked_constant = True


def _whole(parameters, changed: bool):
    """A context in which parameters are whole that DeepSpeed's ZeRO-3 (zero.Init) has partitioned:
    outside of forward and backward they have no elements. With `changed` the values of rank 0 are
    kept at the end."""
    parameters = [p for p in parameters if hasattr(p, "ds_id")]
    if not parameters:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if changed else None)


class MoE(nn.Module):
    """A router and E experts; each token is routed to K of them. forward(x) returns (out, MoEAux).

    routing:
    - "topk".
    - "token_rounding": in training the number of tokens of every expert is rounded to a multiple of
      `tile`, by the mode `rounding`. Evaluation uses plain top-k, and so do batches with
      T*K < E*tile/2 (after one warning; none in compiled code). rounding="stochastic" draws a seed
      from torch's CPU generator in every step and mixes it with `seed`: torch.manual_seed
      reproduces a run, and activation checkpointing recomputes with the same seed.
    - "expert_choice": each expert takes its ceil(T*K/E) best tokens, in training and evaluation. A
      token's experts depend on the other tokens, so do not use it for causal decoding.

    balance: "batch" computes load_balancing over all tokens, "sequence" for each sequence of x
    (..., S, d), and takes the mean over the sequences, as the sequence-wise loss of DeepSeek-V3.
    router_dtype: the dtype of the router's parameter and products, also under autocast; for example
    fp32 for bf16 experts. FSDP2 groups have one dtype: call fully_shard(module.router) first.
    shared_experts: the number of additional experts, without biases, that take every token.
    selection_bias=True: a buffer selection_bias (E,) fp32 is added to the scores in the selection;
    it needs score="sigmoid" or "sqrt_softplus". update_selection_bias() changes it to balance the
    experts without a loss.
    precision, keep_h: as in moe(), also for the shared experts. The quantised weights are kept
    until the parameters change, so that micro-batches share them. Call forget_fp8_weights() after
    writing to `parameter.data` outside of an optimizer. In graphs of torch.compile, during and
    after a CUDA graph capture, under DeepSpeed, and under fully_shard without share_fp8_weights(),
    every call quantises the weights.
    fake_quantize: a format, to whose values every call rounds w_up and w_down (fake_quantize()).

    Parameters: router.weight (E, d), w_up (E, G*n, d), w_down (E, d, n); with bias=True also
    b_up (E, G*n) and b_down (E, d); with S shared experts also shared_up (1, G*S*n, d) and
    shared_down (1, d, S*n). gate_layout says where gate and up lie in w_up, b_up and shared_up.

    If a token has a NaN among its logits (from x or the router's weight), its output and the losses
    are NaN; the routing of the other tokens does not change. A NaN in the selection bias makes
    every output NaN.
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
        balance: str = "batch",
        router_dtype: torch.dtype | None = None,
        shared_experts: int = 0,
        selection_bias: bool = False,
        precision: str | None = None,
        keep_h: str | None = None,
        fake_quantize: str | None = None,
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
            ("balance", balance, BALANCES),
        ):
            _checks.one_of(name, value, allowed)
        _checks.integer("shared_experts", shared_experts)
        if shared_experts < 0:
            raise ValueError(f"shared_experts is {shared_experts}, must be at least 0")
        for name, value in (("lb_coef", lb_coef), ("z_coef", z_coef)):
            _checks.finite(name, value)
        if selection_bias and score not in POINTWISE:
            raise ValueError(
                f'selection_bias is True, needs score="sigmoid" or "sqrt_softplus", not "{score}"'
            )
        check_request(precision, keep_h)
        self.fake_quantize = check_format(fake_quantize, precision)
        self.precision, self.keep_h = precision, keep_h
        self._fp8 = {
            "experts": Fp8Cache("w_up", "w_down"),
            "shared": Fp8Cache("shared_up", "shared_down"),
        }
        self.num_experts = num_experts
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation_of(activation)
        self.gate_layout = gate_layout
        self.routing = routing
        self.route_options = {"score": score, "renormalize": renormalize, "scale": scale}
        self.route_options |= {"n_group": n_group, "topk_group": topk_group}
        self.tile = tile
        self.rounding = rounding
        self.seed = _checks.seed("seed", seed)
        self.lb_coef = lb_coef
        self.z_coef = z_coef
        if balance != "batch" and routing == "expert_choice":
            raise ValueError(f'balance is "{balance}", but routing is "expert_choice"')
        self.balance = balance

        where = {"device": device, "dtype": dtype}
        try:
            self._make_parameters(bias, router_dtype, shared_experts, where)
        except (AssertionError, RuntimeError) as error:
            # torch may have no such device; its own message does not name a device.
            reason = None if device is None else _library.unsupported_reason(device)
            if reason is None:
                raise
            raise NotImplementedError(reason) from error
        buffer = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("selection_bias", buffer if selection_bias else None)
        self.lora: LoRA | None = None
        self._try_routing()
        self.reset_parameters()

    _NAMES = ("w_up", "w_down")

    def _held_experts(self) -> int:
        """The number of experts whose weights this module holds."""
        return self.num_experts

    def _make_parameters(self, bias, router_dtype, shared_experts: int, where: dict) -> None:
        num_experts, hidden_size = self._held_experts(), self.hidden_size
        intermediate_size = self.intermediate_size
        rows = self.intermediate_size * (2 if self.activation.name in GATED else 1)
        of_router = where if router_dtype is None else where | {"dtype": router_dtype}
        self.router = Router(hidden_size, self.num_experts, router_dtype, **of_router)
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
        self.shared_experts = shared_experts
        if shared_experts > 0:
            sizes = (
                (rows * shared_experts, hidden_size),
                (hidden_size, intermediate_size * shared_experts),
            )
            self.shared_up, self.shared_down = (
                nn.Parameter(torch.empty(1, *size, **where)) for size in sizes
            )

    def _try_routing(self) -> None:
        """Routes 0 tokens, so that bad options are refused now and not in the first step."""
        if self.routing == "expert_choice":
            default = {"score": SCORES[0], "renormalize": False, "scale": 1.0}
            default |= {"n_group": None, "topk_group": None}
            for name, value in self.route_options.items():
                if value != default[name]:
                    raise ValueError(f'{name} is {value}, but routing is "expert_choice"')
        if _library.PROBLEM is not None:
            return
        logits = torch.zeros(0, self.num_experts, device="cpu")
        route(logits, self.top_k, **self.route_options)
        if self.routing == "token_rounding":
            rule = {"tile": self.tile, "mode": self.rounding}
            token_round(logits, self.top_k, **rule, **self.route_options)

    def _apply(self, fn, recurse=True):
        """As nn.Module, but selection_bias stays fp32: in bf16, rounding would lose its updates."""
        super()._apply(fn, recurse)
        if self.selection_bias is not None:
            self.selection_bias = self.selection_bias.float()
        return self

    def reset_parameters(self) -> None:
        """Weights ~ N(0, 1/fan_in), also the router's; biases 0; low-rank factors as at first."""
        with _whole(self.parameters(), changed=True):
            self._reset_whole_parameters()

    def _reset_whole_parameters(self) -> None:
        if isinstance(self.w_up, PackedExperts):
            raise ValueError("w_up is packed, must be a parameter to be reset")
        for weight in (self.router.weight, self.w_up, self.w_down, *self._shared()):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        for bias in (self.b_up, self.b_down, self.selection_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        if self.lora is not None:
            self.lora.reset_parameters()

    def _shared(self) -> tuple:
        return (self.shared_up, self.shared_down) if self.shared_experts > 0 else ()

    @torch.no_grad()
    def update_selection_bias(self, tokens_per_expert: Tensor, rate: float = 1e-3) -> None:
        """Balances the experts without an auxiliary loss, as DeepSeek-V3: adds `rate` to the
        selection bias of experts with fewer tokens than the mean, and subtracts it from the bias of
        experts with more.

        Call it once an optimizer step. tokens_per_expert (E,) is aux.tokens_per_expert, summed over
        micro-batches and ranks, so that all ranks keep the same bias.
        """
        if self.selection_bias is None:
            raise ValueError("the module has no selection_bias: MoE(..., selection_bias=True)")
        _checks.tensor("tokens_per_expert", tokens_per_expert)
        _checks.shape("tokens_per_expert", tokens_per_expert, "(E,)", (self.num_experts,))
        counts = tokens_per_expert.to(self.selection_bias)
        self.selection_bias.add_((counts.mean() - counts).sign(), alpha=rate)

    def add_lora(self, rank: int, alpha: float, *, dtype=None, share_outer: bool = False) -> None:
        """Freezes the experts and adds trainable low-rank factors (LoRA), the parameters lora.*.

        scale = alpha / rank; a state dict does not have it. dtype: the dtype of the factors;
        default: fp32, in which small steps are not rounded away, or w_up's dtype if it is wider.
        share_outer: all experts share A of the up-projection and B of the down-projection, which
        makes the factors of small experts several times smaller.
        Raises ValueError if the module has factors already.
        """
        weights = (self.w_up, self.w_down)
        with _whole(weights, changed=False):
            self.lora = new_factors(self, weights, rank, alpha, dtype, share_outer)
        self._freeze_experts()

    def _freeze_experts(self) -> None:
        for parameter in (self.w_up, self.w_down, self.b_up, self.b_down, *self._shared()):
            if parameter is not None:
                parameter.requires_grad_(False)

    def pack(self, format: str, **options) -> None:
        """Replaces w_up and w_down by frozen weights of 4 bits: packed.pack() with these arguments.
        They become PackedExperts, whose codes and scales are in the state dict."""
        pack_parameters(self, self._NAMES, format, **options)

    def extra_repr(self) -> str:
        text = (
            f"num_experts={self.num_experts}, top_k={self.top_k}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation.name}, "
            f"bias={self.b_up is not None}, routing={self.routing}"
        )
        if self.routing == "token_rounding":
            text += f", tile={self.tile}, rounding={self.rounding}"
        for name in ("shared_experts", "precision", "fake_quantize"):
            if getattr(self, name):
                text += f", {name}={getattr(self, name)}"
        return text

    def _weights(self) -> tuple:
        """(w_up, w_down) as moe() takes them; refuses DTensors."""
        for name in self._NAMES:
            _checks.not_distributed(name, getattr(self, name))
        if isinstance(self.w_up, PackedExperts):
            return self.w_up(), self.w_down()
        return self.w_up, self.w_down

    def _operands(self) -> tuple:
        format, weights = self.fake_quantize, self._weights()
        packed = isinstance(self.w_up, PackedExperts)
        return tuple(w if packed or not format else fake_quantize(w, format) for w in weights)

    def forget_fp8_weights(self) -> None:
        """Drops the quantised weights: the next call quantises the parameters again."""
        for cache in self._fp8.values():
            cache.forget()

    def _precision(self, name: str, weights: tuple) -> dict:
        """The options precision, keep_h and fp8_weights of moe() for the weights `name` ("experts"
        or "shared")."""
        if self.precision is None:
            return {}
        options = {"precision": self.precision, "keep_h": self.keep_h}
        dtype = autocast_dtype(weights[0]) or weights[0].dtype
        style = {"activation": self.activation, "gate_layout": self.gate_layout}
        return options | kept_weights(self, name, weights, dtype, style)

    def _biases(self) -> dict:
        return {"b_up": self.b_up, "b_down": self.b_down}

    def _factors(self) -> dict:
        return {} if self.lora is None else self.lora.arguments()

    def _moe(self, rows, ids, weights, experts: dict) -> Tensor:
        compute = moe if self.lora is None else lora_moe
        return compute(rows, ids, weights, *self._operands(), **experts, **self._factors())

    def _moe_pairs(self, rows, pairs: Pairs, experts: dict) -> Tensor:
        compute = moe_pairs if self.lora is None else lora_moe_pairs
        return compute(rows, pairs, *self._operands(), **experts, **self._factors())

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
        if torch.compiler.is_compiling() and _memory_budget() < 1:
            # Otherwise backward would draw other random numbers, as torch's dropout does there.
            torch._dynamo.graph_break(
                msg='rounding="stochastic" draws its seed outside of graphs whose '
                "activation_memory_budget is below 1"
            )
        return torch.randint(2**62, (), dtype=torch.int64, device="cpu") ^ self.seed

    def _check_input(self, x, padding_mask) -> None:
        _checks.tensor("x", x)
        self._weights()
        if x.dtype != self.w_up.dtype and autocast_dtype(x) is None:
            raise TypeError(
                f"x has dtype {_checks.names([x.dtype])}, must be the module's "
                f"{_checks.names([self.w_up.dtype])}, or cast by autocast"
            )
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, its last dimension must be {self.hidden_size}"
            )
        if padding_mask is not None:
            _checks.tensor("padding_mask", padding_mask)
            _checks.dtype("padding_mask", padding_mask, (torch.bool,))
            shape = tuple(x.shape[:-1])
            _checks.shape("padding_mask", padding_mask, "x's shape without d", shape)
            _checks.on_device("padding_mask", padding_mask, x)

    def _without(self, padding: Tensor | None, pairs: Pairs) -> Pairs:
        """Makes the pairs of padding tokens empty. Expert choice and token rounding choose padding
        tokens for an expert if there are too few other tokens."""
        if padding is None:
            return pairs
        # The index -1 of a pair without a token selects the appended last element.
        fills = F.pad(padding.flatten(), (0, 1), value=True)[pairs.token.long()]
        return pairs._replace(expert=pairs.expert.masked_fill(fills, self.num_experts))

    def _rounded(self, logits: Tensor, options: dict) -> Pairs | None:
        """The pairs of token rounding; None if top-k is not rounded."""
        if not self._rounds(logits.shape[0]):
            return None
        rule = {"tile": self.tile, "mode": self.rounding, "seed": self._seed()}
        return token_round(logits, self.top_k, **rule, **options)

    def _capacity(self, tokens) -> int:
        """The number of tokens that every expert takes in expert choice."""
        return max(1, -(-tokens * self.top_k // self.num_experts))

    def _chosen(self, logits: Tensor) -> Pairs:
        return expert_choice(logits, self._capacity(logits.shape[0]))

    def _losses(
        self, logits: Tensor, ids: Tensor, options: dict, padding: Tensor | None, shape: tuple
    ) -> tuple:
        """(load_balancing, z, tokens_per_expert), as router_losses() returns them; `shape` is the
        shape of the tokens."""
        if self.balance == "sequence":
            rows = None if padding is None else padding[:, None]
            return sequence_losses(logits, ids, options["score"], rows, shape)
        return router_losses(logits, ids, padding=padding, **options)

    def _losses_of_choice(self, logits: Tensor, pairs: Pairs, padding: Tensor | None) -> tuple:
        counts = counted(pairs.expert.long(), self.num_experts)
        shares = counts / counts.sum().clamp(min=1)
        return *plain_losses(logits, shares, "softmax_before_topk", padding), counts

    def _with_losses(self, losses: Callable[[], Tensor]) -> dict:
        """Computes the losses. A module that computes them inside of the layer's call returns
        arguments for that call instead."""
        losses()
        return {}

    def _top_k(self, rows, logits, padding, factor, options: dict, experts: dict, of_ids) -> tuple:
        """(out, factor of out or None, losses) of top-k and token rounding; `factor` is a result of
        one_or_nan(), and of_ids(ids) computes the losses."""
        ids, weights = route(logits, self.top_k, **options)
        pairs = self._rounded(logits, options)
        found = []

        def losses() -> Tensor:
            found.extend(of_ids(ids))
            return found[-1]

        experts |= self._with_losses(losses)
        if pairs is not None:
            out = self._moe_pairs(rows, self._without(padding, pairs), experts)
            return out, factor, found
        # The factor multiplies the routing weights, which are smaller than the output. All slots of
        # a token with a NaN go to expert 0: if all its logits are NaN, route() gave it no expert,
        # and its output would be 0 instead of NaN.
        chosen = ids.masked_fill(factor.isnan(), 0)
        weights = weights * factor.to(weights.dtype)
        return self._moe(rows, chosen, weights, experts), None, found

    def _expert_choice(self, rows, logits, padding, experts: dict) -> tuple:
        """(out, losses), with the losses as router_losses() returns them."""
        pairs = self._without(padding, self._chosen(logits))
        found = []

        def losses() -> Tensor:
            found.extend(self._losses_of_choice(logits, pairs, padding))
            return found[-1]

        return self._moe_pairs(rows, pairs, experts | self._with_losses(losses)), found

    def _shared_output(self, rows: Tensor, padding: Tensor | None) -> Tensor:
        begin = torch.zeros(1, dtype=torch.int64, device=rows.device)
        every = torch.full((1,), rows.shape[0], dtype=torch.int64, device=rows.device)
        options = {"activation": self.activation, "gate_layout": self.gate_layout}
        options |= self._precision("shared", self._shared())
        shared = moe_grouped(rows, (begin, every), *self._shared(), **options)
        return shared if padding is None else shared.masked_fill(padding, 0.0)

    def _started(self) -> dict:
        """Further arguments of the calls of the experts."""
        return {}

    def _come(self, out) -> Tensor:
        """The output of a call of the experts, which over ranks may still be on its way."""
        return out

    def forward(
        self,
        x: Tensor,
        *,
        selection_bias: Tensor | None = None,
        padding_mask: Tensor | None = None,
        grad_accum: tuple | None = None,
    ) -> tuple[Tensor, MoEAux]:
        """x (..., d) -> out (..., d), MoEAux.

        selection_bias (E,) fp32 replaces the module's own, under the same condition.
        padding_mask (...) bool is True for padding tokens. They go to no expert, their output is 0,
        and losses and tokens_per_expert do not count them.
        grad_accum=(g_up, g_down), as in moe(): backward adds to these buffers.
        """
        return self._end(*self._begin(x, selection_bias, padding_mask, grad_accum, self._started()))

    def _begin(self, x, selection_bias, padding_mask, grad_accum, experts: dict) -> tuple:
        """The part of forward that ends with the call of the experts: what _end() takes."""
        self._check_input(x, padding_mask)
        rows = x.reshape(-1, self.hidden_size)
        logits = routed = self.router(rows)
        padding = None
        if padding_mask is not None:
            padding = padding_mask.reshape(-1, 1)
            routed = logits.masked_fill(padding, -math.inf)
        bias = self.selection_bias if selection_bias is None else selection_bias
        options = self.route_options | {"bias": bias}
        factor = one_or_nan(routed)
        if bias is not None:
            _checks.tensor("selection_bias", bias)
            if self.routing == "expert_choice":
                raise ValueError('selection_bias is given, but routing is "expert_choice"')
            factor = factor * one_or_nan(bias)
        experts |= self._biases() | {"activation": self.activation}
        experts |= {"gate_layout": self.gate_layout}
        experts |= self._precision("experts", self._weights())
        if grad_accum is not None:
            if self.lora is not None:
                raise ValueError("grad_accum is given, but add_lora has frozen the experts")
            experts["grad_accum"] = grad_accum
        if self.routing == "expert_choice":
            out, losses = self._expert_choice(rows, routed, padding, experts)
            of_out = factor
        else:
            mask = None if padding is None else padding.flatten()
            shape = x.shape[:-1] or (1,)

            def of_ids(ids: Tensor) -> tuple:
                return self._losses(logits, ids, options, mask, shape)

            rest = (routed, padding, factor, options, experts, of_ids)
            out, of_out, losses = self._top_k(rows, *rest)
        load_balancing, z, counts = losses
        factor = factor.prod()
        load_balancing, z = load_balancing * factor, z * factor
        loss = self.lb_coef * load_balancing + self.z_coef * z
        aux = MoEAux(loss, load_balancing, z, counts, logits)
        return out, of_out, rows, padding, x.shape, aux

    def _end(self, out, of_out, rows, padding, shape, aux: MoEAux) -> tuple[Tensor, MoEAux]:
        shared = self._shared_output(rows, padding) if self.shared_experts > 0 else None
        out = self._come(out)
        if of_out is not None:
            out = out * of_out.to(out.dtype)
        if shared is not None:
            out = out + shared
        if len(shape) != 2:  # no view: FSDP2 hooks a module's output, and a view can lose the hook
            out = torch.ops.aten._unsafe_view(out, shape)
        return out, aux
