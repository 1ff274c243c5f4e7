"""torchtitan 0.3's MoE modules, computed by this library; overrides.py makes a job use them.

Each module is a subclass of torchtitan's own class and keeps its parameters, so that state dicts,
DCP checkpoints, initialisation and sharding do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import spmd_types
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import (
    GroupedExperts,
    MoE,
    RoutedExperts,
    TokenChoiceTopKRouter,
)

from ...distributed.layer import TIMEOUT, Place, make_transport, run
from ...distributed.peer import Limits
from ...distributed.routing import pairs_of_equal_ranks
from ...fp8 import Fp8Cache, Request, kept_weights, request_of
from ...layer import moe, moe_grouped, moe_pairs
from ...routing import Pairs, one_or_nan, route, token_round
from .._grouped import offsets_of
from .._recognise import local


def _refuse_typechecking() -> None:
    if spmd_types.is_type_checking():
        raise NotImplementedError(
            "sonicmoe_cpp's operators have no SPMD types: leave debug.spmd_typechecking off"
        )


class Experts:
    """The common forward of both kinds of experts, in bf16 as in torchtitan. Products are in
    `precision`, as in sonicmoe_cpp.moe(). For fp8 the quantised weights are kept until the
    parameters change, as in sonicmoe_cpp.MoE. A class sets _fp8 to a cache of its weights."""

    precision: str | None = None
    _fp8: dict

    def layer_arguments(self) -> dict:
        """Weights and options as arguments of moe(), moe_grouped() and moe_pairs(): this rank's
        part of every parameter, in bf16."""
        raise NotImplementedError

    def _precision(self, w_up, w_down, **style) -> dict:
        """The options precision and fp8_weights for the weights and their style (activation and
        gate_layout), as arguments of moe()."""
        if self.precision is None:
            return {}
        weights, style = (w_up, w_down), {"activation": "swiglu"} | style
        kept = kept_weights(self, "experts", weights, torch.bfloat16, style)
        return {"precision": self.precision} | kept

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        _refuse_typechecking()
        arguments = self.layer_arguments()
        offsets = offsets_of(num_tokens_per_expert_E, arguments["w_down"].shape[0])
        with torch.autocast(x_RD.device.type, enabled=False):
            out = moe_grouped(x_RD.bfloat16(), offsets, **arguments)
        return out.type_as(x_RD)


class SonicGroupedExperts(Experts, GroupedExperts):
    """SwiGLU experts over the rows of any dispatcher. Groups need no alignment; rows past the
    counts give zeros and are not read.

    Backward adds the weights' gradients to the fp32 buffers of `grad_accum` if it is set, for
    example to the parameters' own .grad: ((w1.grad, w3.grad), w2.grad). Only for parameters that
    FSDP does not shard.
    """

    grad_accum: tuple | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        precision: str | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self.precision = config.precision
        self._fp8 = {"experts": Fp8Cache("w1_EFD", "w3_EFD", "w2_EDF")}

    def layer_arguments(self) -> dict:
        names = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        gate, up, down = (local(w).bfloat16() for w in names)
        weights = {"w_up": (gate, up), "w_down": down}
        return weights | {"grad_accum": self.grad_accum} | self._precision(**weights)


def _over_ranks(
    place: Place, form: str, x: Tensor, routing: tuple, arguments: dict, lists: int = 1
) -> Tensor:
    """The layer over the ranks of expert parallelism; `arguments` are from layer_arguments(), and
    `lists` is the number of ranks that give the same list of pairs."""
    up, down, b_up, b_down = (arguments.get(n) for n in ("w_up", "w_down", "b_up", "b_down"))
    style = arguments.get("activation", "swiglu"), arguments.get("gate_layout", "concatenated")
    weights, buffers = (up, down, b_up, b_down), arguments.get("grad_accum")
    request = request_of(*map(arguments.get, Request._fields))
    return run(place, form, x, routing, weights, style, buffers, request=request, lists=lists)


class SonicRoutedExperts(RoutedExperts):
    """Dispatch, experts and combine in one operator: no permuted copy of the tokens, no padded
    rows, no scatter. Under expert parallelism, sonicmoe_cpp.distributed moves the rows if
    `transport` is given; a token's row is then sent only once to each rank. Without `transport`
    torchtitan's dispatcher moves the rows, and inner_experts computes them."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        transport: str | None = None
        timeout: float = TIMEOUT
        max_tokens: int | None = None
        capacity: float | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self.transport = config.transport
        top_k = config.token_dispatcher.top_k
        self.limits = Limits(config.timeout, config.max_tokens, config.capacity, top_k)
        self.place: Place | None = None

    def parallelize(self, parallel_dims) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None and self.transport is not None:
            transport = make_transport(self.transport, mesh, self.limits)
            self.place = Place.of_module(transport)

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        divided = getattr(self.token_dispatcher, "ep_mesh", None) is not None
        if divided and self.place is None:
            return super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
        _refuse_typechecking()
        x = x_BLD.flatten(0, 1)
        ids, scores = topk_expert_ids_BLK.flatten(0, 1), topk_scores_BLK.flatten(0, 1)
        arguments = self.inner_experts.layer_arguments()
        with torch.autocast(x.device.type, enabled=False):
            if self.place is None:
                out = moe(x.bfloat16(), ids, scores, **arguments)
            else:
                routing = ids, None, scores
                out = _over_ranks(self.place, "ids", x.bfloat16(), routing, arguments)
        return out.type_as(x).view(x_BLD.shape)


def _routing_options(router: TokenChoiceTopKRouter, bias: Tensor | None) -> dict:
    """The router's settings as arguments of route() and token_round()."""
    if bias is not None and router.score_func != "sigmoid":
        raise NotImplementedError(
            f'score_func is "{router.score_func}" with an expert bias: sonicmoe_cpp adds a bias to '
            "sigmoid scores only; set score_func to sigmoid, load_balance_coeff to None, or leave "
            "the override of the router out"
        )
    scores = {"sigmoid": "sigmoid", "softmax": "softmax_before_topk"}
    return {
        "score": scores[router.score_func],
        "renormalize": router.route_norm,
        "scale": router.route_scale,
        "n_group": router.num_expert_groups,
        "topk_group": router.num_limited_groups,
        "bias": None if bias is None else local(bias),
    }


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b of bf16 matrices, summed in fp32. A product of two bf16 numbers is exact in fp32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class _BF16Gate(torch.autograd.Function):
    """x w^T in fp32 from bf16 x (R, D) and w (E, D), on bf16 tensor cores.

    Backward splits the fp32 gradient into two bf16 parts, which keep 16 of its 24 bits. One part
    would keep 8.
    """

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return _product(x, w.t())

    @staticmethod
    def backward(ctx, dlogits):
        x, w = ctx.saved_tensors
        high = dlogits.bfloat16()
        parts = torch.cat([high, (dlogits - high).bfloat16()], 1)
        dx = parts @ torch.cat([w, w])
        dw = _product(parts.t(), x).unflatten(0, (2, -1)).sum(0)
        return dx, dw.to(w.dtype)


def _computes_only(gate) -> bool:
    """Whether calling `gate` is x w^T and nothing else."""
    changed = gate.__dict__.get("forward") or gate._forward_hooks or gate._forward_pre_hooks
    return type(gate).forward is Linear.forward and gate.bias is None and not changed


def _logits(router: TokenChoiceTopKRouter, x_BLD: Tensor) -> Tensor:
    """The gate's outputs in fp32. torchtitan casts x and weights to fp32 first. If both are bf16,
    as under FSDP2's mixed precision, bf16 tensor cores compute the same products without casts."""
    gate = router.gate
    bf16 = x_BLD.dtype == gate.weight.dtype == torch.bfloat16
    if bf16 and _computes_only(gate) and not isinstance(gate.weight, DTensor):
        with torch.autocast(x_BLD.device.type, enabled=False):
            return _BF16Gate.apply(x_BLD.flatten(0, 1), gate.weight).view(*x_BLD.shape[:2], -1)
    with torch.autocast(x_BLD.device.type, dtype=torch.float32):
        return gate(x_BLD)


def _choice(router: TokenChoiceTopKRouter, logits: Tensor, options: dict) -> tuple:
    """(ids, weights) of route(). A token with a NaN among its logits gets NaN weights, as in
    torchtitan's router. A token with an empty slot gets the ids 0, 1, ... instead, because
    torchtitan uses ids as indices. These ids are all different, because torchtitan counts a token
    once for each expert: of two rows with equal ids it would count only one."""
    ids, weights = route(logits, router.top_k, **options)
    first = torch.arange(router.top_k, dtype=ids.dtype, device=ids.device)
    ids = torch.where((ids < 0).any(-1, keepdim=True), first, ids)
    return ids, weights * one_or_nan(logits).to(weights.dtype)


class SonicRouter(TokenChoiceTopKRouter):
    """Scores, choice and renormalisation in one operator. Of experts with equal scores it takes the
    lower id."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def forward(
        self,
        x_BLD: Tensor,
        expert_bias_E: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._debug_force_load_balance:
            return super().forward(x_BLD, expert_bias_E)
        _refuse_typechecking()
        options = _routing_options(self, expert_bias_E)
        logits = _logits(self, x_BLD)
        ids, weights = _choice(self, logits.flatten(0, 1), options)
        shape = (*x_BLD.shape[:2], self.top_k)
        return weights.view(shape), ids.view(shape), logits


class SonicRoundedMoE(MoE):
    """MoE that rounds every expert's tokens to multiples of `tile` while training.

    Evaluation routes by top-k, and so does a batch with T*K < E*tile/2. The counts for load
    balancing are of the top-k choice. Under expert parallelism T counts the tokens of all ranks,
    and rounding uses the tokens of all ranks; torchtitan gives every rank the same number.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        tile: int = 128
        rounding: str = "nearest"

    def __init__(self, config: Config):
        super().__init__(config)
        self.tile = config.tile
        self.rounding = config.rounding

    def parallelize(self, parallel_dims) -> None:
        for name in ("tp", "cp"):
            if getattr(parallel_dims, name) > 1:
                raise NotImplementedError(
                    f"token rounding in torchtitan needs whole sequences on a rank: {name} is "
                    f"{getattr(parallel_dims, name)}, must be 1"
                )
        if parallel_dims.ep > 1 and self.routed_experts.transport is None:
            raise NotImplementedError(
                f"token rounding in torchtitan needs a transport where ep is {parallel_dims.ep}: "
                'give the override {"transport": "all_to_all"}'
            )
        super().parallelize(parallel_dims)

    def _pairs(self, logits: Tensor, options: dict) -> Pairs:
        def rule(logits: Tensor) -> Pairs:
            own = {"tile": self.tile, "mode": self.rounding}
            return token_round(logits, self.router.top_k, **own, **options)

        place = self.routed_experts.place
        if place is None:
            return rule(logits)
        return pairs_of_equal_ranks(place.transport.group, logits, rule, place.transport.timeout)

    def _experts(self, x: Tensor, pairs: Pairs) -> Tensor:
        arguments = self.routed_experts.inner_experts.layer_arguments()
        place = self.routed_experts.place
        with torch.autocast(x.device.type, enabled=False):
            if place is None:
                return moe_pairs(x.bfloat16(), pairs, **arguments)
            size = place.transport.group.size
            return _over_ranks(place, "pairs", x.bfloat16(), tuple(pairs[:3]), arguments, size)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x, router = x_BLD.flatten(0, 1), self.router
        place = self.routed_experts.place
        ranks = 1 if place is None else place.transport.group.size
        too_few = 2 * ranks * x.shape[0] * router.top_k < router.num_experts * self.tile
        if not self.training or too_few or router._debug_force_load_balance:
            return super().forward(x_BLD)
        _refuse_typechecking()
        options = _routing_options(router, self.expert_bias_E)
        logits = _logits(router, x_BLD).flatten(0, 1)
        with torch.no_grad():
            ids, _ = _choice(router, logits, options)
            chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, ids, True)
            self.tokens_per_expert_E.add_(chosen.sum(0))
        out = self._experts(x, self._pairs(logits, options))
        out = (out * one_or_nan(logits).to(out.dtype)).type_as(x).view(x_BLD.shape)
        return out if self.shared_experts is None else out + self.shared_experts(x_BLD)


class SonicSelectiveAC(SelectiveAC):
    """Selective checkpointing that also keeps the results of this library's forward (output, H and
    metadata), of route() and of token_round() for backward, as torchtitan's SelectiveAC keeps the
    results of its grouped products."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        ops = torch.ops.sonicmoe_cpp
        kept = (ops.moe_forward, ops.route, ops.token_round, ops.expert_parallel_forward)
        return super().get_save_ops() | {op.default for op in kept}
