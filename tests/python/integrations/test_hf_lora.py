"""Low-rank factors of a transformers model's experts: PEFT's own, computed by lora_moe()."""

import copy
import io
import json
import math
import signal
import subprocess
import sys

import pytest
import torch
from sonicmoe_cpp.integrations import _hf_experts, _hf_lora, hf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
import hf_models  # noqa: E402
from peft.tuners.lora.layer import ParamWrapper  # noqa: E402

hf.register()
IDS = torch.randint(96, (2, 11), generator=torch.Generator().manual_seed(7))
# Experts with a gate; with biases and transposed weights; with names that transformers changes on
# disk.
ARCHITECTURES = ["qwen3_moe", "gpt_oss", "mixtral"]


def adapted(architecture="qwen3_moe", rank=3, alpha=6.0, **options):
    return hf_models.fill(hf.add_lora(hf_models.build(architecture), rank, alpha, **options)).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def loaded(directory, architecture="qwen3_moe"):
    return peft.PeftModel.from_pretrained(hf_models.build(architecture), directory).eval()


def factors(model):
    return {n: p for n, p in model.named_parameters() if "lora_" in n}


@pytest.fixture
def calls(monkeypatch):
    """The calls of lora_moe()."""
    seen, call = [], _hf_experts.lora_moe

    def counted(*arguments, **options):
        seen.append(options)
        return call(*arguments, **options)

    monkeypatch.setattr(_hf_experts, "lora_moe", counted)
    return seen


# ---- numbers -------------------------------------------------------------------------------------


def results(model):
    """Logits and the gradients of all that is trained."""
    model.zero_grad(set_to_none=True)
    out = model(IDS, labels=IDS)
    out.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert grads and None not in grads.values()
    return {"logits": out.logits.detach()} | grads


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_factors_against_eager_experts_with_w_plus_ba(architecture, rslora, calls):
    model = adapted(architecture, use_rslora=rslora)
    got = results(model)
    assert len(calls) == 2 and not any(hasattr(m, "parametrizations") for m in model.modules())
    model.get_base_model().set_experts_implementation("eager")
    want = results(model)
    assert len(calls) == 2 and got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_the_sum_is_formed_only_where_it_must_be(calls):
    """Trained base weights need gradients of their own; another release of PEFT is not known."""
    model = adapted()
    want = results(model)
    _, experts = hf_models.experts_of(model)[0]
    experts.down_proj.requires_grad_()
    got = results(model)
    assert len(calls) == 3  # the other layer's only
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert experts.down_proj.grad.abs().sum() > 0


def test_another_release_of_peft_forms_the_sum(calls, monkeypatch):
    theirs = ParamWrapper._activate_lora.__wrapped__
    monkeypatch.setattr(ParamWrapper, "_activate_lora", theirs)
    monkeypatch.setattr(_hf_lora, "PEFT", "0.99.")
    hf.register()
    with pytest.warns(UserWarning, match=r"PEFT .* is not 0\.21, so it will form W \+ B A"):
        model = adapted()
    want = logits(model)
    assert not calls
    monkeypatch.setattr(_hf_lora, "PEFT", "0.21.")
    hf.register()
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


def test_the_activation_is_not_recognised_again(monkeypatch):
    model = adapted()
    logits(model)
    monkeypatch.setattr(_hf_experts, "_recognise_plan", None)
    logits(model)


def test_ranks_by_module(tmp_path):
    """Every module keeps its own rank and alpha, in the file too."""
    pattern = {r"model\.layers\.1\.mlp\.experts\.down_proj": 5}
    model = adapted(rank_pattern=pattern, alpha_pattern=dict.fromkeys(pattern, 2.5))
    ranks = [m.r["default"] for m in model.modules() if isinstance(m, ParamWrapper)]
    assert sorted(ranks) == [3, 3, 3, 5]
    want = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path)), want)
    model.get_base_model().set_experts_implementation("eager")
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing_computes_the_same_bits_again():
    model = adapted().train()
    want = results(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = results(model)
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_one_graph():
    torch._dynamo.reset()
    model = adapted()
    experts = model.get_base_model().model.layers[0].mlp.experts
    g = torch.Generator().manual_seed(3)
    x, weights = torch.randn(11, 32, generator=g), torch.rand(11, 2, generator=g)
    arguments = x, torch.randint(6, (11, 2), generator=g), weights
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    leaves = [p for p in experts.parameters() if p.requires_grad]

    def compare():
        got, want = compiled(*arguments), experts(*arguments)
        torch.testing.assert_close(got, want)
        return got, want

    grads = [torch.autograd.grad(out.sum(), leaves) for out in compare()]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with model.disable_adapter():
        compare()


def test_a_model_in_fp8(calls):
    model = hf_models.build("qwen3_moe", hidden_size=128, moe_intermediate_size=128).bfloat16()
    hf.set_precision(model, "fp8")
    model = hf_models.fill(hf.add_lora(model, 8, 16.0))
    got = logits(model).float()
    assert [options["precision"] for options in calls] == ["fp8", "fp8"]
    hf.set_precision(model, None)
    want = logits(model).float()
    assert 1e-3 < (got - want).norm() / want.norm() < 0.2


# ---- what is trained -----------------------------------------------------------------------------


def test_everything_else_is_frozen_and_it_is_said(capsys):
    model = hf.add_lora(hf_models.build("qwen3_moe").bfloat16(), 3, 6.0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == factors(model).keys() and len(trained) == 8
    assert {p.dtype for p in trained.values()} == {torch.float32}
    count, every = (sum(p.numel() for p in ps) for ps in (trained.values(), model.parameters()))
    tensors = len(list(model.parameters()))
    assert capsys.readouterr().out == (
        f"hf.add_lora: {count:,} of {every:,} parameters are trained (8 of {tensors} tensors), "
        "among them the low-rank factors of 2 experts modules; all others are frozen\n"
    )
    assert logits(model).dtype == torch.bfloat16
    plain = hf.add_lora(hf_models.build("qwen3_moe").bfloat16(), 3, 6, autocast_adapter_dtype=False)
    assert {p.dtype for p in factors(plain).values()} == {torch.bfloat16}


def test_other_layers_and_whole_modules_in_the_same_adapter(tmp_path):
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(2)
    kinds = {n.split(".")[-3] for n, p in model.named_parameters() if p.requires_grad}
    assert kinds == {"lora_A", "lora_B", "modules_to_save"}
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_peft_model_gets_the_experts_in_its_own_adapter(architecture, tmp_path, calls):
    model = hf_models.build(architecture)
    base = logits(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"q_proj": 2})
    theirs = peft.get_peft_model(model, config).eval()
    hf_models.fill(theirs)
    attention = {n: p.clone() for n, p in factors(theirs).items()}
    assert hf.add_lora(theirs, 3, 6.0) is theirs
    assert all(torch.equal(factors(theirs)[n], p) for n, p in attention.items())
    assert {m.r["default"] for m in theirs.modules() if isinstance(m, ParamWrapper)} == {3}
    trained = {n for n, p in theirs.named_parameters() if p.requires_grad}
    assert trained == factors(theirs).keys() and len(trained) == 4 + 8
    hf_models.fill(theirs)
    want = logits(theirs)
    assert len(calls) == 2 and (want - base).abs().max() > 0.1
    with theirs.disable_adapter():
        assert torch.equal(logits(theirs), base)
    theirs.save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path, architecture)), want)
    assert torch.equal(logits(theirs.unload()), base)


# ---- PEFT's switches -----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_switches_reach_the_experts(architecture):
    model = hf_models.build(architecture)
    base = logits(model)
    model = hf_models.fill(hf.add_lora(model, 3, 6.0)).eval()
    want = logits(model)
    assert (want - base).abs().max() > 0.1
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), want)
    wrappers = [m for m in model.modules() if isinstance(m, ParamWrapper)]
    for wrapper in wrappers:
        wrapper.enable_adapters(False)
    assert torch.equal(logits(model), base)
    for wrapper in wrappers:
        wrapper.enable_adapters(True)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    merged = copy.deepcopy(model).merge_and_unload(safe_merge=True)
    torch.testing.assert_close(logits(merged), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    torch.testing.assert_close(logits(model.unload()), base, rtol=1e-4, atol=1e-4)


def test_a_merged_model_is_saved_whole(tmp_path):
    model = adapted()
    want = logits(model)
    model.merge_and_unload(safe_merge=True).save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again), want, rtol=1e-4, atol=1e-4)


class Interrupt(TorchDispatchMode):
    """Ctrl-C while operator number `last` runs. As from a keyboard, Python raises KeyboardInterrupt
    after the operator has returned."""

    def __init__(self, last):
        super().__init__()
        self.left = last

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        self.left -= 1
        return result


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, also in a job that a shell started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("unmerge", [False, True])
def test_an_interrupted_merge_is_continued(unmerge, interrupts):
    """Ctrl-C at any operator of a merge, then the merge again: as without it."""

    def run(model):
        return model.unmerge_adapter() if unmerge else model.merge_adapter()

    def start():
        model = adapted()
        if unmerge:
            model.merge_adapter()
        return model

    whole = start()
    run(whole)
    want, count = logits(whole), 0
    while True:
        model = start()
        try:
            with Interrupt(count):
                run(model)
            break  # there are fewer operators
        except KeyboardInterrupt:
            run(model)
        assert torch.equal(logits(model), want), count
        count += 1
    assert count > 20


def test_factors_that_are_not_finite_are_not_merged():
    model = adapted()
    _, experts = hf_models.experts_of(model)[1]
    before = experts.down_proj.clone()
    with torch.no_grad():
        next(p for n, p in factors(model).items() if "layers.1.mlp.experts.lora_A" in n)[0] = (
            math.inf
        )
    with pytest.raises(ValueError, match="NaNs detected in the merged weights"):
        model.merge_and_unload()
    assert torch.equal(experts.down_proj, before)


# ---- files ---------------------------------------------------------------------------------------


def test_the_folder_loads_base_and_factors_or_nothing(tmp_path):
    hf_models.build("qwen3_moe").save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", experts_implementation="sonicmoe_cpp"
    )
    model = hf_models.fill(hf.add_lora(model, 3, 6.0)).eval()
    model.save_pretrained(tmp_path / "factors")
    config = json.loads((tmp_path / "factors" / "adapter_config.json").read_text())
    assert config["r"] == 3 and sorted(config["target_parameters"]) == [
        "mlp.experts.down_proj",
        "mlp.experts.gate_up_proj",
    ]
    for kind in (transformers.AutoModelForCausalLM, peft.AutoPeftModelForCausalLM):
        again = kind.from_pretrained(
            tmp_path / "factors", experts_implementation="sonicmoe_cpp"
        ).eval()
        assert torch.equal(logits(again), logits(model))


PLAIN = """
import sys
sys.modules["sonicmoe_cpp"] = None
import peft, torch, transformers
base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
model = peft.PeftModel.from_pretrained(base, sys.argv[2]).eval()
ids, want = torch.load(sys.argv[3])
torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
"""


def test_plain_peft_reads_the_folder(tmp_path):
    model = adapted("mixtral")
    hf_models.build("mixtral").save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "factors")
    torch.save((IDS, logits(model)), tmp_path / "logits")
    folders = [tmp_path / name for name in ("base", "factors", "logits")]
    subprocess.run([sys.executable, "-c", PLAIN, *folders], check=True)


@pytest.mark.parametrize("whole", [False, True])
def test_save_pretrained_of_a_model_inside_or_around_writes_the_factors(whole, tmp_path):
    """add_lora gets the whole model or a part; save_pretrained of the whole is called."""
    model = hf_models.build("qwen3_moe")
    hf_models.fill(hf.add_lora(model if whole else model.model, 3, 6.0))
    want = logits(model)
    with pytest.warns(UserWarning, match="is not the PeftModel of its low-rank factors: they are"):
        model.save_pretrained(tmp_path)
    assert "_hf_peft_config_loaded" not in vars(model)
    assert ("peft_config" in vars(model)) == whole
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(logits(loaded(tmp_path)), want)


def test_parts_with_adapters_of_their_own_are_not_saved_as_one(tmp_path):
    model = hf_models.build("qwen3_moe")
    for rank, layer in enumerate(model.model.layers, start=2):
        hf.add_lora(layer, rank, 4.0)
    with pytest.raises(ValueError, match="2 parts of Qwen3MoeForCausalLM have adapters of their"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("inner", [False, True])
def test_a_model_with_factors_is_pickled(inner):
    model = adapted()
    model = model.get_base_model() if inner else model
    want = logits(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False)), want)


def test_offloaded_factors_are_brought_back():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = adapted()
    want = logits(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in factors(model).values())
    assert torch.equal(logits(model), want)
    assert all(p.is_meta for p in factors(model).values())
    with pytest.raises(RuntimeError, match="low-rank factors are offloaded, so they would not be"):
        model.train()(IDS)


def test_disk_offloaded_factors_are_brought_back(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = adapted()
    want = logits(model)
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert torch.equal(logits(model), want)


def test_factors_of_a_sharded_model():
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.fsdp import fully_shard

    model = adapted()
    want = logits(model)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.testing.assert_close(logits(model), want)
        plain = hf_models.build("qwen3_moe")
        fully_shard(plain, mesh=mesh)
        with pytest.raises(ValueError, match="is a DTensor: add_lora must come before fully_shard"):
            hf.add_lora(plain, 2, 2)
    finally:
        distributed.destroy_process_group()


# ---- refusals ------------------------------------------------------------------------------------


def test_refused_calls_change_nothing():
    model = hf_models.build("qwen3_moe")
    names = list(dict(model.named_parameters()))
    for rank, alpha, error, match in (
        (0, 2, ValueError, "rank is 0, must be at least 1"),
        (-1, 2, ValueError, "rank is -1, must be at least 1"),
        (True, 2, TypeError, "rank is bool, must be an int"),
        (2.0, 2, TypeError, "rank is float, must be an int"),
        (2, math.nan, ValueError, "alpha is nan, must be finite"),
    ):
        with pytest.raises(error, match=match):
            hf.add_lora(model, rank, alpha)
    with pytest.raises(ValueError, match="lora_dropout"):
        hf.add_lora(model, 2, 2, lora_dropout=0.1)
    assert list(dict(model.named_parameters())) == names
    with pytest.raises(ValueError, match="Linear has no experts"):
        hf.add_lora(nn.Linear(2, 2), 2, 2)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(ValueError, match="is on the meta device, not loaded or offloaded"):
        hf.add_lora(empty, 2, 2)


def test_a_second_peft_model_is_refused():
    """It would save the experts' factors, but its config would not name them."""
    model = hf_models.build("qwen3_moe")
    ours = hf_models.fill(hf.add_lora(model, 3, 6.0))
    want = logits(ours)
    for inner in (model, ours):
        with pytest.raises(ValueError, match="which a second adapter's config would not name"):
            peft.get_peft_model(inner, peft.LoraConfig(target_modules=["q_proj"]))
    assert torch.equal(logits(ours), want)
    again = peft.get_peft_model(ours.unload(), peft.LoraConfig(target_modules=["q_proj"]))
    assert logits(again).isfinite().all()


@pytest.mark.filterwarnings("ignore")
def test_factors_loaded_beside_offloaded_experts_are_refused(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    adapted().save_pretrained(tmp_path)
    model = hf_models.build("qwen3_moe")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    model = peft.PeftModel.from_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="low-rank factors are on the meta device, where PEFT put"):
        model(IDS)


def test_quantised_experts_are_refused():
    model = hf_models.build("qwen3_moe")
    hf_models.experts_of(model)[1][1].to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="gate_up_proj of Qwen3MoeExperts is quantised"):
        hf.add_lora(model, 2, 2)
    assert not factors(model)


def test_factors_are_added_once():
    model = adapted()
    want = logits(model)
    for again in (model, model.get_base_model()):
        with pytest.raises(ValueError, match="have low-rank factors already: unload"):
            hf.add_lora(again, 2, 2)
    assert torch.equal(logits(model), want)


def test_an_adapter_that_would_not_know_of_the_experts():
    theirs = peft.get_peft_model(
        hf_models.build("qwen3_moe"), peft.LoraConfig(target_modules=["q_proj"])
    )
    with pytest.raises(ValueError, match="has adapters of PEFT already: pass its PeftModel, or"):
        hf.add_lora(theirs.get_base_model(), 2, 2)
    with pytest.raises(ValueError, match="use_rslora cannot be given for a PeftModel"):
        hf.add_lora(theirs, 2, 2, use_rslora=True)
    theirs.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"must have one adapter, of LoRA, made by PEFT 0\.21"):
        hf.add_lora(theirs, 2, 2)
    wide = peft.LoraConfig(target_modules=["q_proj"], rank_pattern={".*": 4})
    wide = peft.get_peft_model(hf_models.build("qwen3_moe"), wide)
    with pytest.raises(
        ValueError, match=r"pattern \.\* of rank or alpha \(4\) holds for mlp\.experts"
    ):
        hf.add_lora(wide, 2, 2)
    hf.add_lora(wide, 4, 2)
    dropping = peft.get_peft_model(
        hf_models.build("qwen3_moe"), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    )
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        hf.add_lora(dropping, 2, 2)
    assert not dropping.peft_config["default"].target_parameters
    assert not any(isinstance(m, ParamWrapper) for m in dropping.modules())
    ours = peft.get_peft_model(
        hf_models.build("qwen3_moe"),
        peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    )
    with pytest.raises(ValueError, match=r"must have one adapter, of LoRA, made by PEFT 0\.21"):
        hf.add_lora(ours, 2, 2)


WITHOUT_PEFT = """
import sys
sys.modules["peft"] = None
import hf_models
from sonicmoe_cpp.integrations import hf
hf.register()
model = hf_models.build("qwen3_moe")
try:
    hf.add_lora(model, 2, 2)
except ImportError as error:
    print(error)
"""


def test_without_peft():
    folder = hf_models.__file__.rsplit("/", 1)[0]
    run = [sys.executable, "-c", WITHOUT_PEFT]
    found = subprocess.run(run, check=True, cwd=folder, capture_output=True, text=True)
    assert found.stdout.startswith("hf.add_lora needs PEFT 0.21: ")
