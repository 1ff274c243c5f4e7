"""Small models of real architectures, and experts with any flags."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ARCHITECTURES = {
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 5, "sliding_window": 8},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
# Compared in fp64 only: gradients of its hyper-connections cancel down to rounding errors.
DEEPSEEK_V4 = {
    "deepseek_v4": {
        "n_routed_experts": 6,
        "moe_intermediate_size": 24,
        "swiglu_limit": 0.5,  # low, so that clamps take effect
        "layer_types": ["sliding_attention"] * 2,
        "mlp_layer_types": ["moe"] * 2,
    }
}


def build(architecture: str, **options):
    """A model with random weights, biases and gains. Biases and gains that stay at their default of
    0 or 1 would hide mistakes."""
    torch.manual_seed(0)
    sizes = SIZE | (ARCHITECTURES | DEEPSEEK_V4)[architecture] | options
    config = CONFIG_MAPPING[architecture](**sizes)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="sonicmoe_cpp")
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=g)
            scale = 0.1 if parameter.dim() == 1 or "bias" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(noise * scale + (1 if "norm" in name else 0))
    return model.eval()


def fill(model, seed=5):
    """Sets all factors to values as if trained: none of them is zero."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=g) * p.shape[-1] ** -0.5)
    return model


def experts_of(model) -> list[tuple[str, torch.nn.Module]]:
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "is_transposed")]
