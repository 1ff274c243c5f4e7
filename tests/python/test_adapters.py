"""Grouped rows as torchtitan and prime-rl pass them, by imitations of the code that calls us."""

import sys
import types
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICES, Waits
from reference import assert_twice, error
from sonicmoe_cpp import Activation
from sonicmoe_cpp.compat.sonicmoe import moe_general_routing_inputs
from sonicmoe_cpp.compat.sonicmoe.enums import ActivationType
from sonicmoe_cpp.integrations import prime_rl, torchtitan
from torch import nn

E, D, N = 5, 24, 16
COUNTS = [7, 0, 12, 1, 9]  # 29 rows; padded to ALIGN, at least 8: 8, 8, 16, 8, 16
ALIGN = 8


def parameters(names, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = {"w1": (E, N, D), "w3": (E, N, D), "w2": (E, D, N)}
    return {
        name: (torch.randn(shapes[name], generator=g, dtype=torch.float64) * 0.25).to(dtype)
        for name in names
    }


def loop(x, counts, gate, up, down, act=F.silu, biases=(None, None, None)):
    """The experts one after the other; rows past the counts give zeros."""
    b_gate, b_up, b_down = biases
    parts, begin = [], 0
    for e, count in enumerate(counts):
        rows = x[begin : begin + count]
        h = F.linear(rows, up[e], None if b_up is None else b_up[e])
        if gate is None:
            h = act(h)
        else:
            h = act(F.linear(rows, gate[e], None if b_gate is None else b_gate[e])) * h
        parts.append(F.linear(h, down[e], None if b_down is None else b_down[e]))
        begin += count
    return torch.cat([*parts, x.new_zeros(len(x) - begin, x.shape[1])])


class TitanExperts(nn.Module):
    """torchtitan's GroupedExperts. It looks up the function that replace() replaces in the module
    that defines it."""

    def __init__(self, titan, dtype):
        super().__init__()
        self.titan = titan
        for name, value in parameters(("w1", "w2", "w3"), dtype).items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, x, num_tokens_per_expert):
        w1, w2, w3 = (
            w.to_local() if hasattr(w, "to_local") else w for w in (self.w1, self.w2, self.w3)
        )
        run = self.titan._run_experts_grouped_mm
        if hasattr(self.titan, "indices_padding_wrapper"):
            run = self.titan.indices_padding_wrapper(run)
        return run(w1, w2, w3, x, num_tokens_per_expert)


def their_grouped_mm(w1, w2, w3, x, num_tokens_per_expert):
    return loop(x, [int(c) for c in num_tokens_per_expert], w1, w3, w2)


def aligned(counts):
    """Row indices in which -1 pads every group to a multiple of ALIGN; and the padded sizes."""
    begins = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    sizes = [max(ALIGN, -(-count // ALIGN) * ALIGN) for count in counts]
    indices = []
    for begin, count, size in zip(begins.tolist(), counts, sizes, strict=True):
        indices += [*range(begin, begin + count), *[-1] * (size - count)]
    return indices, sizes


def their_padding(function):
    """torchtitan's indices_padding_wrapper: appends a row of zeros, which index -1 reads; pads
    every group to a multiple of ALIGN and the whole to a fixed length."""

    def wrapper(w1, w2, w3, x, num_tokens_per_expert):
        indices, sizes = aligned([int(c) for c in num_tokens_per_expert])
        longest = len(x) + E * ALIGN
        indices = torch.tensor(indices + [-1] * (longest - len(indices)), device=x.device)
        padded = torch.vstack((x, x.new_zeros(x.shape[-1])))
        shape = padded.shape
        out = function(w1, w2, w3, padded[indices], torch.tensor(sizes, device=x.device))
        back = out.new_empty(shape)
        back[indices] = out
        return back[:-1]

    return wrapper


def titan_module(padded):
    module = types.ModuleType("titan_moe")
    module._run_experts_grouped_mm = their_grouped_mm
    if padded:
        module.indices_padding_wrapper = their_padding
    return module


def step(experts, x, counts, dout):
    x = x.clone().requires_grad_()
    out = experts(x, counts)
    return {"out": out.detach()} | dict(
        zip(
            ("x", *dict(experts.named_parameters())),
            torch.autograd.grad(out, [x, *experts.parameters()], dout),
            strict=True,
        )
    )


def rows(count, dtype=torch.float64, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, D, generator=g, dtype=torch.float64).to(dtype)


def compare(names, got, plain, exact):
    for name in names:
        assert_twice(name, got[name].cpu(), plain[name].cpu(), exact[name], torch.bfloat16)


@pytest.mark.parametrize("counts_dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_torchtitan(device, tail, padded, counts_dtype):
    x, dout = rows(29 + tail), rows(29 + tail, seed=2)
    counts = torch.tensor(COUNTS, dtype=counts_dtype)
    titan = titan_module(padded)
    exact = step(TitanExperts(titan_module(False), torch.float64), x, counts, dout)
    experts = TitanExperts(titan, torch.bfloat16).to(device)
    arguments = [t.to(device) for t in (x.bfloat16(), counts, dout.bfloat16())]
    plain = step(experts, *arguments)
    plain["out"][29:] = 0  # their padding wrapper does not write these rows
    torchtitan.replace(titan)
    got = step(experts, *arguments)
    compare(exact, got, plain, exact)
    if tail:
        assert (got["out"][29:] == 0).all() and (got["x"][29:] == 0).all()
    if padded:
        assert titan.indices_padding_wrapper(torchtitan.run_experts) is torchtitan.run_experts


@pytest.mark.parametrize("device", DEVICES)
def test_torchtitan_with_groups_that_are_padded_already(device):
    """Under expert parallelism the groups arrive padded: padding rows are zeros and belong to an
    expert."""
    indices, sizes = aligned(COUNTS)
    real = torch.tensor(indices) >= 0
    x = torch.cat([rows(29), rows(1) * 0])[indices]
    dout = rows(len(x), seed=2) * real[:, None]
    counts = torch.tensor(sizes)
    exact = step(TitanExperts(titan_module(False), torch.float64), x, counts, dout)
    experts = TitanExperts(titan_module(False), torch.bfloat16).to(device)
    arguments = [t.to(device) for t in (x.bfloat16(), counts, dout.bfloat16())]
    plain = step(experts, *arguments)
    torchtitan.replace(experts.titan)
    compare(exact, step(experts, *arguments), plain, exact)


def test_torchtitan_master_weights_are_cast():
    titan = titan_module(False)
    torchtitan.replace(titan)
    experts = TitanExperts(titan, torch.float32)
    got = step(experts, rows(29, torch.float32), torch.tensor(COUNTS), rows(29, torch.float32))
    assert {value.dtype for value in got.values()} == {torch.float32}
    same = step(
        TitanExperts(titan, torch.bfloat16),
        rows(29, torch.bfloat16),
        torch.tensor(COUNTS),
        rows(29, torch.bfloat16),
    )
    assert all(torch.equal(got[name], same[name].float()) for name in same)


def test_torchtitan_distributed_weights():
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    titan = titan_module(False)
    torchtitan.replace(titan)
    experts = TitanExperts(titan, torch.bfloat16)
    x, counts = rows(29, torch.bfloat16), torch.tensor(COUNTS)
    want = experts(x, counts)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        whole = {
            n: distribute_tensor(p, mesh, [Replicate()])
            for n, p in parameters(("w1", "w2", "w3"), torch.bfloat16).items()
        }
        assert torch.equal(torchtitan.run_experts(**whole, x=x, num_tokens_per_expert=counts), want)
        for name, value in whole.items():
            setattr(experts, name, nn.Parameter(value))
        assert torch.equal(experts(x, counts), want)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_with_distributed_weights(backend):
    """The adapters use this rank's part of a DTensor, also while torch.compile traces."""
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    torch._dynamo.reset()
    titan = titan_module(False)
    torchtitan.replace(titan)
    x, counts = rows(29, torch.bfloat16), torch.tensor(COUNTS)
    want = TitanExperts(titan, torch.bfloat16)(x, counts)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        weights = {
            n: nn.Parameter(distribute_tensor(p, mesh, [Shard(0)]))
            for n, p in parameters(("w1", "w2", "w3"), torch.bfloat16).items()
        }
        run = torch.compile(torchtitan.run_experts, backend=backend, fullgraph=True)
        assert torch.equal(run(**weights, x=x, num_tokens_per_expert=counts), want)
    finally:
        distributed.destroy_process_group()


def test_torchtitan_says_what_it_needs(monkeypatch):
    works = "this adapter works with torchtitan 0.2.0 to 0.2.2"
    monkeypatch.setattr(metadata, "version", lambda name: "0.3.0")
    with pytest.raises(ImportError, match=f"other has no _run_experts_grouped_mm: {works}.* 0.3.0"):
        torchtitan.replace(types.ModuleType("other"))
    monkeypatch.setitem(sys.modules, "torchtitan", types.ModuleType("torchtitan"))
    with pytest.raises(ImportError, match=f"torchtitan.models.* is missing: {works}"):
        torchtitan.replace()
    # torchtitan 0.2's gpt-oss has a function of this name with other arguments.
    gpt_oss = types.ModuleType("gpt_oss")
    gpt_oss._run_experts_grouped_mm = lambda mlp1_weight, mlp1_bias, x: x
    with pytest.raises(
        ImportError, match=r"gpt_oss takes mlp1_weight, .*, must take w1, w2, w3, x"
    ):
        torchtitan.replace(gpt_oss)


def test_torchtitan_is_found_by_its_name(monkeypatch):
    titan = titan_module(False)
    name = "torchtitan.models.moe.moe"
    for end in range(1, 5):
        parent = ".".join(name.split(".")[:end])
        monkeypatch.setitem(sys.modules, parent, titan if parent == name else types.ModuleType(""))
    torchtitan.replace()
    assert titan._run_experts_grouped_mm is torchtitan.run_experts
    torchtitan.replace()


# ---- prime-rl ------------------------------------------------------------------------------------


class Silu:
    @staticmethod
    def apply(gate, up):
        return F.silu(up) if gate is None else F.silu(gate) * up


class Relu2:
    @staticmethod
    def apply(gate, up):
        return F.relu(up).square() if gate is None else F.relu(gate).square() * up


class Clamped:
    @staticmethod
    def apply(gate, up):
        return F.silu(gate.clamp(max=7)) * up.clamp(-7, 7)


class LateClamped:
    @staticmethod
    def apply(gate, up):
        return F.silu(gate).clamp(max=7) * up.clamp(-7, 7)


class PrimeExperts(nn.Module):
    """prime-rl's GroupedExperts: fused or separate projections, biases or none."""

    def __init__(self, form="fused", activation=Silu, bias=False, dtype=torch.float64):
        super().__init__()
        self.activation = activation
        w = parameters(("w1", "w3", "w2"), dtype)
        self.gate_up_proj = self.gate_proj = self.up_proj = None
        if form == "fused":
            self.gate_up_proj = nn.Parameter(torch.cat([w["w1"], w["w3"]], dim=1))
        else:
            self.gate_proj = nn.Parameter(w["w1"]) if form == "separate" else None
            self.up_proj = nn.Parameter(w["w3"])
        self.down_proj = nn.Parameter(w["w2"])
        for name, size in (("gate_proj", N), ("up_proj", N), ("down_proj", D)):
            g = torch.Generator().manual_seed(size)
            value = torch.randn(E, size, generator=g, dtype=torch.float64).to(dtype)
            used = bias and not (name == "gate_proj" and form == "ungated")
            setattr(self, f"{name}_bias", nn.Parameter(value) if used else None)

    def plain(self, x, num_tokens_per_expert):
        gate, up = self.gate_proj, self.up_proj
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj.chunk(2, dim=1)
        biases = (self.gate_proj_bias, self.up_proj_bias, self.down_proj_bias)
        act = F.silu if self.activation is Silu else lambda u: F.relu(u).square()
        return loop(x, num_tokens_per_expert.tolist(), gate, up, self.down_proj, act, biases)


class Backend(nn.Module):
    """The experts as prime-rl calls them: by the configured expert compute."""

    def __init__(self, experts, compute):
        super().__init__()
        self.experts, self.compute = experts, compute

    def forward(self, x, counts):
        return self.compute(self.experts, x, counts)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["fused", "separate", "ungated"])
@pytest.mark.parametrize("device", DEVICES)
def test_prime_rl(device, form, bias):
    """Aligned groups in a buffer of fixed size: padding inside of the groups, rows behind them."""
    activation = Relu2 if form == "ungated" else Silu
    compute = prime_rl.SonicMoECppExpertCompute()
    assert compute.token_group_alignment == ALIGN
    indices, sizes = aligned(COUNTS)
    x = torch.cat([rows(29), rows(1) * 0])[indices]
    x = torch.cat([x, rows(ALIGN, seed=5)])  # rows behind the groups: arbitrary values
    dout = rows(len(x), seed=2)
    counts = torch.tensor(sizes, dtype=torch.int32)
    options = {"form": form, "activation": activation, "bias": bias}
    reference = PrimeExperts(**options)
    exact = step(Backend(reference, PrimeExperts.plain), x, counts, dout)
    experts = PrimeExperts(**options, dtype=torch.bfloat16).to(device)
    compute.validate(experts)
    arguments = [t.to(device) for t in (x.bfloat16(), counts, dout.bfloat16())]
    plain = step(Backend(experts, PrimeExperts.plain), *arguments)
    got = step(Backend(experts, compute), *arguments)
    compare(exact, got, plain, exact)
    tail = got["out"][sum(sizes) :], got["x"][sum(sizes) :]
    assert all((t == 0).all() for t in tail)


def test_prime_rl_as_it_calls_sonicmoe():
    """The calls that prime-rl's own adapter for sonicmoe makes, on our stand-in for sonicmoe: its
    routing has one expert a row, and padding rows go to the last expert."""
    experts = PrimeExperts(dtype=torch.bfloat16)
    x, counts = rows(29 + 3, torch.bfloat16), torch.tensor(COUNTS)
    token = torch.arange(len(x), dtype=torch.int32)
    expert = torch.searchsorted(counts.cumsum(0, dtype=torch.int32), token, right=True)
    out, _ = moe_general_routing_inputs(
        x=x,
        router_scores=torch.ones(len(x)),
        token_indices=token,
        expert_indices=expert.clamp_max(E - 1).to(torch.int32),
        w1=experts.gate_up_proj.permute(1, 2, 0),
        b1=None,
        w2=experts.down_proj.permute(1, 2, 0),
        b2=None,
        E=E,
        stream_id=0,
        activation_type=ActivationType.SWIGLU,
        concat_layout=True,
    )
    grouped = prime_rl.SonicMoECppExpertCompute()(experts, x, counts)
    assert torch.equal(out[:29], grouped[:29])


THEIRS = f"import a_package_that_is_not_installed\n\n\nclass {prime_rl.SEAM}:\n    pass\n"


@pytest.fixture
def prime_package(tmp_path, monkeypatch):
    """Returns a function that installs a package prime_rl whose backend module has the given text;
    with None the module is missing."""

    def install(text):
        folder = tmp_path.joinpath(*prime_rl.MODULE.split(".")[:-1])
        folder.mkdir(parents=True)
        if text is not None:
            (folder / "sonic_moe.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    for name in [n for n in sys.modules if n.split(".")[0] == "prime_rl"]:
        del sys.modules[name]


def test_prime_rl_is_configured(prime_package):
    """prime-rl's configuration imports the class by its name when it resolves the backend."""
    prime_package(THEIRS)
    resolve = {}
    code = f"def resolve():\n from {prime_rl.MODULE} import {prime_rl.SEAM} as C\n return C()"
    exec(code, resolve)
    with pytest.raises(ImportError):
        resolve["resolve"]()
    for _ in range(2):
        prime_rl.replace()
    compute = resolve["resolve"]()
    assert isinstance(compute, prime_rl.SonicMoECppExpertCompute)
    compute.validate(PrimeExperts())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("class SonicExperts:\n    pass\n", f"defines no {prime_rl.SEAM}"),
        (None, r"sonic_moe is missing"),
    ],
)
def test_another_prime_rl_is_refused(prime_package, text, sentence):
    with pytest.raises(ImportError, match=r"needs a prime-rl whose .*: No module named 'prime_rl'"):
        prime_rl.replace()
    prime_package(text)
    with pytest.raises(ImportError, match=f"needs a prime-rl whose .*: .*{sentence}"):
        prime_rl.replace()
    assert prime_rl.MODULE not in sys.modules


def test_prime_rl_activations():
    assert prime_rl.activation_of(PrimeExperts()) == Activation("swiglu")
    assert prime_rl.activation_of(PrimeExperts("ungated", Relu2)) == Activation("relu2")
    clamped = Activation("swiglu_clamped", limit=7.0)
    assert prime_rl.activation_of(PrimeExperts("separate", Clamped)) == clamped
    compute = prime_rl.SonicMoECppExpertCompute()
    for form, activation in (("fused", LateClamped), ("separate", Relu2)):
        with pytest.raises(NotImplementedError, match=f"activation {activation.__name__} is not"):
            compute.validate(PrimeExperts(form, activation))


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph(device):
    torch._dynamo.reset()
    x, counts = rows(29, torch.bfloat16).to(device), torch.tensor(COUNTS, device=device)
    experts = PrimeExperts(dtype=torch.bfloat16).to(device)
    backend = Backend(experts, prime_rl.SonicMoECppExpertCompute())
    compiled = torch.compile(backend, fullgraph=True, backend="aot_eager")
    got = compiled(x, counts)
    assert torch.equal(got, backend(x, counts))
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    assert error(got, loop(x, COUNTS, gate, up, experts.down_proj)) < 1e-2


def test_nothing_waits_for_the_device():
    titan = titan_module(True)
    torchtitan.replace(titan)
    prime = Backend(PrimeExperts(dtype=torch.bfloat16), prime_rl.SonicMoECppExpertCompute())
    prime.compute.validate(prime.experts)
    x, counts = rows(29, torch.bfloat16), torch.tensor(COUNTS)
    for experts in (TitanExperts(titan, torch.bfloat16), prime):
        with Waits() as seen:
            step(experts, x, counts, x)
        assert seen.calls == []


def titan_rows(counts):
    return torchtitan.run_experts(
        **parameters(("w1", "w2", "w3")), x=rows(6), num_tokens_per_expert=counts
    )


def prime_rows(counts):
    return prime_rl.SonicMoECppExpertCompute()(PrimeExperts(), rows(6), counts)


@pytest.mark.parametrize("run", [titan_rows, prime_rows], ids=["torchtitan", "prime-rl"])
def test_counts_are_checked(run):
    with pytest.raises(TypeError, match="num_tokens_per_expert is list, must be"):
        run([3, 1, 2, 0])
    with pytest.raises(ValueError, match=r"num_tokens_per_expert has shape \(3,\), must be \(E,\)"):
        run(torch.tensor([3, 1, 2]))
