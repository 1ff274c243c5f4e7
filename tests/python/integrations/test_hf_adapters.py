"""Several adapters of PEFT on the experts of one transformers model, and files that are none."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from sonicmoe_cpp.integrations import hf

pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
import hf_models  # noqa: E402

hf.register()
IDS = torch.randint(96, (2, 11), generator=torch.Generator().manual_seed(7))


def adapted(architecture="qwen3_moe", rank=3, seed=5):
    model = hf.add_lora(hf_models.build(architecture), rank, 6.0, target_modules=["q_proj"])
    return hf_models.fill(model, seed).eval()


def logits(model, **options):
    with torch.no_grad():
        return model(IDS, **options).logits


def second(model, **changed):
    """The config of another adapter for a model: rank 2 on the same targets."""
    targets = model.peft_config["default"].target_parameters
    given = {"target_modules": ["q_proj"], "target_parameters": targets, **changed}
    return peft.LoraConfig(r=2, lora_alpha=1, **given)


def test_several_adapters_add_up():
    model = adapted()
    first = logits(model)
    model.add_adapter("other", second(model))
    model.set_adapter("other")
    hf_models.fill(model)
    assert (logits(model) - first).abs().max() > 0.1
    model.base_model.set_adapter(["default", "other"])
    got = logits(model)
    model.get_base_model().set_experts_implementation("eager")
    torch.testing.assert_close(got, logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_two_folders_take_turns(architecture, tmp_path):
    """One base model serves both, and training one adapter leaves the other alone."""
    want = {}
    for name, rank in (("one", 3), ("two", 2)):
        model = adapted(architecture, rank, seed=rank)
        model.save_pretrained(tmp_path / name)
        want[name] = logits(model)
    assert (want["one"] - want["two"]).abs().max() > 0.1
    base = hf_models.build(architecture).eval()
    model = peft.PeftModel.from_pretrained(base, tmp_path / "one", adapter_name="one").eval()
    model.load_adapter(tmp_path / "two", adapter_name="two")
    for name in ("two", "one", "two"):
        model.set_adapter(name)
        assert torch.equal(logits(model), want[name])
    model(IDS, labels=IDS).loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == (".two." in name), name
    torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1).step()
    assert not torch.equal(logits(model), want["two"])
    model.set_adapter("one")
    assert torch.equal(logits(model), want["one"])


@pytest.mark.parametrize("names", (["default", "other"], ["default", "__base__"]))
def test_a_batch_that_mixes_adapters_is_refused(names):
    model = adapted()
    want = logits(model)
    model.add_adapter("other", second(model))
    with pytest.raises(
        ValueError, match=r"compute all rows with the same adapters: call set_adapter\(name\)"
    ):
        logits(model, adapter_names=names)
    assert torch.equal(logits(model), want)


def test_an_adapter_of_other_expert_parameters_is_refused():
    model = adapted()
    want = logits(model)
    other = second(model, target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ValueError, match="all adapters must target the same set of parameters"):
        model.add_adapter("other", other)
    assert torch.equal(logits(model), want)


def cut(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def other_rank(folder):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 5}))


def other_names(folder):
    file = folder / "adapter_model.safetensors"
    save_file({name.replace("lora_A", "up"): t for name, t in load_file(file).items()}, file)


@pytest.mark.parametrize(
    "spoil, sentence",
    [(cut, "not covering|incomplete"), (other_rank, "size mismatch for"), (other_names, None)],
)
def test_a_file_that_is_no_adapter_of_the_model(spoil, sentence, tmp_path):
    """It is refused, or its missing factors are named, and the base model keeps its weights."""
    adapted().save_pretrained(tmp_path)
    spoil(tmp_path)
    base = hf_models.build("qwen3_moe").eval()
    weights = {p: p.detach().clone() for p in base.parameters()}
    if sentence is None:
        with pytest.warns(UserWarning, match="missing adapter keys"):
            peft.PeftModel.from_pretrained(base, tmp_path)
    else:
        with pytest.raises(Exception, match=sentence):
            peft.PeftModel.from_pretrained(base, tmp_path)
    assert all(torch.equal(p, value) for p, value in weights.items())
