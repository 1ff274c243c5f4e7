"""When the experts of torchtitan and transformers quantise their weights, alone and under FSDP2."""

import contextlib
import copy
import os
from types import SimpleNamespace

import pytest
import sonicmoe_cpp
import torch
from test_fp8_module import OfData, count_quantising
from torch import multiprocessing, nn
from torch.utils.checkpoint import checkpoint
from worlds import free_port, leave

BF16 = torch.bfloat16
T, E, K, D, N = 48, 4, 2, 128, 256
STEPS, MICRO = 3, 2


class Layer(nn.Module):
    """Experts with fixed routing: the arguments after the rows do not change."""

    def __init__(self, experts, *routing):
        super().__init__()
        self.experts, self.routing = experts, routing

    def forward(self, x):
        return self.experts(x, *self.routing)


def titan_config(kind):
    """The configuration of torchtitan's experts in fp8; `kind` names their class."""
    pytest.importorskip("torchtitan.models.common.moe", reason="needs torchtitan 0.3")
    from sonicmoe_cpp.integrations.torchtitan import overrides

    if kind == "gpt_oss":
        name = "torchtitan.models.gpt_oss.moe"
        of = pytest.importorskip(name, exc_type=ImportError).GptOssGroupedExperts
    else:
        from torchtitan.models.common.moe import GroupedExperts as of
    return overrides.grouped_experts(of.Config(dim=D, hidden_dim=N, num_experts=E), "fp8")


def titan(kind):
    experts = titan_config(kind).build()
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    return Layer(experts, torch.tensor([20, 0, 15, 13]))


def transformers(architecture):
    pytest.importorskip("transformers", reason="transformers is not installed")
    import hf_models
    from sonicmoe_cpp.integrations import hf

    hf.register()
    sizes = {"hidden_size": D, "intermediate_size": N, "num_hidden_layers": 1}
    counts = {"qwen3_moe": {"num_experts": E, "moe_intermediate_size": N}}
    options = counts.get(architecture, {"num_local_experts": E})
    model = hf_models.build(architecture, **sizes, **options)
    hf.set_precision(model, "fp8")
    g = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
    return Layer(hf_models.experts_of(model)[0][1], ids, torch.rand(T, K, generator=g))


KINDS = {
    "titan": lambda: titan("swiglu"),
    "titan gpt_oss": lambda: titan("gpt_oss"),
    "qwen3_moe": lambda: transformers("qwen3_moe"),
    "gpt_oss": lambda: transformers("gpt_oss"),
}


@pytest.fixture(params=KINDS)
def layer(request):
    return KINDS[request.param]().to(BF16)


@pytest.fixture
def times(monkeypatch):
    return count_quantising(monkeypatch)


def batch(seed):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(seed)).to(BF16)


def fresh(layer, x):
    """The output of a copy, which has no quantised weights yet."""
    return copy.deepcopy(layer)(x)


@pytest.mark.parametrize("kind", [lambda p: torch.optim.AdamW(p, lr=0.05), OfData])
def test_weights_are_quantised_once_a_step(layer, times, kind):
    optimizer = kind(list(layer.parameters()))
    for step in range(1, STEPS + 1):
        for micro in range(MICRO):
            x = batch(10 * step + micro)
            out = layer(x)
            out.float().square().mean().backward()
            assert times[0] == step
            assert torch.equal(out, fresh(layer, x))
            times[0] = step
        optimizer.step()
        optimizer.zero_grad()


def test_every_change_is_seen(layer, times):
    x = batch(0)
    name, _ = next(iter(layer.experts.named_parameters()))
    other = {n: 1.5 * t for n, t in layer.state_dict().items()}

    def load():
        layer.load_state_dict(other)

    def assign():
        layer.load_state_dict({n: 2 * t for n, t in other.items()}, assign=True)

    def replace():
        setattr(layer.experts, name, nn.Parameter(getattr(layer.experts, name).detach() * 2))

    @torch.no_grad()
    def write():
        getattr(layer.experts, name).mul_(0.5)

    def move():
        layer.to(torch.float32).to(BF16)

    layer(x)
    for change in (load, assign, replace, write, move):
        change()
        before = times[0]
        got = layer(x)
        assert times[0] == before + 1, change
        assert torch.equal(layer(x), got) and times[0] == before + 1, change
        assert torch.equal(got, fresh(layer, x)), change


def test_other_sharded_parameters_at_the_same_address(times):
    """A sharded parameter can be freed, and another one can get its address and version."""
    weights = (torch.randn(E, 2 * N, D).to(BF16), torch.randn(E, D, N).to(BF16))
    gathered = tuple(nn.Parameter(w.clone()) for w in weights)
    cache = sonicmoe_cpp.fp8.Fp8Cache("w_up", "w_down")
    for number in (1, 2, 3):
        cache.sharded = [SimpleNamespace(sharded_param=nn.Parameter(w)) for w in weights]
        for _ in range(2):
            cache.get(gathered, gathered, BF16, activation="swiglu")
            assert times[0] == number


def test_another_layout_is_quantised_again(times):
    weights = tuple(nn.Parameter(torch.randn(*s).to(BF16)) for s in ((E, 2 * N, D), (E, D, N)))
    cache = sonicmoe_cpp.fp8.Fp8Cache("w_up", "w_down")
    for number, layout in enumerate(("concatenated", "interleaved"), 1):
        for _ in range(2):
            cache.get(weights, weights, BF16, activation="swiglu", gate_layout=layout)
            assert times[0] == number


def test_graphs_and_checkpoints(layer, times):
    """A graph quantises in every call; a checkpoint takes the kept weights in both forwards."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    parameters = list(layer.parameters())

    def recomputed(x):
        return checkpoint(layer, x, use_reentrant=False)

    for seed in range(3):
        x, found = batch(seed), []
        for function in (layer, compiled, recomputed):
            out = function(x)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), parameters)))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
        assert times[0] == seed + 1
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.25)


def test_a_trace_keeps_no_values(layer, times):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = batch(0)
    with torch.no_grad():
        layer(x)
        graph = make_fx(lambda state, x: torch.func.functional_call(layer, state, x))(
            dict(layer.named_parameters()), x
        )
        for parameter in layer.parameters():
            parameter.mul_(1.5)
        want = layer(x)
        assert torch.equal(graph(dict(layer.named_parameters()), x), want)
        assert torch.equal(want, fresh(layer, x)) and times[0] == 3


# ---- FSDP2 ---------------------------------------------------------------------------------------


def shard(layer, form):
    """fully_shard() of a model with the layer. In the form "divided" the experts are DTensors of a
    mesh of their own before, as under expert parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("fsdp", "ep"))
    if form == "divided":
        for name, parameter in list(layer.experts.named_parameters()):
            whole = distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])
            setattr(layer.experts, name, nn.Parameter(whole))
    model = nn.Sequential(layer)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["fsdp"], mp_policy=policy)
    return model


def load_changed(model):
    """Loads other weights, once into the sharded parameters and once in place of them."""
    for assign in (False, True):
        state = {n: 1.25 * t for n, t in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)


@torch.no_grad()
def write_in_place(model):
    for parameter in model.parameters():
        parameter.to_local().mul_(1.25)


def share(model):
    sonicmoe_cpp.share_fp8_weights(model)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def share_by_override(model):
    from sonicmoe_cpp.integrations.torchtitan.optimizers import share_fp8_weights
    from torchtitan.components.optimizer import default_adamw

    config = default_adamw(lr=0.05)
    config.implementation = "foreach"
    return share_fp8_weights(config).build(model_parts=[model])


def rank_errors(model, whole, optimizer, rank, times) -> list:
    """Trains, and compares every micro-batch with the layer `whole`, which gets the gathered
    weights."""
    wrong = []
    for step, change in enumerate((None, load_changed, write_in_place, None)):
        for micro in range(MICRO):
            for p, part in zip(whole.parameters(), model.parameters(), strict=True):
                p.data.copy_(part.full_tensor())
            x = batch(100 * step + 10 * micro + rank)
            want = fresh(whole, x)
            times[0] = 0
            out = model(x)
            out.float().square().mean().backward()
            # The first micro-batch comes after an optimizer's step, the second after `change`.
            if times[0] != (micro == 0 or change is not None):
                wrong.append(f"step {step}, {micro}: quantised {times[0]} times")
            if not torch.equal(out, want):
                wrong.append(f"step {step}, {micro}: another output")
            if change is not None and micro == 0:
                change(model)
        optimizer.step()
        optimizer.zero_grad()
    return wrong


def sharded_rank(rank, port, cases, results):
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    times = count_quantising(pytest.MonkeyPatch())
    wrong = []
    for kind, form, sharing in cases:
        with contextlib.suppress(pytest.skip.Exception):
            whole, layer = KINDS[kind]().to(BF16), KINDS[kind]()
            model = shard(layer, form)
            optimizer = sharing(model)
            found = rank_errors(model, whole, optimizer, rank, times)
            wrong += [f"{kind}, {form}, {sharing.__name__}: {f}" for f in found]
    results.put(wrong)
    leave()


TITAN = [
    ("titan", "plain", share),
    ("titan", "plain", share_by_override),
    ("titan", "divided", share),
    ("titan gpt_oss", "plain", share),
]
HF = [("qwen3_moe", "plain", share), ("gpt_oss", "plain", share), ("qwen3_moe", "divided", share)]


@pytest.mark.slow
@pytest.mark.parametrize("needs, cases", [("torchtitan", TITAN), ("transformers", HF)])
def test_under_fsdp2(needs, cases):
    pytest.importorskip(needs)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(sharded_rank, (free_port(), cases, results), nprocs=2)
    assert [results.get() for _ in range(2)] == [[], []]
