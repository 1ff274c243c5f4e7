"""Packed experts of transformers' models: equal to the model with unpacked weights."""

import copy
import json
import logging
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from sonicmoe_cpp.integrations import hf
from sonicmoe_cpp.packed import pack_nf4

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import hf_models  # noqa: E402

hf.register()
IDS = torch.randint(96, (2, 11), generator=torch.Generator().manual_seed(7))
# Sizes of which 64 is a divisor, so that every format has whole blocks.
SIZES = {
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},
}
MODELS = list(SIZES)
FORMATS = [("nf4", {}), ("nf4", {"nested": True}), ("mxfp4", {})]


def build(architecture):
    return hf_models.build(architecture, **SIZES[architecture])


def pair(architecture, format="nf4", **options):
    """(a model with packed experts, the same with the tensors that they stand for)."""
    model, unpacked = build(architecture), build(architecture)
    hf.quantize_experts(model, format, **options)
    hf.quantize_experts(unpacked, format, **options)
    hf.unpack_experts(unpacked)
    return model, unpacked


def with_factors(model, seed=3):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(seed)
    config = {"target_modules": ["q_proj"], "target_parameters": hf_targets(), "r": 4}
    model = peft.get_peft_model(model, peft.LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def hf_targets():
    return ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def results(model):
    """Logits and the gradients of everything that is trained."""
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach()} | grads


def assert_same_bits(got, want):
    for name, value in got.items():
        assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("format, options", FORMATS)
@pytest.mark.parametrize("architecture", MODELS)
def test_logits_and_gradients_are_those_of_unpacked_weights(architecture, format, options):
    model, unpacked = pair(architecture, format, **options)
    assert bool(hf.supports(model))
    got, want = results(model), results(unpacked)
    assert not any("experts" in name and "bias" not in name for name in got)
    assert_same_bits(got, want)
    weight = build(architecture).model.layers[0].mlp.experts.gate_up_proj
    lost = model.model.layers[0].mlp.experts.gate_up_proj
    assert lost.shape == weight.shape and lost.dtype == weight.dtype
    error = (lost.detach() + 0 - weight).norm() / weight.norm()
    assert 0.02 < error < 0.2


@pytest.mark.parametrize("architecture", MODELS)
def test_factors_on_packed_experts(architecture):
    """PEFT's target_parameters."""
    got, want = (results(with_factors(model)) for model in pair(architecture))
    assert sum("experts" in name for name in got) == 2 * 4 and got.keys() == want.keys()
    assert_same_bits(got, want)


def test_checkpointing_computes_the_same_bits():
    model, _ = pair("qwen3_moe")
    model = with_factors(model).train()
    want = results(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_bits(results(model), want)


@pytest.mark.parametrize("architecture", MODELS)
def test_factors_are_saved_loaded_and_merged(architecture, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, unpacked = pair(architecture)
    model = with_factors(model)
    want = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path)
    again, _ = pair(architecture)
    again = peft.PeftModel.from_pretrained(again, tmp_path)
    assert torch.equal(again(input_ids=IDS).logits, want)
    plain = peft.PeftModel.from_pretrained(unpacked, tmp_path)
    assert torch.equal(plain(input_ids=IDS).logits, want)
    merged = again.merge_and_unload()
    assert not any(hasattr(p, "packed") for p in merged.parameters())
    torch.testing.assert_close(merged(input_ids=IDS).logits, want)
    merged.save_pretrained(tmp_path / "merged")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", experts_implementation="sonicmoe_cpp"
    )
    torch.testing.assert_close(loaded(input_ids=IDS).logits, want)


def test_a_run_of_trainer_is_resumed(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from test_hf_training import train

    def run(resume=None):
        model, _ = pair("qwen3_moe")
        model = with_factors(model)
        options = {"save_strategy": "steps", "save_steps": 3}
        losses = train(model, tmp_path, resume, **options)
        return losses, {n: p.detach().clone() for n, p in model.named_parameters() if "lora" in n}

    losses, want = run()
    again, got = run(tmp_path / "checkpoint-3")
    assert losses[-1] < losses[0]
    torch.testing.assert_close(again, losses[3:])
    assert_same_bits(got, want)


def test_moves_and_copies_stay_packed():
    model, _ = pair("gpt_oss", nested=True)
    experts = model.model.layers[0].mlp.experts
    want = model(input_ids=IDS).logits
    copied = copy.deepcopy(model)
    assert copied.model.layers[0].mlp.experts.down_proj.packed.nbytes() < 64 * 64 * 5
    assert torch.equal(copied(input_ids=IDS).logits, want)
    model.bfloat16()
    assert experts.gate_up_proj.packed.codes.dtype == torch.uint8
    assert experts.gate_up_proj.dtype == experts.gate_up_proj.packed.dtype == torch.bfloat16
    torch.testing.assert_close(model(input_ids=IDS).logits.float(), want, rtol=0.1, atol=0.1)
    copied.to("meta")
    moved = copied.model.layers[0].mlp.experts.gate_up_proj
    assert moved.device == moved.packed.codes.device == moved.packed.device
    assert moved.device.type == "meta"
    with pytest.raises(TypeError, match="packed weights cannot be written to"):
        experts.down_proj.data.mul_(2)


def test_experts_with_packed_weights_compile():
    model, _ = pair("gpt_oss")
    experts = model.model.layers[0].mlp.experts
    x, ids, weights = torch.randn(6, 64), torch.randint(5, (6, 2)), torch.rand(6, 2)
    compiled = torch.compile(lambda *given: experts(*given), fullgraph=True, backend="aot_eager")
    results = []
    for forward in (experts, compiled):
        leaf = x.clone().requires_grad_()
        out = forward(leaf, ids, weights)
        results.append((out, torch.autograd.grad(out.sum(), leaf)[0]))
    assert all(map(torch.equal, *results))


def test_packed_weights_of_another_shape_are_refused():
    model = build("qwen3_moe")
    made = pack_nf4(torch.randn(6, 64, 64))
    with pytest.raises(ValueError, match=r"gate_up_proj was made with shape .* must have"):
        hf.set_packed(model, lambda name, shape: made)


def test_packed_experts_in_fp8():
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    model, unpacked = (hf_models.build("qwen3_moe", **sizes).bfloat16() for _ in "ab")
    for each in (model, unpacked):
        hf.quantize_experts(each, "mxfp4")
        hf.set_precision(each, "fp8")
    hf.unpack_experts(unpacked)
    want = unpacked(input_ids=IDS).logits
    assert torch.equal(model(input_ids=IDS).logits, want)
    hf.set_precision(model, None)
    assert not torch.equal(model(input_ids=IDS).logits, want)


def test_other_experts_compute_with_unpacked_weights():
    model, unpacked = pair("qwen3_moe")
    for each in (model, unpacked):
        each.set_experts_implementation("eager")
    assert_same_bits(results(model), results(unpacked))


# ---- at load -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format, options", FORMATS)
@pytest.mark.parametrize("architecture", MODELS)
def test_experts_are_packed_at_load(architecture, format, options, tmp_path):
    build(architecture).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        experts_implementation="sonicmoe_cpp",
        quantization_config=hf.experts_config(format, **options),
    )
    want, _ = pair(architecture, format, **options)
    assert_same_bits(results(loaded), results(want))
    assert not hasattr(loaded.config, "quantization_config")
    with_factors(loaded)


def test_linear_layers_are_packed_by_bitsandbytes(tmp_path):
    """In one load with the experts; equal to packing each part alone."""
    pytest.importorskip("bitsandbytes")
    build("qwen3_moe").save_pretrained(tmp_path)
    linear = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, experts_implementation="sonicmoe_cpp", quantization_config=config
        )
        for config in (hf.experts_config("nf4", linear=linear), linear)
    ]
    hf.quantize_experts(models[1], "nf4")
    got, want = (results(with_factors(model).train()) for model in models)
    assert_same_bits(got, want)
    attention = models[0].model.layers[0].self_attn
    assert attention.k_proj.weight.dtype == torch.uint8
    with pytest.raises(ValueError, match="linear must be a BitsAndBytesConfig"):
        hf.experts_config("nf4", linear=transformers.BitsAndBytesConfig(load_in_8bit=True))


def test_experts_are_packed_in_the_dtype_of_the_load(tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=hf.experts_config("nf4")
    )
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


def mxfp4_checkpoint(folder):
    """A gpt-oss checkpoint as it is published; returns the model with unpacked weights."""
    model, unpacked = pair("gpt_oss", "mxfp4")
    state = {}
    for name, value in model.state_dict().items():
        if not hasattr(value, "packed"):
            state[name] = value
            continue
        experts, out, inner = value.packed.mT.shape
        state[f"{name}_blocks"] = value.packed.codes.view(experts, out, inner // 32, 16)
        state[f"{name}_scales"] = value.packed.scales
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return unpacked


def test_experts_of_an_mxfp4_checkpoint_stay_packed_and_train(tmp_path, monkeypatch):
    mapping = pytest.importorskip("transformers.quantizers.auto").AUTO_QUANTIZER_MAPPING
    monkeypatch.setitem(mapping, "mxfp4", mapping["mxfp4"])
    unpacked = mxfp4_checkpoint(tmp_path)
    try:
        hf.keep_mxfp4()
    except ImportError as error:
        pytest.skip(str(error))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="sonicmoe_cpp"
    )
    assert loaded.model.layers[0].mlp.experts.down_proj.packed.format == "mxfp4"
    got, want = results(with_factors(loaded)), results(with_factors(unpacked))
    assert_same_bits(got, want)
    with pytest.raises(ValueError, match="the checkpoint is not in MXFP4"):
        build("gpt_oss").save_pretrained(tmp_path / "plain")
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "plain", quantization_config=transformers.Mxfp4Config()
        )


def scale_of_nan(state, name):
    state[f"{name}_scales"].view(-1)[3] = 255


def no_scales(state, name):
    del state[f"{name}_scales"]


def short_scales(state, name):
    state[f"{name}_scales"] = state[f"{name}_scales"][:, :-1].contiguous()


def short_blocks(state, name):
    state[f"{name}_blocks"] = state[f"{name}_blocks"][..., :8].contiguous()


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (scale_of_nan, r"scales has the value 255 \(NaN\), must be at most 254"),
        (no_scales, "scales is NoneType, must be a"),
        (short_scales, r"scales has shape .*, must be \(E, out, in/32\)"),
        (short_blocks, r"blocks has shape .*, must be \(E, out, in/32, 16\)"),
    ],
)
def test_a_damaged_mxfp4_checkpoint_is_refused(spoil, sentence, tmp_path, monkeypatch, caplog):
    """transformers lists our sentence in its report of the load, with the parameter's name."""
    mapping = pytest.importorskip("transformers.quantizers.auto").AUTO_QUANTIZER_MAPPING
    monkeypatch.setitem(mapping, "mxfp4", mapping["mxfp4"])
    mxfp4_checkpoint(tmp_path)
    try:
        hf.keep_mxfp4()
    except ImportError as error:
        pytest.skip(str(error))
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    state = load_file(file)
    spoil(state, name)
    save_file(state, file, metadata={"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(RuntimeError, match="CONVERSION"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, experts_implementation="sonicmoe_cpp"
        )
    assert name in caplog.text and re.search(sentence, caplog.text)


def fp8_model():
    """(Qwen3-MoE with transformers' FP8 experts, the same with the tensors that they stand for)."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    options = {"hidden_size": 128, "moe_intermediate_size": 128}
    models = [hf_models.build("qwen3_moe", **options) for _ in range(2)]
    config = transformers.FineGrainedFP8Config()
    skip = ["lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate"]
    fp8.replace_with_fp8_linear(models[0], skip, config)
    for layer, plain in zip(*(m.model.layers for m in models), strict=True):
        experts, plain = layer.mlp.experts.to_empty(device="cpu"), plain.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            codes, scales = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
            value = getattr(plain, name)
            with torch.no_grad():
                scales.copy_(torch.rand(scales.shape) * 2e-3)
                codes.copy_((value * 400).to(codes.dtype))
                grid = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
                value.copy_(codes.float() * grid)
    for model in models:
        model.config.dtype = torch.float32
    return models


def test_fp8_experts_of_transformers_are_served():
    model, plain = fp8_model()
    assert bool(hf.supports(model))
    for module in plain.model.layers:
        module.mlp.experts.requires_grad_(False)
    assert_same_bits(results(model), results(plain))
    assert_same_bits(results(with_factors(model)), results(with_factors(plain)))


# ---- refusals ------------------------------------------------------------------------------------


def test_refusals_change_nothing(tmp_path):
    model = hf_models.build("qwen3_moe", hidden_size=64, moe_intermediate_size=48)
    with pytest.raises(ValueError, match="must be a multiple of the block 64"):
        hf.quantize_experts(model, "nf4")
    with pytest.raises(ValueError, match='format is "int4", must be one of'):
        hf.quantize_experts(model, "int4")
    assert not any(hasattr(p, "packed") for p in model.parameters())
    with pytest.raises(ValueError, match="Linear has no experts"):
        hf.quantize_experts(torch.nn.Linear(2, 2), "nf4")
    model = build("qwen3_moe")
    with torch.no_grad():
        model.model.layers[-1].mlp.experts.down_proj[1, 2, 3] = math.nan
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.down_proj has NaN or infinite"):
        hf.quantize_experts(model, "nf4")
    assert not any(hasattr(p, "packed") for p in model.parameters())
    model, _ = pair("qwen3_moe")
    with pytest.raises(ValueError, match="is packed already"):
        hf.quantize_experts(model, "nf4")
    with pytest.raises(ValueError, match=r"are packed: call hf.unpack_experts\(model\)"):
        model.save_pretrained(tmp_path)
    model.model.layers[0].mlp.experts.down_proj.requires_grad_()
    with pytest.raises(ValueError, match=r"down_proj of .* is packed, so it cannot be trained"):
        model(input_ids=IDS)
    with pytest.raises(ValueError, match='format is "fp8", must be one of'):
        hf.experts_config("fp8")


def test_factors_of_other_experts_are_refused():
    model, _ = pair("qwen3_moe")
    model = with_factors(model)
    model.get_base_model().set_experts_implementation("eager")
    with pytest.raises(NotImplementedError, match="only sonicmoe_cpp computes factors on packed"):
        model(input_ids=IDS)
    with model.disable_adapter():
        model(input_ids=IDS)
