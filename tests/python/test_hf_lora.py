"""Low-rank factors of a transformers model on disk: save, load, merge, and PEFT beside them."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from sonicmoe_cpp.integrations import hf
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import hf_models  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

hf.register()
IDS = torch.randint(96, (2, 11), generator=torch.Generator().manual_seed(7))
# Experts with a gate; with biases and transposed weights; with names that transformers changes on
# disk.
ARCHITECTURES = ["qwen3_moe", "gpt_oss", "mixtral"]


def adapted(architecture, rank=3, alpha=6.0):
    """A model whose factors have been trained: none of them is zero."""
    model = hf_models.build(architecture)
    hf.add_lora(model, rank, alpha)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora." in name:
                p.copy_(torch.randn(p.shape, generator=g) * p.shape[-1] ** -0.5)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def from_pretrained(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, experts_implementation="sonicmoe_cpp"
    ).eval()


def factors(model):
    return {n: p for n, p in model.named_parameters() if ".lora." in n}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saved_and_loaded_again(architecture, tmp_path):
    model = adapted(architecture)
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "sonicmoe_cpp_lora")  # only the file has this entry
    again = from_pretrained(tmp_path)
    for run in (lambda: again(IDS), lambda: hf.add_lora(again, 3, 6.0)):
        with pytest.raises((RuntimeError, ValueError), match="was saved with low-rank factors"):
            run()
    assert not factors(again) and not hf.supports(again)
    names = hf.load_lora(again, tmp_path)
    assert names == [name for name, _ in hf_models.experts_of(model)]
    assert torch.equal(logits(again), logits(model))
    found = factors(again)
    assert all(p.requires_grad for p in found.values())
    assert all(torch.equal(p, found[n]) for n, p in factors(model).items())
    # What was loaded is saved again.
    again.save_pretrained(tmp_path / "second")
    third = from_pretrained(tmp_path / "second")
    hf.load_lora(third, tmp_path / "second")
    assert torch.equal(logits(third), logits(model))


def test_an_inner_model_and_a_state_dict_are_saved_too(tmp_path):
    model = adapted("qwen3_moe")
    state = {n: p + 1 if ".lora." in n else p for n, p in model.state_dict().items()}
    model.save_pretrained(tmp_path / "whole", state_dict=state)
    again = from_pretrained(tmp_path / "whole")
    hf.load_lora(again, tmp_path / "whole")
    assert all(torch.equal(p + 1, factors(again)[n]) for n, p in factors(model).items())
    model.model.save_pretrained(tmp_path / "inner")
    keys = load_file(tmp_path / "inner" / "lora" / "adapter_model.safetensors")
    assert all(key.startswith("base_model.model.layers.") for key in keys)
    model.save_pretrained(tmp_path / "other rank", is_main_process=False)
    assert not (tmp_path / "other rank" / "lora").exists()
    with pytest.raises(
        ValueError, match="push_to_hub is True, which would upload the model without"
    ):
        model.save_pretrained(tmp_path / "pushed", push_to_hub=True)
    assert not (tmp_path / "pushed").exists()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_merged(architecture, tmp_path):
    model = adapted(architecture)
    want = logits(model)
    hf.merge_lora(model)
    assert not factors(model)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "lora").exists()
    again = from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again), want, rtol=1e-4, atol=1e-4)
    again.set_experts_implementation("eager")
    torch.testing.assert_close(logits(again), want, rtol=1e-4, atol=1e-4)
    hf.add_lora(model, 2, 2)  # room for new ones
    with pytest.raises(ValueError, match="has no low-rank factors"):
        hf.merge_lora(again)


def test_merging_through_an_inner_model(tmp_path):
    """add_lora was called with the outer model, merge_lora with the model inside it."""
    model = adapted("qwen3_moe")
    want = logits(model)
    hf.merge_lora(model.model)
    model.save_pretrained(tmp_path)
    assert "save_pretrained" not in vars(model)
    assert not (tmp_path / "lora").exists()
    torch.testing.assert_close(logits(from_pretrained(tmp_path)), want, rtol=1e-4, atol=1e-4)


def test_merging_rounds_once():
    model = adapted("qwen3_moe").bfloat16()
    _, experts = hf_models.experts_of(model)[0]
    lora = experts.lora
    want = experts.down_proj.float() + lora.scale * lora.down_b.float() @ lora.down_a.float()
    hf.merge_lora(model)
    assert torch.equal(experts.down_proj, want.bfloat16())


def test_a_copy_saves_its_own(tmp_path):
    model = adapted("qwen3_moe")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in factors(other).values():
            p.add_(1)
    other.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    hf.load_lora(again, tmp_path)
    assert all(torch.equal(p, factors(again)[n]) for n, p in factors(other).items())


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(tmp_path):
    model = adapted("qwen3_moe")
    hf.save_lora(model, tmp_path)
    plain = hf_models.build("qwen3_moe")
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"

    def refused(match, error=ValueError):
        with pytest.raises(error, match=match):
            hf.load_lora(plain, tmp_path)
        assert not factors(plain) and all(p.requires_grad for p in plain.parameters())

    options, tensors = json.loads(config.read_text()), load_file(weights)
    for name, value in (("use_dora", True), ("rank_pattern", {"x": 2}), ("peft_type", "LOHA")):
        config.write_text(json.dumps(options | {name: value}))
        refused(f"{name} is .*, which cannot be loaded beside experts")
    config.write_text(json.dumps(options))
    first = min(tensors)
    save_file({k: v for k, v in tensors.items() if k != first}, weights)
    refused("lacks base_model.model.*must adapt both projections of every expert")
    save_file(tensors | {"base_model.model.q_proj.lora_A.weight": torch.ones(3, 4)}, weights)
    refused("holds base_model.model.q_proj.lora_A.weight, which is not a factor of an experts")
    save_file(tensors | {first: tensors[first][:, :-1].contiguous()}, weights)
    refused("has shape .* in the file, must be")
    save_file(tensors | {first: tensors[first][:-1].contiguous()}, weights)
    refused(r"must be \(E\*r, in\) and \(out, r\*E\) with r = 3")
    config.unlink()
    refused("has no adapter_config.json, neither itself nor in its folder lora", FileNotFoundError)
    with pytest.raises(ValueError, match="has low-rank factors already"):
        hf.save_lora(model, tmp_path)
        hf.load_lora(model, tmp_path)
    with pytest.raises(ValueError, match="has no low-rank factors"):
        hf.save_lora(plain, tmp_path)


def test_add_lora_after_fully_shard_is_refused():
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.fsdp import fully_shard

    model = hf_models.build("qwen3_moe")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="is a DTensor: add_lora must come before fully_shard"):
            hf.add_lora(model, 2, 2)
    finally:
        distributed.destroy_process_group()


def test_a_sharded_model_is_saved_from_a_gathered_state_dict(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = adapted("qwen3_moe")
    want = logits(model)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)))
        torch.testing.assert_close(logits(model), want)
        model.reshard()
        with pytest.raises(ValueError, match=r"lora\.up_a is a DTensor: pass state_dict="):
            model.save_pretrained(tmp_path / "sharded")
        assert not (tmp_path / "sharded").exists()
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        model.save_pretrained(tmp_path, state_dict=state)
    finally:
        distributed.destroy_process_group()
    again = from_pretrained(tmp_path)
    hf.load_lora(again, tmp_path)
    torch.testing.assert_close(logits(again), want)


# ---- PEFT ----------------------------------------------------------------------------------------


def peft_config(**options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    options = {"target_modules": [], "target_parameters": targets} | options
    return peft, peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_peft_reads_what_was_saved(architecture, tmp_path):
    peft, _ = peft_config()
    model = adapted(architecture)
    hf.save_lora(model, tmp_path)
    for implementation in ("sonicmoe_cpp", "eager"):
        base = hf_models.build(architecture)
        base.set_experts_implementation(implementation)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path)
        torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_peft_saved_is_loaded(architecture, rslora, tmp_path):
    peft, config = peft_config(use_rslora=rslora)
    theirs = peft.get_peft_model(hf_models.build(architecture), config).eval()
    theirs.save_pretrained(tmp_path)
    model = hf_models.build(architecture)
    hf.load_lora(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_peft_on_expert_parameters(architecture, monkeypatch):
    """PEFT's own factors, on our experts and on eager ones: logits and gradients."""
    peft, config = peft_config()
    torch.manual_seed(1)
    theirs = peft.get_peft_model(hf_models.build(architecture), config)
    results = []
    for implementation in ("eager", "sonicmoe_cpp"):
        theirs.get_base_model().set_experts_implementation(implementation)
        theirs.zero_grad(set_to_none=True)
        out = theirs(IDS, labels=IDS)
        out.loss.backward()
        trained = [p for p in theirs.parameters() if p.requires_grad]
        assert trained
        results.append((out.logits, *(p.grad for p in trained)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    # PEFT makes a class for every call; the activation must not be recognised again for it.
    from sonicmoe_cpp.integrations import _hf_experts

    monkeypatch.setattr(_hf_experts, "_recognise_plan", None)
    theirs(IDS)


def test_two_kinds_of_factors_on_one_module_are_refused():
    peft, config = peft_config()
    theirs = peft.get_peft_model(hf_models.build("qwen3_moe"), config)
    with pytest.raises(ValueError, match="PEFT adapts parameters of Qwen3MoeExperts already"):
        hf.add_lora(theirs, 2, 2)
    both = peft.get_peft_model(adapted("qwen3_moe"), config)
    with pytest.raises(RuntimeError, match="PEFT adapts parameters of Qwen3MoeExperts, which has"):
        both(IDS)


def test_peft_on_other_layers(tmp_path):
    """Attention by PEFT, experts by ours, in the order that keeps both trainable."""
    peft, config = peft_config(target_modules=["q_proj"], target_parameters=None)
    theirs = peft.get_peft_model(hf_models.build("qwen3_moe"), config).eval()
    hf.add_lora(theirs, 3, 6.0)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in factors(theirs).values():
            p.copy_(torch.randn(p.shape, generator=g))
    trained = {n for n, p in theirs.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in theirs.named_parameters() if ".lora." in n or "lora_" in n}
    theirs.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(hf_models.build("qwen3_moe"), tmp_path).eval()
    hf.load_lora(again, tmp_path)
    torch.testing.assert_close(logits(again), logits(theirs))
    hf.merge_lora(theirs.get_base_model())
    theirs.save_pretrained(tmp_path / "merged")
    assert not (tmp_path / "merged" / "lora").exists()
    other = peft.get_peft_model(hf_models.build("qwen3_moe"), config)
    with pytest.warns(UserWarning, match="PeftModel will leave out the low-rank factors"):
        hf.add_lora(other.get_base_model(), 3, 6.0)
    frozen = peft.get_peft_model(adapted("qwen3_moe"), config).train()
    with pytest.warns(UserWarning, match="the low-rank factors of Qwen3MoeExperts are frozen"):
        frozen(IDS)


WITHOUT_PEFT = """
import sys
sys.modules["peft"] = None
import hf_models, sonicmoe_cpp
from sonicmoe_cpp.integrations import hf
hf.register()
model = hf_models.build("qwen3_moe")
hf.add_lora(model, 2, 2)
hf.save_lora(model, sys.argv[1])
hf.load_lora(hf_models.build("qwen3_moe"), sys.argv[1])
"""


def test_files_need_no_peft(tmp_path):
    folder = hf_models.__file__.rsplit("/", 1)[0]
    subprocess.run([sys.executable, "-c", WITHOUT_PEFT, tmp_path], check=True, cwd=folder)


def test_no_experts():
    for call in (hf.merge_lora, lambda m: hf.save_lora(m, "unused")):
        with pytest.raises(ValueError, match="Linear has no experts"):
            call(nn.Linear(2, 2))
