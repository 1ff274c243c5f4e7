"""Models of transformers whose classes never ask for an implementation, and a norm of each expert's
output: experts_implementation="sonicmoe_cpp" against eager."""

import importlib
import subprocess
import sys

import pytest
import torch
from devices import DEVICES
from reference import assert_twice, error
from sonicmoe_cpp import Activation
from sonicmoe_cpp.integrations import hf

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import hf_models  # noqa: E402

hf.register()

# (model class, config class, sizes)
MODELS = {
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {"num_local_experts": 4, "intermediate_size_mlp": 40, "num_experts_per_tok": 1},
    ),
    "llama4, K = 2": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {"num_local_experts": 4, "intermediate_size_mlp": 40},
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {
            "num_layers": 1,
            "n_routed_experts": 4,
            "zero_expert_num": 3,
            "moe_topk": 3,
            "expert_ffn_hidden_size": 24,
            "ffn_hidden_size": 40,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "step3p7": (
        "Step3p7TextModel",
        "Step3p7TextConfig",
        {
            "num_local_experts": 4,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "share_expert_dim": 24,
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": 8,
        },
    ),
    "muse_spark": (
        "MuseSparkTextModel",
        "MuseSparkTextConfig",
        {"num_local_experts": 4, "moe_intermediate_size": 24, "moe_hidden_size": 16},
    ),
}


def module_of(name):
    folder = name.split(",")[0]
    path = f"transformers.models.{folder}.modeling_{folder}"
    return pytest.importorskip(path, reason=f"this transformers has no {folder}")


def build(name, implementation="sonicmoe_cpp", **options):
    """A model with random weights, biases and gains in fp32."""
    module, (kind, config, sizes) = module_of(name), MODELS[name]
    known = getattr(importlib.import_module(module.__package__), config)
    config = known(**hf_models.SIZE | sizes | options)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    model = getattr(module, kind)(config)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        tensors = [(n, b) for n, b in model.named_buffers() if "correction" in n]
        for key, value in (*model.named_parameters(), *tensors):
            scale = 0.1 if value.dim() == 1 else value.shape[-1] ** -0.5
            shift = 1 if "norm" in key else 0
            value.copy_(torch.randn(value.shape, generator=g) * scale + shift)
    return model.eval()


def results(model, implementation):
    model.set_experts_implementation(implementation)
    model.zero_grad(set_to_none=True)
    ids = torch.randint(1, 96, (3, 17), generator=torch.Generator().manual_seed(2))
    out = model(ids.to(model.device))[0]
    g = torch.Generator().manual_seed(3)
    (out * torch.randn(out.shape, generator=g, dtype=torch.float64).to(out)).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach()} | grads


@pytest.mark.parametrize("name", MODELS)
def test_model_in_fp64(name):
    model = build(name).double()
    found = hf.supports(model)
    assert found and not found.never_asked
    assert {plan.activation.name for plan in found.served.values()} == {"swiglu"}
    eager, ours = results(model, "eager"), results(model, "sonicmoe_cpp")
    assert eager.keys() == ours.keys() and any("experts" in key for key in eager)
    for key, want in eager.items():
        assert error(ours[key], want) < 1e-6, key  # routers compute in fp32


def block_of(model):
    return next(m for m in model.modules() if hasattr(getattr(m, "experts", None), "down_proj"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_block_in_bf16(name, device):
    """The layer with its router: our error is at most twice that of eager."""
    model = build(name)
    block = block_of(model)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(1, 19, 32, generator=g).bfloat16().double()
    found = []
    for dtype, implementation in (
        (torch.float64, "eager"),
        (torch.bfloat16, "eager"),
        (torch.bfloat16, "sonicmoe_cpp"),
    ):
        model.set_experts_implementation(implementation)
        block.to(device, torch.bfloat16).to(dtype)  # equal values
        leaf = x.to(device, dtype).requires_grad_()
        out = block(leaf)
        out = out[0] if isinstance(out, tuple) else out
        experts = list(block.experts.parameters())
        grads = torch.autograd.grad(out, [leaf, *experts], torch.ones_like(out))
        found.append([t.cpu() for t in (out.detach(), *grads)])
    for i, (exact, eager, ours) in enumerate(zip(*found, strict=True)):
        assert_twice(f"{name} {i}", ours, eager, exact, torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_block_compiles_to_one_graph(name):
    torch._dynamo.reset()
    block = block_of(build(name))
    x = torch.randn(1, 19, 32, generator=torch.Generator().manual_seed(4))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x), block(x), strict=True):
        assert error(got, want) < 1e-6


NEVER = [name for name in MODELS if name != "muse_spark"]


@pytest.mark.parametrize("name", NEVER)
def test_other_implementations_are_as_before(name):
    model = build(name, None)
    assert model.config._experts_implementation == "eager"
    with pytest.raises(ValueError, match="has no experts for grouped_mm"):
        model.set_experts_implementation("grouped_mm")
    assert model.config._experts_implementation == "eager"


def test_score_reaches_the_router_only_of_chosen_experts():
    """Llama 4: gradients of scores, without the experts that were not chosen."""
    model = build("llama4").double()
    block = block_of(model)
    x = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    rows = {}
    for implementation in ("eager", "sonicmoe_cpp"):
        model.set_experts_implementation(implementation)
        leaf = x.clone().requires_grad_()
        out, logits = block(leaf)
        rows[implementation] = torch.autograd.grad(out.square().sum(), [leaf, logits])
    for ours, eager in zip(rows["sonicmoe_cpp"], rows["eager"], strict=True):
        assert error(ours, eager) < 1e-12
    assert ((rows["sonicmoe_cpp"][1] != 0).sum(-1) == 1).all()


def test_a_token_of_identity_experts_only():
    model = build("longcat_flash")
    experts = block_of(model).experts
    x = torch.randn(5, 32, requires_grad=True)
    ids = torch.tensor([[4, 5, 6]] * 5)
    weights = torch.rand(5, 3, requires_grad=True)
    out = experts(x, ids, weights)
    assert error(out, x * weights.sum(-1, keepdim=True)) < 1e-6
    dx, dweights = torch.autograd.grad(out.sum(), [x, weights])
    assert error(dx, weights.sum(-1, keepdim=True).expand(-1, 32)) < 1e-6
    assert error(dweights, x.sum(-1, keepdim=True).expand(-1, 3)) < 1e-6


def test_a_limited_layer_of_step_is_clamped_after_silu():
    model = build("step3p7", swiglu_limits=[0, 0.5]).double()
    activations = {plan.activation for plan in hf.supports(model).served.values()}
    assert Activation("swiglu_step", limit=0.5) in activations
    eager, ours = results(model, "eager"), results(model, "sonicmoe_cpp")
    assert all(error(ours[key], want) < 1e-6 for key, want in eager.items())


@pytest.mark.parametrize("name", ["step3p7", "longcat_flash", "llama4", "muse_spark"])
def test_low_rank_factors(name, capsys, monkeypatch):
    pytest.importorskip("peft")
    model = build(name).double()
    adapted = hf.add_lora(model, rank=2, alpha=4)
    g = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for key, value in adapted.named_parameters():
            if "lora_" in key:
                value.copy_(torch.randn(value.shape, generator=g) * 0.1)
    found = {}
    for implementation in ("eager", "sonicmoe_cpp"):
        found[implementation] = results(adapted.get_base_model(), implementation)
        # With the second implementation PEFT may not put W + B A in the place of W.
        monkeypatch.setattr(torch.nn.utils.parametrize, "register_parametrization", None)
    assert sum("lora_" in key for key in found["eager"]) >= 4
    for key, want in found["eager"].items():
        assert error(found["sonicmoe_cpp"][key], want) < 1e-6, key


def in_a_new_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


OLD = """
import warnings
import torch
from transformers import LlamaConfig, Llama4TextConfig, Llama4ForCausalLM
from sonicmoe_cpp.integrations import hf
sizes = dict(hidden_size=16, intermediate_size=8, intermediate_size_mlp=8, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=20,
             num_local_experts=2, pad_token_id=0)
model = Llama4ForCausalLM(Llama4TextConfig(**sizes))
found = hf.supports(model)
assert not found and found.own_experts == ["Llama4TextExperts"], found
assert "Llama4ForCausalLM" in found.never_asked
hf.register()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    model.set_experts_implementation("sonicmoe_cpp")
assert any("was built before hf.register() (Llama4TextExperts)" in str(w.message) for w in seen)
assert not hf.supports(model) and hf.supports(model).served == {}
out = model(torch.ones(1, 3, dtype=torch.int64)).logits
assert torch.isfinite(out).all()
assert hf.supports(Llama4ForCausalLM(Llama4TextConfig(**sizes)))
"""


def test_a_model_that_was_built_before_register_is_named():
    in_a_new_process(OLD)


def test_two_modules_of_experts_of_different_width():
    """ERNIE-4.5-VL: a layer has experts for text and narrower ones for images."""
    module = pytest.importorskip("transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe")
    config = transformers.Ernie4_5_VLMoeConfig().text_config
    config.hidden_size, config.moe_num_experts, config.moe_intermediate_size = 32, 6, [24, 8]
    config.moe_k = config.num_experts_per_tok = 2
    block = module.Ernie4_5_VLMoeMoeBlock(config).double()
    g = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for value in block.parameters():
            value.copy_(torch.randn(value.shape, generator=g) * value.shape[-1] ** -0.5)
    found = hf.supports(block)
    assert sorted(found.served) == ["text_moe.experts", "vision_moe.experts"] and found
    x = torch.randn(2, 9, 32, generator=g, dtype=torch.float64)
    image = torch.rand(2, 9, generator=g) < 0.5
    rows = []
    for implementation in ("eager", "sonicmoe_cpp"):
        config._experts_implementation = implementation
        leaf = x.clone().requires_grad_()
        out = block(leaf, image.int())[0]
        leaves = [
            leaf,
            *block.text_moe.experts.parameters(),
            *block.vision_moe.experts.parameters(),
        ]
        rows.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(error(ours, eager) < 1e-6 for eager, ours in zip(*rows, strict=True))
