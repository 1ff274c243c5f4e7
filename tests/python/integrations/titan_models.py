"""torchtitan's models at test size, as a module of configurations for its --module."""

from dataclasses import dataclass
from functools import partial

from sonicmoe_cpp.integrations.torchtitan.gpt_oss import SonicGptOssGroupedExperts
from sonicmoe_cpp.integrations.torchtitan.modules import SonicGroupedExperts, SonicRouter
from sonicmoe_cpp.integrations.torchtitan.tokens import TokenFileLoader
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config.override import OverrideConfig, derive, override
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

E, K, N = 8, 2, 32


def _resize(moe):
    """Makes experts few and narrow, with weights large enough to affect the loss. With eight
    experts, the second and third best of a token are seldom so close that rounding exchanges them.
    """
    moe.num_experts = E
    experts, dispatcher = moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher
    experts.hidden_dim = N
    experts.param_init = dict.fromkeys(experts.param_init, partial(nn.init.normal_, std=0.05))
    for part in (experts, dispatcher, moe.router):
        part.num_experts = E
    dispatcher.top_k = moe.router.top_k = K
    moe.router.gate.out_features = E
    moe.router.gate.param_init = {
        "weight": partial(nn.init.normal_, std=0.06),
        "bias": nn.init.zeros_,
    }


def _small(config, layers):
    model = config.model_spec.model
    model.layers = [model.layers[i] for i in layers]
    for layer in model.layers:
        if layer.moe is not None:
            _resize(layer.moe)
    # A large residual stream, which no layer dominates: rounding errors stay small.
    model.tok_embeddings.param_init = {"weight": nn.init.normal_}
    config.dataloader = TokenFileLoader.Config()
    config.metrics = MetricsProcessor.Config(log_freq=1)
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.steps = 4
    config.training.mixed_precision_param = "float32"  # experts are in bf16 in any case
    config.training.disable_cuda_graphs = True
    # With a small eps AdamW's first step would be the sign of the gradient, even of one that is
    # rounding noise.
    config.optimizer = default_adamw(lr=0.05, eps=0.1)
    config.optimizer.implementation = "foreach"
    config.loss.num_chunks = 1  # each chunk costs a backward, and reductions under FSDP
    config.validator.enable = False
    config.activation_checkpoint = None
    config.debug.seed = 1
    config.override = OverrideConfig(imports=[])
    return config


def qwen3():
    return _small(qwen3_moe_debug(), range(2))


def qwen3_fp8():
    """Experts of a size that fp8 serves."""
    config = qwen3()
    for layer in config.model_spec.model.layers:
        layer.moe.routed_experts.inner_experts.hidden_dim = 128
    return config


def deepseek_v3():
    return _small(deepseek_v3_debugmodel(), range(3))


def gpt_oss():
    config = _small(gpt_oss_debugmodel_flex(), range(2))
    config.training.mixed_precision_param = "bfloat16"  # its own experts take nothing else
    return config


def deepseek_v3_sigmoid():
    """The router of the large models: sigmoid with bias, groups, renormalised, scaled."""
    config = deepseek_v3()
    for layer in config.model_spec.model.layers[1:]:
        router = layer.moe.router
        router.score_func, router.route_norm, router.route_scale = "sigmoid", True, 2.5
        router.num_expert_groups, router.num_limited_groups = 4, 2
    return config


def gpt_oss_sigmoid():
    config = gpt_oss()
    for layer in config.model_spec.model.layers:
        layer.moe.router.score_func = "sigmoid"
    return config


def qwen3_without_bias():
    config = qwen3()
    for layer in config.model_spec.model.layers:
        layer.moe.load_balance_coeff = None
    return config


def qwen3_full_ac():
    config = qwen3()
    config.activation_checkpoint = FullAC.Config()
    return config


def qwen3_selective_ac():
    config = qwen3()
    config.activation_checkpoint = SelectiveAC.Config()
    return config


class SwappedExperts(SonicGroupedExperts):
    """Broken: exchanges gate and up. A training that does not differ with these experts tests
    nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(SonicGroupedExperts.Config):
        pass

    def layer_arguments(self):
        found = super().layer_arguments()
        return found | {"w_up": found["w_up"][::-1]}


class SwappedGptOssExperts(SonicGptOssGroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(SonicGptOssGroupedExperts.Config):
        pass

    def layer_arguments(self):
        return super().layer_arguments() | {"gate_layout": "concatenated"}


def _replaced(config, plain, gpt_oss):
    of_gpt_oss = isinstance(config, GptOssGroupedExperts.Config)
    return derive(config, (gpt_oss if of_gpt_oss else plain).Config)


@override(target=GroupedExperts.Config)
def swapped(config):
    return _replaced(config, SwappedExperts, SwappedGptOssExperts)


class SwappedRouter(SonicRouter):
    """Broken: gives each expert of a token the weight of another one."""

    @dataclass(kw_only=True, slots=True)
    class Config(SonicRouter.Config):
        pass

    def forward(self, *arguments):
        weights, ids, logits = super().forward(*arguments)
        return weights.flip(-1), ids, logits


class FrozenRouter(SonicRouter):
    """Broken: no gradient reaches the gate from the experts' outputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(SonicRouter.Config):
        pass

    def forward(self, *arguments):
        weights, ids, logits = super().forward(*arguments)
        return weights.detach(), ids, logits


@override(target=TokenChoiceTopKRouter.Config)
def swapped_router(config):
    return derive(config, SwappedRouter.Config)


@override(target=TokenChoiceTopKRouter.Config)
def frozen_router(config):
    return derive(config, FrozenRouter.Config)
