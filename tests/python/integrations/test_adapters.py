"""Grouped rows as prime-rl passes them, by imitations of the code that calls us."""

import sys

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICES, Waits
from reference import assert_twice, error
from sonicmoe_cpp import Activation
from sonicmoe_cpp.compat.sonicmoe import moe_general_routing_inputs
from sonicmoe_cpp.compat.sonicmoe.enums import ActivationType
from sonicmoe_cpp.integrations import prime_rl
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


def aligned(counts):
    """Row indices in which -1 pads every group to a multiple of ALIGN; and the padded sizes."""
    begins = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    sizes = [max(ALIGN, -(-count // ALIGN) * ALIGN) for count in counts]
    indices = []
    for begin, count, size in zip(begins.tolist(), counts, sizes, strict=True):
        indices += [*range(begin, begin + count), *[-1] * (size - count)]
    return indices, sizes


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


class TanhGated:
    @staticmethod
    def apply(gate, up):
        return torch.tanh(gate) * up


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
    late = Activation("swiglu_step", limit=7.0)
    assert prime_rl.activation_of(PrimeExperts("separate", LateClamped)) == late
    compute = prime_rl.SonicMoECppExpertCompute()
    for form, activation in (("fused", TanhGated), ("separate", Relu2)):
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
    prime = Backend(PrimeExperts(dtype=torch.bfloat16), prime_rl.SonicMoECppExpertCompute())
    prime.compute.validate(prime.experts)
    x, counts = rows(29, torch.bfloat16), torch.tensor(COUNTS)
    with Waits() as seen:
        step(prime, x, counts, x)
    assert seen.calls == []


def test_counts_are_checked():
    def run(counts):
        return prime_rl.SonicMoECppExpertCompute()(PrimeExperts(), rows(6), counts)

    with pytest.raises(TypeError, match="num_tokens_per_expert is list, must be"):
        run([3, 1, 2, 0])
    with pytest.raises(ValueError, match=r"num_tokens_per_expert has shape \(3,\), must be \(E,\)"):
        run(torch.tensor([3, 1, 2]))
