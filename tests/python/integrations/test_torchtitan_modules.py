"""The parts of the torchtitan integration, compared with torchtitan's own parts or with their
rules."""

import contextlib
import importlib
import re
import sys
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from devices import DEVICES
from reference import assert_twice
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("torchtitan.models.common.moe", reason="needs torchtitan 0.3")
numpy = pytest.importorskip("numpy")
from sonicmoe_cpp.integrations.torchtitan import modules, overrides  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import (  # noqa: E402
    GroupedExperts,
    MoE,
    RoutedExperts,
    TokenChoiceTopKRouter,
)
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher  # noqa: E402

KINDS = [GroupedExperts]
with contextlib.suppress(ImportError):  # on a torch with which torchtitan's models do not import
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    KINDS.append(GptOssGroupedExperts)
E, K, D, N, B, L = 8, 2, 24, 16, 2, 40


def experts_config(kind):
    return kind.Config(dim=D, hidden_dim=N, num_experts=E)


def routed_config(kind):
    dispatcher = LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    return RoutedExperts.Config(inner_experts=experts_config(kind), token_dispatcher=dispatcher)


def build(config, device="cpu", dtype=torch.bfloat16):
    torch.manual_seed(0)
    module = config.build()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.to(device, dtype)


def tokens(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def step(module, dout, x, *inputs):
    x = x.clone().requires_grad_()
    scores = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    leaves = {"x": x} | {f"input{i}": t for i, t in enumerate(scores) if t.is_floating_point()}
    leaves |= dict(module.named_parameters())
    out = module(x, *scores)
    found = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
    return {"out": out.detach()} | dict(zip(leaves, found, strict=True))


class Exact(GroupedExperts):
    """torchtitan's experts with products in fp64."""

    def _grouped_mm(self, *, A, B_t, offs):
        begins = [0, *offs.tolist()]
        parts = [A[b:e] @ w for b, e, w in zip(begins, begins[1:], B_t, strict=False)]
        return torch.cat([*parts, A.new_zeros(len(A) - begins[-1], B_t.shape[-1])])


def exact_step(module, *arguments, monkeypatch):
    """The step of torchtitan's own module in fp64: its casts to bf16 do nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda self: self)
        patch.setattr(GroupedExperts, "_grouped_mm", Exact._grouped_mm)
        floats = [t.double() if t.is_floating_point() else t for t in arguments]
        return step(module.double(), *floats)


def routing(tokens_, seed=2):
    logits = torch.randn(B, tokens_, E, generator=torch.Generator().manual_seed(seed))
    scores, ids = logits.softmax(-1).topk(K)
    return scores, ids, torch.bincount(ids.flatten(), minlength=E)


def compare(got, plain, exact):
    for name in exact:
        assert_twice(name, got[name].cpu(), plain[name].cpu(), exact[name], torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_routed_experts(device, kind, monkeypatch):
    x, dout, (scores, ids, counts) = tokens(B, L, D), tokens(B, L, D, seed=3), routing(L)
    inputs = [t.to(device) for t in (dout, x, scores, ids, counts)]
    plain = step(build(routed_config(kind), device), *inputs)
    got = step(build(overrides.routed_experts(routed_config(kind)), device), *inputs)
    cpu = [dout, x, scores, ids, counts]
    exact = exact_step(build(routed_config(kind)), *cpu, monkeypatch=monkeypatch)
    compare(got, plain, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_grouped_experts(device, kind, monkeypatch):
    counts = torch.tensor([7, 0, 12, 1, 9, 0, 3, 8])
    x, dout = tokens(40, D), tokens(40, D, seed=3)
    inputs = [t.to(device) for t in (dout, x, counts)]
    plain = step(build(experts_config(kind), device), *inputs)
    got = step(build(overrides.grouped_experts(experts_config(kind)), device), *inputs)
    exact = exact_step(build(experts_config(kind)), dout, x, counts, monkeypatch=monkeypatch)
    compare(got, plain, exact)


def test_gradients_are_added_to_buffers():
    dout, x, routed = tokens(B, L, D, seed=3), tokens(B, L, D), routing(L)
    config = overrides.routed_experts(routed_config(GroupedExperts))
    want = step(build(config), dout, x, *routed)
    module, leaf = build(config), x.clone().requires_grad_()
    weights = dict(module.inner_experts.named_parameters())
    buffers = {name: torch.ones_like(w, dtype=torch.float32) for name, w in weights.items()}
    gate, up, down = (buffers[name] for name in ("w1_EFD", "w3_EFD", "w2_EDF"))
    module.inner_experts.grad_accum = ((gate, up), down)
    module(leaf, *routed).backward(dout)
    assert torch.equal(leaf.grad, want["x"])
    for name, buffer in buffers.items():
        assert weights[name].grad is None, name
        expected = want[f"inner_experts.{name}"].float()
        torch.testing.assert_close(buffer - 1, expected, rtol=2**-7, atol=1e-6)


def test_rows_past_the_counts_are_not_read():
    counts = torch.tensor([7, 0, 12, 1, 9, 0, 3, 0])
    x, dout = tokens(40, D), tokens(40, D, seed=3)
    x[32:], dout[32:] = torch.nan, torch.nan
    got = step(build(overrides.grouped_experts(experts_config(GroupedExperts))), dout, x, counts)
    assert (got["out"][32:] == 0).all() and (got["x"][32:] == 0).all()
    assert all(t.isfinite().all() for t in got.values())


class Quantised(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass


def test_unknown_experts_are_refused():
    config = routed_config(Quantised)
    sentence = "does not know what Quantised.Config computes: it takes the place of GroupedExperts"
    with pytest.raises(NotImplementedError, match=sentence):
        overrides.grouped_experts(config.inner_experts)
    with pytest.raises(NotImplementedError, match=sentence):
        overrides.routed_experts(config)


@pytest.mark.parametrize("name", ["overrides", "tokens", "config_registry"])
@pytest.mark.parametrize("problem", ["0.4.0 is installed", "No package metadata"])
def test_another_torchtitan_is_refused(monkeypatch, name, problem):
    def version(package):
        if "is installed" in problem:
            return problem.split()[0]
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    name = f"sonicmoe_cpp.integrations.torchtitan.{name}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=rf"needs torchtitan 0\.3: .*{problem}"):
        importlib.import_module(name)


def test_typechecking_is_refused(monkeypatch):
    monkeypatch.setattr(modules.spmd_types, "is_type_checking", lambda: True)
    module = build(overrides.grouped_experts(experts_config(GroupedExperts)))
    with pytest.raises(NotImplementedError, match=r"leave debug\.spmd_typechecking"):
        module(tokens(8, D), torch.tensor([8, 0, 0, 0, 0, 0, 0, 0]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rounding": "stochastic"}, "rounding is .*stochastic"),
        ({"tile": "128"}, "tile is"),
    ],
)
def test_rounding_options_are_checked(options, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        overrides.token_rounding(None, **options)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"transport": "rdma"}, ValueError, "transport is .*rdma"),
        ({"transport": "peer", "capacity": 1.2}, ValueError, "capacity is given without max_tok"),
        ({"max_tokens": 64}, ValueError, "max_tokens is 64 .* without transport, must come with"),
    ],
)
def test_options_of_a_transport_are_checked(options, error, sentence):
    with pytest.raises(error, match=sentence):
        overrides.routed_experts(routed_config(GroupedExperts), **options)
    with pytest.raises(error, match=sentence):
        overrides.token_rounding(layer_config(), **options)


@pytest.mark.parametrize("precision", ["fp8", "auto"])
def test_a_precision_over_ranks(precision):
    """A group of one rank has the bits of a job without expert parallelism."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for transport in ("all_to_all", None):
            experts = GroupedExperts.Config(dim=128, hidden_dim=64, num_experts=E)
            dispatcher = LocalTokenDispatcher.Config(num_experts=E, top_k=K)
            config = RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher)
            module = build(overrides.routed_experts(config, precision, transport))
            if transport is not None:
                group = modules.make_transport(transport, None, module.limits)
                module.place = modules.Place.of_module(group)
            found.append(step(module, tokens(B, L, 128, seed=3), tokens(B, L, 128), *routing(L)))
        assert all(torch.equal(found[0][name], want) for name, want in found[1].items())
    finally:
        dist.destroy_process_group()


def test_a_transport_serves_without_expert_parallelism():
    """The same list of overrides serves any number of ranks."""
    config = overrides.routed_experts(routed_config(GroupedExperts), transport="peer")
    plain = overrides.routed_experts(routed_config(GroupedExperts))
    inputs = tokens(B, L, D, seed=3), tokens(B, L, D), *routing(L)
    found, want = step(build(config), *inputs), step(build(plain), *inputs)
    assert all(torch.equal(found[name], want[name]) for name in want)


class Forwards(TorchDispatchMode):
    """Counts the runs of the layer's forward."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.sonicmoe_cpp.moe_forward.default
        return function(*args, **(kwargs or {}))


def test_selective_checkpointing_keeps_h():
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    config = SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[])
    inputs = tokens(B, L, D), *routing(L)
    counts = []
    for policy in (config, overrides.selective_ac(config)):
        block = build(overrides.routed_experts(routed_config(GroupedExperts)))
        wrapped = policy.build()._wrap_block(block)
        with Forwards() as seen:
            step(wrapped, tokens(B, L, D, seed=3), *inputs)
        counts.append(seen.count)
    assert counts == [2, 1]


def layer_config():
    router = TokenChoiceTopKRouter.Config(
        num_experts=E,
        top_k=K,
        score_func="sigmoid",
        route_norm=True,
        gate=Linear.Config(in_features=D, out_features=E),
    )
    return MoE.Config(num_experts=E, router=router, routed_experts=routed_config(GroupedExperts))


def with_router(config):
    config.router = overrides.router(config.router)
    return config


@pytest.mark.parametrize(
    "replaced",
    [with_router, partial(overrides.token_rounding, tile=16)],
    ids=["router", "rounding"],
)
def test_nan_shows_in_its_token_alone(replaced):
    """As in torchtitan's own router, a NaN reaches the loss, which stops the run. It must not
    choose an expert that does not exist: that would be an index error on the device."""
    layer = build(replaced(layer_config())).train()
    layer.expert_bias_E = layer.expert_bias_E.float()
    x = tokens(B, L, D)
    x[0, 3] = torch.nan
    out = layer(x)
    bad = out.isnan().any(-1)
    assert bad[0, 3] and bad.sum() == 1
    assert layer.tokens_per_expert_E.sum() >= (B * L - 1) * K


def gate_of(dtype=torch.bfloat16):
    router = layer_config().router
    router.gate.in_features = 96
    router = overrides.router(router).build()
    with torch.no_grad():
        router.gate.weight.copy_(tokens(E, 96, seed=5))
    return router.to(dtype)


def logits_and_gradients(logits, router, x, dlogits):
    x = x.clone().requires_grad_()
    router.gate.weight.grad = None
    found = logits(router, x)
    found.backward(dlogits.to(found.dtype))
    return found.detach(), x.grad, router.gate.weight.grad.clone()


def in_fp32(router, x):
    """The result of autocast to fp32, which the CPU does not support."""
    return x.float() @ router.gate.weight.float().t()


@pytest.mark.parametrize("device", DEVICES)
def test_gate_in_bf16_is_the_gate_in_fp32(device):
    """Logits are in fp32; their gradients are rounded to bf16 at the end. The error against fp64
    may be twice that of torchtitan's gate."""
    router = gate_of().to(device)
    x, dlogits = tokens(B, L, 96).bfloat16().to(device), tokens(B, L, E, seed=9).to(device)
    ours = logits_and_gradients(modules._logits, router, x, dlogits)
    assert ours[0].dtype == torch.float32
    theirs = logits_and_gradients(in_fp32, router, x, dlogits)
    exact = logits_and_gradients(lambda r, x: r.gate(x), router.double(), x.double(), dlogits)
    names = ("logits", "dx", "dw")
    for name, got, same, want in zip(names, ours, theirs, exact, strict=True):
        assert_twice(name, got, same, want, got.dtype)


def test_gate_splits_its_gradient():
    """A gradient that bf16 would round to 1 keeps its last bits."""
    router, x = gate_of(), torch.zeros(1, 2, 96, dtype=torch.bfloat16)
    x[0, 0, 0], x[0, 1, 0] = 1, -1
    dlogits = torch.ones(1, 2, E)
    dlogits[0, 0] += 2**-10
    *_, dw = logits_and_gradients(modules._logits, router, x, dlogits)
    assert (dw[:, 0] == 2**-10).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_of_the_gate_run(dtype):
    router, x = gate_of(dtype), tokens(B, L, 96).to(dtype)
    before = modules._logits(router, x)
    router.gate.register_forward_hook(lambda module, inputs, output: output + 1)
    found = modules._logits(router, x).float()
    assert_twice("hooked", found, before + 1, before.double() + 1, dtype)


# ---- models and data -----------------------------------------------------------------------------


def test_models_have_the_size_of_their_names():
    models = "sonicmoe_cpp.integrations.torchtitan.models"
    models = pytest.importorskip(models, exc_type=ImportError)
    from sonicmoe_cpp.integrations.torchtitan.sizes import SIZES

    shapes = (Path(__file__).parents[3] / "src/core/named_shapes.inc").read_text()
    named = dict(re.findall(r'\{"([^"]+)", \{([\d, ]+)\}\}', shapes))
    for name, size in SIZES.items():
        with torch.device("meta"):
            model = models.model(size).build()
        total = sum(p.numel() for p in model.parameters())
        if name == "debug":
            continue
        assert [int(n) for n in named[name].split(",")][1:] == [size.d, size.n, size.E, size.K]
        billions = float(name.split("B")[0])
        assert round(total / 1e9, 1 if billions < 2 else 0) == billions, f"{name}: {total:,}"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "tokens.npy"
    numpy.save(path, numpy.arange(1, 1002, dtype=numpy.uint16))
    return str(path)


def tokens_module():
    name = "sonicmoe_cpp.integrations.torchtitan.tokens"
    return pytest.importorskip(name, exc_type=ImportError)


def loader(token_file, ranks, rank, batch, end=-1):
    kind = tokens_module().TokenFileLoader
    config = kind.Config(dataset_path=token_file, end_of_text=end)
    shape = {"dp_world_size": ranks, "dp_rank": rank, "seq_len": 10, "local_batch_size": batch}
    return kind(config, tokenizer=None, snapshot_every_n_steps=1, **shape)


def firsts(loaders, steps):
    """The first token of every sample of a step, sorted."""
    runs = [iter(one) for one in loaders]
    return [
        sorted(int(t) for run in runs for t in next(run)[0]["input"][:, 0]) for _ in range(steps)
    ]


def test_a_step_has_the_same_samples_for_any_number_of_ranks(token_file):
    one = firsts([loader(token_file, 1, 0, 4)], 60)
    two = firsts([loader(token_file, 2, rank, 2) for rank in range(2)], 60)
    assert one == two
    epoch = [t for step in one[:25] for t in step]
    assert sorted(epoch) == list(range(1, 1001, 10))  # each sample once
    assert one[25:50] != one[:25]  # in another order in the next epoch


def test_the_state_of_one_rank_goes_on_with_two(token_file):
    whole = firsts([loader(token_file, 1, 0, 4)], 6)
    first = loader(token_file, 1, 0, 4)
    firsts([first], 3)
    later = [loader(token_file, 2, rank, 2) for rank in range(2)]
    for one in later:
        one.load_state_dict(first.state_dict())
    assert firsts(later, 3) == whole[3:]


def test_documents_end():
    inputs, positions, labels = tokens_module()._example(torch.tensor([5, 6, 0, 7, 0, 0, 8, 9]), 0)
    assert inputs.tolist() == [5, 6, 0, 7, 0, 0, 8]
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert labels.tolist() == [6, 0, -100, 0, -100, -100, 9]


@pytest.mark.parametrize(
    ("tokens_", "sentence"),
    [
        (numpy.zeros(10, numpy.uint16), "has 10 tokens, a sequence needs 11"),
        (numpy.zeros(100), "dtype float64, must be one row of integers"),
        (numpy.zeros((2, 50), numpy.uint16), r"shape \(2, 50\)"),
    ],
)
def test_token_files_are_checked(tmp_path, tokens_, sentence):
    path = tmp_path / "bad.npy"
    numpy.save(path, tokens_)
    with pytest.raises(ValueError, match=sentence):
        loader(str(path), 1, 0, 1)
    with pytest.raises(ValueError, match=r"dataloader.dataset_path is not given"):
        loader("", 1, 0, 1)


def test_text_is_written_and_read(tmp_path):
    writer = tokens_module()
    from tokenizers import Tokenizer

    text = {"a.txt": "one two three " * 50, "b.txt": "four five " * 50}
    for name, words in text.items():
        (tmp_path / name).write_text(words)
    out, assets = str(tmp_path / "out.npy"), str(tmp_path / "assets")
    count = writer.write(str(tmp_path), "*.txt", assets, out, train_vocab=300)
    tokenizer = Tokenizer.from_file(f"{assets}/tokenizer.json")
    found = numpy.load(out)
    assert count == len(found) and found.dtype == numpy.uint16
    ends = [int(i) for i in (found == 0).nonzero()[0]]
    parts = [found[: ends[0]], found[ends[0] + 1 : ends[1]]]
    assert [tokenizer.decode(part.tolist()) for part in parts] == list(text.values())
    again = str(tmp_path / "again.npy")
    writer.write(str(tmp_path), "*.txt", assets, again)
    assert (numpy.load(again) == found).all()
    with pytest.raises(SystemExit, match=r"tokenizer\.json does not exist; --train-vocab"):
        writer.write(str(tmp_path), "*.txt", str(tmp_path / "none"), out)
