"""examples/finetune.py: trains, stops, resumes with equal bits, merges; one sentence an error."""

import gc
import json
import signal

import pytest
import torch
from demo_support import flags, write_text

for package in ("transformers", "accelerate", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed")
from finetune import main  # noqa: E402
from lm.errors import UserError  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sonicmoe_cpp import packed  # noqa: E402
from sonicmoe_cpp.integrations import hf  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from tune import dense, loss, memory, run  # noqa: E402
from tune import model as tune_model  # noqa: E402
from tune.settings import parse  # noqa: E402

OPTIONS = {"config": "small", "sequence": 32, "batch": 2, "rank": 4, "steps": 6, "lr": 1e-2}
OPTIONS |= {"save_every": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"), files=4)


def finetune(text, out, *more, **options):
    return main([*flags(**OPTIONS | {"data": text, "out": out} | options), *more])


def report(out):
    return json.loads((out / "report.json").read_text())


def factors(out):
    return load_file(out / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """An uninterrupted run, with the merged model."""
    out = tmp_path_factory.mktemp("whole")
    assert finetune(text, out, "--merge") == 0
    return out


def test_a_run_trains_factors_of_experts_and_attention(whole):
    found, saved = report(whole), factors(whole)
    losses, held = found["losses"], found["held_out"]
    assert len(losses) == 6 and held["after"] < held["before"] - 0.1
    # 2 layers: A and B of 4 projections, of gate_up_proj and of down_proj
    assert found["trained"]["tensors"] == len(saved) == 2 * 2 * 6
    assert found["trained"]["parameters"] == sum(t.numel() for t in saved.values())
    assert all(t.abs().max() > 0 for t in saved.values())
    assert found["loss_in_chunks"] and found["tokens_per_s"] > 0
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_predicted_memory_is_the_sum_of_the_page(whole):
    """d 64, 2 layers, q 64, kv 32, E 16, K 4, n 64, vocabulary 256, T 64, fp32."""
    found, saved = report(whole)["predicted_bytes"], factors(whole)
    assert found["experts"] == 4 * 2 * 16 * 3 * 64 * 64
    assert found["factors"] == found["gradients"] == 4 * sum(t.numel() for t in saved.values())
    assert found["optimizer"] == 2 * found["factors"]
    assert found["kept of layers"] == 2 * 64 * 64 * 4
    attention = 64 * (20 * 64 + 14 * 64 + 10 * 32) * 2
    assert found["one layer in backward"] == 4 * 64 * (5 * 64 + 64) * 4 + attention
    assert found["logits"] == 64 * 256 * 16
    weights = found["experts"] + found["other weights"] + 3 * found["factors"]
    most = max(found["one layer in backward"], found["logits"])
    assert found["peak"] == weights + max(found["kept of layers"], found["gradients"]) + most


def test_without_checkpointing_all_layers_but_one_keep_what_they_need():
    settings = parse([*flags(**OPTIONS), "--no-checkpointing"])
    model = tune_model.build(settings)
    found = memory.predict(model, tune_model.experts_of(model, settings), settings)
    attention = 64 * (20 * 64 + 14 * 64 + 10 * 32) * 2
    assert found["kept of layers"] == 64 * 64 * 4 + attention + 4 * 64 * 2 * 64 * 4


def test_eager_attention_has_scores_of_all_pairs():
    layer = []
    for attention in ("sdpa", "eager"):
        settings = parse(flags(**OPTIONS | {"attention": attention}))
        model = tune_model.build(settings)
        found = memory.predict(model, tune_model.experts_of(model, settings), settings)
        layer.append(found["one layer in backward"])
    assert layer[1] - layer[0] == 3 * 4 * (2 * 32) * 32 * 4  # heads, T, sequence, bytes


def test_an_interrupted_run_resumes_with_equal_bits(whole, text, tmp_path, monkeypatch):
    begin = run.Progress.on_step_begin

    def interrupt(self, args, state, control, **others):
        if state.global_step == 2:
            signal.raise_signal(signal.SIGINT)
        begin(self, args, state, control, **others)

    monkeypatch.setattr(run.Progress, "on_step_begin", interrupt)
    assert finetune(text, tmp_path) == 130
    assert (tmp_path / "checkpoint-3").is_dir() and not (tmp_path / "adapter").exists()
    monkeypatch.setattr(run.Progress, "on_step_begin", begin)
    assert finetune(text, tmp_path, "--resume") == 0
    assert report(tmp_path)["losses"] == report(whole)["losses"]
    want = factors(whole)
    assert all(torch.equal(t, want[name]) for name, t in factors(tmp_path).items())


def test_the_merged_model_has_the_loss_of_the_run(whole, text):
    hf.register()
    merged = AutoModelForCausalLM.from_pretrained(
        whole / "merged", experts_implementation="sonicmoe_cpp"
    )
    _, measured = tune_model.load_rows(parse(flags(**OPTIONS | {"data": text})), 12)
    with torch.no_grad():
        got = merged(input_ids=measured.rows, labels=measured.rows).loss.item()
    assert got == pytest.approx(report(whole)["held_out"]["after"], abs=1e-4)


def test_a_model_of_a_folder_with_its_tokenizer(text, tmp_path, capsys, monkeypatch):
    """The first layer of a saved model; afterwards the same steps with other experts."""
    tune_model.build(parse(flags(**OPTIONS))).save_pretrained(tmp_path / "model")
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    alive = []
    beside = run.beside

    def watched(model, settings, rows, stop):
        alive.extend(o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer))
        return beside(model, settings, rows, stop)

    monkeypatch.setattr(run, "beside", watched)
    options = {"config": "", "model": tmp_path / "model", "layers": 1, "beside": "eager"}
    assert finetune(text, tmp_path / "out", "--json", **options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == report(tmp_path / "out") and found["trained"]["tensors"] == 12
    assert not alive  # the first run's optimizer does not count to the second one's memory
    assert found["beside"]["fits"] and found["beside"]["tokens_per_s"] > 0


@pytest.mark.parametrize("weights", ["nf4", "nf4-nested", "mxfp4"])
def test_packed_weights_of_a_config_and_of_a_folder(weights, text, tmp_path):
    """Random codes, and the experts of a folder packed while they are loaded; the embedding on the
    CPU; the merged model has unpacked weights."""
    options = {"weights": weights, "steps": 2}
    assert finetune(text, tmp_path / "a", "--offload-embedding", **options) == 0
    found = report(tmp_path / "a")["predicted_bytes"]
    count = 2 * 16 * 3 * 64 * 64
    # Nested: a byte for 64, 4 bytes for 64 * 256, and in each of 4 tensors a map and an offset.
    scales = {"nf4": count // 16, "mxfp4": count // 32}
    scales["nf4-nested"] = count // 64 + count // 4096 + 4 * 257 * 4
    assert found["experts"] == count // 2 + scales[weights]
    assert found["unpacked weights"] == 4 * count // 2
    assert len(factors(tmp_path / "a")) == 24
    folder = tmp_path / "model"
    tune_model.build(parse(flags(**OPTIONS))).save_pretrained(folder)
    settings = parse(flags(**OPTIONS | options | {"config": "", "model": folder}))
    model = tune_model.add_factors(tune_model.build(settings), settings)
    assert sum(hasattr(p, "packed") for p in model.parameters()) == 4
    tune_model.merge(model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.model.layers[0].mlp.experts.down_proj.dtype == torch.float32


def test_packed_attention_of_a_config_and_of_a_folder(text, tmp_path):
    """4 projections of 64 x 64, 64 x 64 and two of 32 x 64 in each of 2 layers, with an absmax of 4
    bytes for 64 elements."""
    options = {"dense": "nf4", "weights": "nf4", "steps": 2, "logits": 16, "unpack_mib": 1}
    assert finetune(text, tmp_path / "a", "--offload-embedding", **options) == 0
    found, count = report(tmp_path / "a"), 2 * 3 * 64 * 64
    before = parse(flags(**OPTIONS | {"weights": "nf4"}))
    plain = tune_model.build(before)
    tune_model.offload_embedding(plain.requires_grad_(False))
    want = memory.predict(plain, tune_model.experts_of(plain, before), before)["other weights"]
    got = found["predicted_bytes"]
    assert got["other weights"] == want - 4 * count + count // 2 + count // 16
    assert got["unpacked weights"] == 3 * 16 * 64 * 64 * 4 + 64 * 64 * 4
    assert got["logits"] == 16 * 256 * 16
    assert len(factors(tmp_path / "a")) == 24
    assert all(t.abs().max() > 0 for name, t in factors(tmp_path / "a").items() if "attn" in name)
    folder = tmp_path / "model"
    plain = tune_model.build(parse(flags(**OPTIONS)))
    plain.save_pretrained(folder)
    settings = parse(flags(**OPTIONS | {"config": "", "model": folder, "dense": "nf4"}))
    model = tune_model.build(settings)
    for (name, want), got in zip(
        dense.attention_of(plain).items(), dense.attention_of(model).values(), strict=True
    ):
        assert torch.equal(got.weight, packed.pack_nf4(want.weight[None]).unpack()[0]), name


def test_packed_linear_layers_have_the_gradients_of_unpacked_ones():
    linear = torch.nn.Linear(64, 48)
    model = torch.nn.ModuleDict({"attn": linear})
    dense.pack(model)
    x = torch.randn(3, 5, 64, requires_grad=True)
    out = model["attn"](x)
    weight = packed.pack_nf4(linear.weight.detach()[None]).unpack()[0]
    want = torch.nn.functional.linear(x, weight, linear.bias.detach())
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, x, grad)[0]
    assert torch.equal(out, want) and torch.equal(got, torch.autograd.grad(want, x, grad)[0])


@pytest.mark.parametrize("chunk", [5, 64])
def test_the_loss_in_chunks_has_the_gradients_of_the_whole(chunk):
    grads = []
    ids = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(3))
    for chunks in (False, True):
        model = tune_model.build(parse(flags(**OPTIONS)))
        assert not chunks or loss.use_chunks(model, chunk)
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    want, got = grads
    assert got.pop("lm_head.weight") is not None and want.pop("lm_head.weight") is not None
    for name, grad in got.items():
        torch.testing.assert_close(grad, want[name], msg=name)


def test_a_loss_of_scaled_logits_stays_the_models_own():
    model = tune_model.build(parse(flags(**OPTIONS)))
    own = model.loss_function
    model.loss_function = lambda logits, *others, **more: own(30 * logits, *others, **more)
    assert not loss.use_chunks(model, 256)
    ids = torch.arange(8)[None]
    assert model(input_ids=ids).logits.shape[-1] == 256


@pytest.mark.parametrize(
    "sentence, options",
    [
        ("give --model DIR or --config NAME", {"config": ""}),
        ("config is 'llama'; it must be one of qwen3-30b", {"config": "llama"}),
        ("rank is 0; it must be at least 1", {"rank": 0}),
        ("lr is nan; it must be at least 0", {"lr": "nan"}),
        ("factors is 'fp8'; it must be one of fp32, bf16", {"factors": "fp8"}),
        ("give --beside or --weights", {"weights": "nf4", "beside": "eager"}),
        ("weights is 'int8'; it must be one of nf4, nf4-nested, mxfp4", {"weights": "int8"}),
        ("layers is 3; the model has 2", {"layers": 3}),
        ("folder {tmp} has no config.json", {"config": "", "model": "{tmp}"}),
        ("does not exist or is not a folder", {"data": "/nowhere"}),
        ("give more text or a smaller --sequence", {"sequence": 60000}),
        ("cap_gib limits a GPU's memory", {"cap_gib": 16}),
        ("has no checkpoint to resume", {"resume": True}),
    ],
)
def test_an_error_is_one_sentence(sentence, options, text, tmp_path, capsys):
    out = tmp_path / "out"
    more = ["--resume"] if options.pop("resume", False) else []
    options = {k: str(v).replace("{tmp}", str(tmp_path)) for k, v in options.items()}
    assert finetune(text, out, *more, **options) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and sentence.replace("{tmp}", str(tmp_path)) in error
    assert not (out / "adapter").exists()


def test_a_loss_that_is_not_finite_ends_the_run(text, tmp_path, capsys, monkeypatch):
    build = tune_model.build

    def poisoned(settings):
        model = build(settings)
        model.lm_head.weight.data[0] = float("nan")
        return model

    monkeypatch.setattr(tune_model, "build", poisoned)
    assert finetune(text, tmp_path) == 1
    error = capsys.readouterr().err
    assert "error: the loss is not finite at step 1" in error
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_run_with_other_settings_is_not_resumed(whole, text, capsys):
    for more, sentence in (
        (["--resume", "--lr", "0.5"], "lr is 0.5; the run to resume has 0.01"),
        ([], "continue it with --resume, or choose another --out"),
    ):
        assert finetune(text, whole, *more) == 2
        assert sentence in capsys.readouterr().err


def test_a_folder_without_tokenizer_or_experts_is_refused(text, tmp_path, capsys):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    dense = Qwen3ForCausalLM(Qwen3Config(vocab_size=256, **sizes))
    dense.save_pretrained(tmp_path / "dense")
    options = {"config": "", "model": tmp_path / "dense"}
    assert finetune(text, tmp_path / "out", **options) == 2
    assert "dense has no tokenizer" in capsys.readouterr().err
    with pytest.raises(UserError, match="has no experts that sonicmoe_cpp computes"):
        tune_model.experts_of(dense, parse(flags(**OPTIONS | options)))
