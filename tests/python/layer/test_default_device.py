"""Results do not depend on torch's default device: not on `with torch.device("meta")`, in which
many programs build and load models, and not on torch.set_default_device("cuda")."""

import pytest
import sonicmoe_cpp
import torch
from devices import DEVICES
from sonicmoe_cpp.integrations import hf

E, K, D, N, T = 6, 2, 16, 8, 40
MODULES = {
    "topk": {"score": "sigmoid", "selection_bias": True, "shared_experts": 1},
    "nearest": {"routing": "token_rounding", "tile": 8},
    "stochastic": {"routing": "token_rounding", "tile": 8, "rounding": "stochastic"},
    "expert_choice": {"routing": "expert_choice"},
    "lora": {},
}
DEFAULTS = ["meta", *DEVICES]


def module_and_x(device, name):
    torch.manual_seed(0)
    layer = sonicmoe_cpp.MoE(E, K, D, N, lb_coef=0.1, dtype=torch.bfloat16, **MODULES[name])
    if name == "lora":
        layer.add_lora(2, 4.0)
    return layer.to(device), torch.randn(T, D).to(device, torch.bfloat16)


def step(layer, x):
    torch.manual_seed(1)
    out, aux = layer(x, padding_mask=torch.arange(T, device=x.device) % 7 == 0)
    loss = out.float().square().mean() + aux.loss
    leaves = [p for p in layer.parameters() if p.requires_grad]
    return out, *aux, *torch.autograd.grad(loss, leaves, allow_unused=True)


def equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a is None and b is None) or (a.device == b.device and torch.equal(a, b))


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODULES)
def test_module(name, device, default):
    layer, x = module_and_x(device, name)
    want = step(layer, x)
    with torch.device(default):
        equal(step(layer, x), want)


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_rounding(mode, device, default):
    logits = torch.randn(T, E).to(device)
    want = sonicmoe_cpp.token_round(logits, K, tile=4, mode=mode, seed=7)
    with torch.device(default):
        equal(sonicmoe_cpp.token_round(logits, K, tile=4, mode=mode, seed=7), want)


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_built_on_the_default_device(name, default):
    with torch.device(default):
        layer = sonicmoe_cpp.MoE(E, K, D, N, **MODULES[name])
    assert layer.w_up.device.type == default


@pytest.mark.parametrize("default", DEFAULTS)
def test_models_of_transformers(default):
    transformers = pytest.importorskip("transformers", minversion="5.7")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    hf.register()
    with torch.device(default):
        model = transformers.Qwen3MoeForCausalLM(config)
        assert hf.supports(model)


@pytest.mark.parametrize("default", DEFAULTS)
def test_numbers_that_ranks_exchange(default):
    from sonicmoe_cpp.distributed._group import from_host

    with torch.device(default):
        assert from_host([3, 4], torch.device("cpu")).tolist() == [3, 4]
