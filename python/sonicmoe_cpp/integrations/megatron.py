"""Experts for Megatron-Core 0.16, which replace its GroupedMLP.

from sonicmoe_cpp.integrations.megatron import with_experts
spec = with_experts(get_gpt_decoder_block_spec(config, use_transformer_engine=True))

Parameters and distributed checkpoints are as in GroupedMLP. See docs/adapters.md.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ._release import needs

with needs("megatron", "megatron-core", "0.16"):
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel.layers import (
        _initialize_affine_weight_cpu,
        _initialize_affine_weight_gpu,
    )
    from megatron.core.tensor_parallel.utils import divide
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import GroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

from ..layer import moe_grouped
from . import _recognise
from ._grouped import offsets_of

__all__ = ["EXPERTS", "SonicMoECppExperts", "gpt_layer_spec", "with_experts"]


def _activation(config) -> Any:
    """The library's activation that equals the activation of Megatron's config."""
    act = config.activation_func
    if not config.gated_linear_unit:
        found = _recognise.ungated(act)
    else:
        limit, offset = config.activation_func_clamp_value, config.glu_linear_offset

        def gated(gate: Tensor, up: Tensor) -> Tensor:
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return act(gate) * (up + offset)

        found = _recognise.gated(gated)
    if found is None:
        name = getattr(act, "__name__", type(act).__name__)
        raise NotImplementedError(
            f"the experts' activation ({name}, gated_linear_unit={config.gated_linear_unit}) is "
            "not one that sonicmoe_cpp computes: use Megatron's own experts for this model"
        )
    return found


def _refuse_unsupported(config) -> None:
    offloaded = set()
    if config.fine_grained_activation_offloading:
        offloaded = {"expert_fc1", "moe_act"} & set(config.offload_modules)
    for asked, option in (
        (config.add_bias_linear, "add_bias_linear"),
        (
            not isinstance(config.moe_ffn_hidden_size, int),
            f"moe_ffn_hidden_size={config.moe_ffn_hidden_size}",
        ),
        (config.fp8 or config.fp4, "fp8 or fp4"),
        (config.delay_wgrad_compute, "delay_wgrad_compute"),
        (offloaded, f"offload_modules={sorted(offloaded)}"),
    ):
        if asked:
            raise NotImplementedError(
                f"{option} is set, which sonicmoe_cpp's experts do not compute: leave it out, or "
                "use Megatron's own experts"
            )


class _ToMainGrad(torch.autograd.Function):
    """A weight whose gradient the layer adds to weight.main_grad.

    Megatron's hook runs when the weight gets a gradient. grad_added_to_main_grad tells the hook
    that the gradient is already in main_grad. So backward returns a tensor whose values are not
    used, as Megatron's own fused layers do.
    """

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient) -> Tensor | None:
        weight = ctx.weight
        if gradient is not None:  # of autograd.grad, which adds nothing to main_grad
            return gradient
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight)


class SonicMoECppExperts(GroupedMLP):
    """GroupedMLP with its parameters and checkpoints; this library computes the experts.

    With config.gradient_accumulation_fusion and an fp32 main_grad, backward adds the weights'
    gradients to main_grad. Otherwise they are written in the weights' dtype.
    """

    def __init__(self, num_local_experts: int, config, pg_collection=None) -> None:
        # GroupedMLP's constructor is left out: it requires the package grouped_gemm.
        _refuse_unsupported(config)
        if config.moe_latent_size is not None:
            # Nemotron-3: the MoE layer projects tokens to this width before it dispatches them. The
            # methods of GroupedMLP read hidden_size as the experts' width.
            config = copy.copy(config)
            config.hidden_size = config.moe_latent_size
        MegatronModule.__init__(self, config=config)
        self.activation = _activation(config)
        self.num_local_experts = num_local_experts
        self.expert_parallel = config.expert_model_parallel_size > 1
        self.ep_group = pg_collection.ep
        self.tp_group = pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        width = config.moe_ffn_hidden_size * num_local_experts
        up = width * 2 if config.gated_linear_unit else width
        self.weight1 = self._new_weight((config.hidden_size, up), 1, config.init_method)
        self.weight2 = self._new_weight(
            (width, config.hidden_size), 0, config.output_layer_init_method
        )

    def _new_weight(self, shape: tuple, split: int, init_method) -> nn.Parameter:
        """This rank's part of a weight whose dimension `split` expert tensor parallelism shards."""
        config, local = self.config, list(shape)
        local[split] = divide(shape[split], self.tp_group.size())
        on_cpu = config.use_cpu_initialization
        device = "cpu" if on_cpu else torch.cuda.current_device()
        weight = nn.Parameter(torch.empty(local, device=device, dtype=config.params_dtype))
        if config.perform_initialization and on_cpu:
            _initialize_affine_weight_cpu(
                weight,
                *shape,
                local[split],
                partition_dim=split,
                init_method=init_method,
                params_dtype=config.params_dtype,
                rank=self.tp_group.rank(),
                world_size=self.tp_group.size(),
            )
        elif config.perform_initialization:
            _initialize_affine_weight_gpu(weight, init_method, partition_dim=split, is_expert=True)
        weight.allreduce = not self.expert_parallel
        return weight

    def _by_expert(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Views (E, G*n, d) and (E, d, n) of tensors of the weights' shapes."""
        experts, hidden = self.num_local_experts, self.config.hidden_size
        first, second = first.view(experts, hidden, -1), second.view(experts, -1, hidden)
        return first.transpose(1, 2), second.transpose(1, 2)

    def _accumulates(self) -> bool:
        weights = (self.weight1, self.weight2)
        return self.config.gradient_accumulation_fusion and all(
            getattr(w, "main_grad", None) is not None
            and w.main_grad.dtype == torch.float32
            and not hasattr(w, "__fsdp_param__")  # Megatron-FSDP makes main_grad in backward
            for w in weights
        )

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """The arguments are rows grouped by local expert, the number of rows of each expert (on
        the CPU or on the rows' device), and the probability of each row."""
        rows, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            rows, probs = (probs.unsqueeze(-1) * rows).to(rows.dtype), None
        weights, main_gradients = (self.weight1, self.weight2), None
        if self._accumulates():
            main_gradients = self._by_expert(*(w.main_grad for w in weights))
            weights = [_ToMainGrad.apply(w) for w in weights]
        counts = tokens_per_expert.to(rows.device, non_blocking=True)
        out = moe_grouped(
            rows,
            offsets_of(counts, self.num_local_experts),
            *self._by_expert(*weights),
            row_weights=probs,
            activation=self.activation,
            grad_accum=main_gradients,
        )
        return out, None


# The spec of these experts, for every place where Megatron-Core takes a spec of experts.
EXPERTS = ModuleSpec(module=SonicMoECppExperts)


def _replaced(spec: Any, found: list) -> Any:
    if isinstance(spec, MoESubmodules):
        found.append(spec)
        return dataclasses.replace(spec, experts=EXPERTS)
    if isinstance(spec, list):
        return [_replaced(part, found) for part in spec]
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    parts = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    return dataclasses.replace(spec, **{k: _replaced(v, found) for k, v in parts.items()})


def with_experts(spec: Any) -> Any:
    """A copy of a Megatron-Core spec of a layer or a block, with experts of this library. Raises
    ValueError if the spec has no MoE layer."""
    found: list = []
    replaced = _replaced(spec, found)
    if not found:
        raise ValueError("the spec has no MoE layer whose experts could be replaced")
    return replaced


def gpt_layer_spec(*, transformer_engine: bool = gpt_layer_specs.HAVE_TE, **options) -> ModuleSpec:
    """Megatron-Core's spec of a GPT layer with MoE, with experts of this library.

    `options` are those of get_gpt_layer_with_transformer_engine_spec or get_gpt_layer_local_spec:
    qk_layernorm=True for Qwen3-MoE, multi_latent_attention=True for DeepSeek-V3.
    """
    make = gpt_layer_specs.get_gpt_layer_local_spec
    if transformer_engine:
        make = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    # Any number of experts selects a layer with MoE; the real number is in the model's config.
    return with_experts(make(**({"num_experts": 1} | options)))
