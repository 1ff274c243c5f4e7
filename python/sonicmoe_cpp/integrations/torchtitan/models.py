"""The SonicMoE paper's models (arXiv 2512.14080) as torchtitan 0.3 models.

The block is Qwen3's: attention with normalised queries and keys, RMSNorm, no dense layer, no shared
expert. The router takes sigmoid scores, renormalised, and is balanced through torchtitan's expert
bias.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from .metrics import register_hooks
from .sizes import SIZES, Size

LONGEST_SEQUENCE = 8192


def _linear(std: float) -> dict:
    return {"weight": partial(nn.init.normal_, std=std), "bias": nn.init.zeros_}


def _norm(width: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=1e-6, param_init={"weight": nn.init.ones_})


def _layer(size: Size, attention: str, exchange: str) -> Qwen3TransformerBlock.Config:
    """Weights ~ N(0, 0.02); weights that write to the residual stream have a smaller standard
    deviation, 0.02 / sqrt(2 * layers)."""
    inner, out = _linear(0.02), _linear(0.02 / (2 * size.layers) ** 0.5)
    head = size.d // size.heads
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(size.d),
        ffn_norm=_norm(size.d),
        attention=make_gqa_config(
            dim=size.d,
            n_heads=size.heads,
            n_kv_heads=size.heads,
            head_dim=head,
            wqkv_param_init=inner,
            wo_param_init=out,
            inner_attention=get_attention_config(attention),
            fuse_qkv=True,
            rope=CosSinRoPE.Config(dim=head, max_seq_len=LONGEST_SEQUENCE, theta=1e6),
            qk_norm=_norm(head),
        ),
        moe=make_moe_config(
            num_experts=size.E,
            router=make_router_config(
                dim=size.d,
                num_experts=size.E,
                gate_param_init=inner,
                top_k=size.K,
                score_func="sigmoid",
                route_norm=True,
            ),
            routed_experts=make_routed_experts_config(
                dim=size.d,
                hidden_dim=size.n,
                num_experts=size.E,
                top_k=size.K,
                param_init={
                    "w1_EFD": inner["weight"],
                    "w2_EDF": out["weight"],
                    "w3_EFD": inner["weight"],
                },
                comm_backend=exchange,
            ),
        ),
    )


def model(size: Size, attention: str = "flex", exchange: str = "standard") -> Qwen3Model.Config:
    """The model of a size.

    attention: flex, flex_flash or varlen. exchange: torchtitan's dispatcher under expert
    parallelism (standard, deepep, hybridep, minimal_async_ep). Embeddings ~ N(0, 1), as in
    torchtitan's DeepSeek-V3: with N(0, 0.02) most tokens of a new model choose the same experts.
    """
    return Qwen3Model.Config(
        vocab_size=size.vocabulary,
        dim=size.d,
        norm=_norm(size.d),
        tok_embeddings=Embedding.Config(
            num_embeddings=size.vocabulary,
            embedding_dim=size.d,
            param_init={"weight": nn.init.normal_},
        ),
        lm_head=Linear.Config(
            in_features=size.d, out_features=size.vocabulary, param_init=_linear(0.02)
        ),
        layers=[_layer(size, attention, exchange) for _ in range(size.layers)],
    )


def specification(name: str, **options) -> ModelSpec:
    """torchtitan's ModelSpec of a model in SIZES; options are those of model()."""
    return ModelSpec(
        name="sonicmoe",
        flavor=name,
        model=model(SIZES[name], **options),
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_hooks,
        state_dict_adapter=None,
    )
