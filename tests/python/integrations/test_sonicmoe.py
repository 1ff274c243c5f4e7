"""The calls that other projects make to sonicmoe, on our stand-in for it, against plain PyTorch."""

import enum
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import reference
import sonicmoe_cpp
import sonicmoe_names
import torch
import torch.nn.functional as F
from devices import DEVICES, DTYPES, Waits
from reference import Layer, assert_twice
from sonicmoe_cpp.compat import sonicmoe
from sonicmoe_cpp.compat.sonicmoe import KernelBackendMoE, MoE, count_cumsum
from sonicmoe_cpp.compat.sonicmoe.enums import ActivationType
from sonicmoe_cpp.compat.sonicmoe.functional import (
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
)
from sonicmoe_cpp.compat.sonicmoe.moe import choose

MEANS = {
    ActivationType.SWIGLU: "swiglu",
    ActivationType.GEGLU: "geglu_tanh",
    ActivationType.REGLU: "reglu",
    ActivationType.RELU_SQ: "relu2",
    ActivationType.RELU: "relu",
    ActivationType.GELU: "gelu_tanh",
    ActivationType.SILU: "silu",
}


def sorted_lists(layer):
    """(tokens ascending, experts, scores), as every caller builds them."""
    tokens, k = layer.ids.shape
    token = torch.arange(tokens, device=layer.ids.device).unsqueeze(1).expand(-1, k).reshape(-1)
    return token.int(), layer.ids.reshape(-1).int(), layer.weights.reshape(-1)


def general(layer, kind, concat, **options):
    token, expert, score = sorted_lists(layer)
    return moe_general_routing_inputs(
        layer.x,
        score,
        token,
        expert,
        layer.w_up.permute(1, 2, 0),
        layer.b_up,
        layer.w_down.permute(1, 2, 0),
        layer.b_down,
        E=layer.w_down.shape[0],
        stream_id=None,
        activation_type=kind,
        concat_layout=concat,
        **options,
    )


@pytest.mark.parametrize("concat", [False, True], ids=["interleaved", "concatenated"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ActivationType)
@pytest.mark.parametrize("device,dtype", DTYPES)
def test_general_routing(device, dtype, kind, bias, concat):
    layout = "concatenated" if concat else "interleaved"
    options = {"activation": MEANS[kind], "gate_layout": layout, "bias": bias}
    layer = Layer(40, 24, 16, 5, 2, **options)
    layer.ids[::7, 1] = 5  # a slot that belongs to another rank
    exact = layer.step(reference.moe)
    plain = layer.to(dtype).step(reference.moe)
    rounded = layer.to(dtype, device)
    got = rounded.step(lambda *_, **__: general(rounded, kind, concat)[0])
    for name, value in exact.items():
        assert_twice(name, got[name].cpu(), plain[name], value, dtype)
    frequency = general(rounded, kind, concat)[1]
    assert frequency.dtype == torch.int32
    assert frequency.tolist() == [int((layer.ids == e).sum()) for e in range(5)]


def reference_topk(logits, k, over_topk, norm):
    if over_topk:
        values, ids = logits.topk(k, dim=-1)
        return ids, values.softmax(dim=-1)
    values, ids = logits.softmax(dim=-1).topk(k, dim=-1)
    return ids, values / values.sum(dim=-1, keepdim=True) if norm else values


@pytest.mark.parametrize("over_topk,norm", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("concat", [False, True])
def test_topk_layer(over_topk, norm, concat):
    layer = Layer(33, 24, 16, 6, 3, gate_layout="concatenated" if concat else "interleaved")
    router = torch.randn(6, 24, dtype=torch.float64).requires_grad_()
    leaves = [layer.x, router, layer.w_up, layer.w_down]
    out, logits, frequency = moe_TC_softmax_topk_layer(
        layer.x,
        router,
        layer.w_up.permute(1, 2, 0),
        None,
        layer.w_down.permute(1, 2, 0),
        None,
        3,
        0,
        "swiglu",
        is_softmax_over_topk=over_topk,
        norm_topk_probs=norm,
        concat_layout=concat,
    )
    want_logits = F.linear(layer.x, router)
    ids, weights = reference_topk(want_logits, 3, over_topk, norm)
    want = reference.moe(layer.x, ids, weights, layer.w_up, layer.w_down, **layer.options)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(logits, want_logits)
    assert frequency.tolist() == ids.flatten().bincount(minlength=6).tolist()
    grads = [torch.autograd.grad(o, leaves, layer.dout) for o in (out, want)]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_topk_layer_by_keywords():
    """As lm-engine's MoE calls it: without a stream on a machine without a GPU."""
    layer = Layer(33, 24, 16, 6, 3, torch.float32, gate_layout="interleaved")
    router = torch.randn(6, 24)
    weights = {"w1": layer.w_up.permute(1, 2, 0), "w2": layer.w_down.permute(1, 2, 0)}
    options = {"K": 3, "stream_id": None, "is_inference_mode_enabled": False}
    out, logits, frequency = sonicmoe.moe_TC_softmax_topk_layer(
        x=layer.x, router_w=router, b1=None, b2=None, **weights, **options
    )
    ids, scores = reference_topk(logits, 3, True, False)
    want = reference.moe(layer.x, ids, scores, layer.w_up, layer.w_down, **layer.options)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    assert out.requires_grad and frequency.sum() == 99


def module(kind=ActivationType.SWIGLU, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    layer = MoE(6, 2, 24, 16, kind, add_bias=bias, std=0.3).to(dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.normal_(0, 0.1)
    return layer


@pytest.mark.parametrize("kind", ActivationType)
@pytest.mark.parametrize("bias", [False, True])
def test_module_backends_agree(kind, bias):
    layer, x = module(kind, bias), torch.randn(3, 11, 24, dtype=torch.float64, requires_grad=True)
    results = []
    for backend in (KernelBackendMoE.sonicmoe, KernelBackendMoE.torch):
        out, aux = layer(x, kernel_backend_moe=backend)
        assert out.shape == x.shape
        grads = torch.autograd.grad(out.square().sum() + aux, [x, *layer.parameters()])
        results.append((out, aux, *grads))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_module_against_a_reference():
    layer, x = module(), torch.randn(20, 24, dtype=torch.float64)
    ids, weights = reference_topk(layer.router(x), 2, True, False)
    options = {"b_up": layer.c_fc.bias, "b_down": layer.c_proj.bias}
    options["gate_layout"] = "interleaved"
    want = reference.moe(x, ids, weights, layer.c_fc.weight, layer.c_proj.weight, **options)
    out, aux = layer(x)
    torch.testing.assert_close(out, want)
    share = ids.flatten().bincount(minlength=6) / ids.numel()
    mean = layer.router(x).float().softmax(-1).mean(0)
    torch.testing.assert_close(aux, 6 * (share * mean).sum(), rtol=1e-5, atol=1e-6)


def test_module_has_its_parameters_and_initialisation():
    layer = MoE(6, 2, 64, 32, ActivationType.SWIGLU, add_bias=True, std=0.02)
    shapes = {name: tuple(p.shape) for name, p in layer.state_dict().items()}
    assert shapes == {
        "router.weight": (6, 64),
        "c_fc.weight": (6, 64, 64),
        "c_fc.bias": (6, 64),
        "c_proj.weight": (6, 64, 32),
        "c_proj.bias": (6, 64),
    }
    assert abs(layer.c_fc.weight.std().item() - 0.02) < 1e-3
    assert (layer.c_fc.bias == 0).all()
    ungated = MoE(6, 2, 64, 32, ActivationType.RELU_SQ, add_bias=False, std=0.02)
    assert ungated.c_fc.weight.shape == (6, 32, 64) and ungated.c_fc.bias is None


def test_inference_keeps_nothing():
    layer, x = module(), torch.randn(9, 24, dtype=torch.float64, requires_grad=True)
    out, aux = layer(x, is_inference_mode=True)
    assert aux is None and not out.requires_grad
    trained, loss = layer(x)
    assert torch.equal(out, trained) and trained.requires_grad and loss.requires_grad
    out, aux = layer.eval()(x)
    assert aux is not None and not out.requires_grad


def test_autocast_leaves_the_experts_alone():
    layer = Layer(20, 24, 16, 5, 2, torch.float32)
    want = general(layer, "swiglu", True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(general(layer, "swiglu", True)[0], want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inference", [False, True])
def test_one_graph(device, inference):
    torch._dynamo.reset()
    layer = module(dtype=torch.bfloat16).to(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (12, 21):
        x = torch.randn(tokens, 24, dtype=torch.bfloat16, device=device)
        results = []
        for function in (compiled, layer):
            out, aux = function(x, is_inference_mode=inference)
            if inference:
                results.append((out,))
                continue
            loss = out.float().square().sum() + aux
            results.append((out, aux, *torch.autograd.grad(loss, list(layer.parameters()))))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)


def test_one_graph_of_the_function():
    torch._dynamo.reset()
    layer = Layer(20, 24, 16, 5, 2, torch.float32, gate_layout="interleaved")
    token, expert, score = sorted_lists(layer)

    def call(x, score):
        w1, w2 = layer.w_up.permute(1, 2, 0), layer.w_down.permute(1, 2, 0)
        kind = ActivationType.SWIGLU
        return moe_general_routing_inputs(
            x, score, token, expert, w1, None, w2, None, 5, 0, kind, False
        )

    out, frequency = torch.compile(call, fullgraph=True, backend="aot_eager")(layer.x, score)
    want, counts = call(layer.x, score)
    assert torch.equal(out, want) and torch.equal(frequency, counts)


def test_nothing_waits_for_the_device():
    layer, x = module(), torch.randn(12, 24, dtype=torch.float64)
    with Waits() as seen:
        out, aux = layer(x)
        (out.sum() + aux).backward()
    assert seen.calls == []
    with Waits() as seen:
        layer(x, kernel_backend_moe=KernelBackendMoE.torch)
    assert seen.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [KernelBackendMoE.sonicmoe, KernelBackendMoE.torch])
def test_ties_go_to_the_lower_expert(backend, dtype):
    """The router's logits are x, and the output is the experts' weights."""
    x = torch.tensor([[0.0, -0.0, 0.0, -0.0], [-0.0, 1, 1, 1], [2, 2, 2, 3]])
    x = torch.cat([x, torch.randint(2, (200, 4)).float()]).to(dtype)
    layer = MoE(4, 2, 4, 8, ActivationType.SWIGLU, add_bias=True, std=0.3).to(dtype)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4))
        layer.c_proj.weight.zero_()
        layer.c_proj.bias.copy_(torch.eye(4))
    out, _ = layer(x, backend)
    values, ids = x.float().sort(descending=True, stable=True)
    want = torch.zeros(x.shape).scatter(1, ids[:, :2], values[:, :2].softmax(1))
    torch.testing.assert_close(out, want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_backend_chooses_as_route_does(dtype):
    inf, nan = torch.inf, torch.nan
    rows = [[nan, 1, inf, inf], [nan] * 4, [-inf, nan, -1e30, -2], [-0.0, 0, -0.0, 0]]
    logits = torch.tensor(rows + torch.randint(3, (200, 4)).tolist(), dtype=dtype)
    logits.requires_grad_()
    got_ids, got = choose(logits, 2)
    ids, weights = sonicmoe_cpp.route(logits, 2, score="softmax_after_topk")
    assert torch.equal(got_ids, ids.where(ids >= 0, 4))
    torch.testing.assert_close(got, weights)
    dweights = torch.randn_like(weights)
    finite = logits.isfinite()
    gradients = [torch.autograd.grad(w, logits, dweights)[0][finite] for w in (got, weights)]
    torch.testing.assert_close(*gradients)


# Names that the stand-in leaves out: parts of sonic-moe's kernels, and another project's kernels.
ABSENT = {
    "TC_Softmax_Topk_Router_Function",
    "TC_topk_router_metadata",
    "TC_topk_router_metadata_triton",
    "count_cumsum_cuda",
    "gemm_dgated",
    "gemm_gated",
    "general_routing_router_metadata",
    "general_routing_router_metadata_triton",
}
ABSENT_METHODS = {
    "down_projection_scattermoe_forward",
    "torch_forward",
    "up_projection_scattermoe_forward",
}
NAMES = json.loads((Path(__file__).parent / "sonicmoe_names.json").read_text())
RELEASED = [(release, module) for release in NAMES for module in NAMES[release]]


def assert_accepts(ours, theirs):
    """Our function accepts every call of theirs: the same names in the same order; additional
    parameters have defaults."""
    parameters = list(inspect.signature(ours).parameters.values())
    if theirs[:1] == ["self"]:
        theirs = theirs[1:] if parameters[0].name != "self" else theirs
    names = [name.removesuffix("=") for name in theirs]
    assert [p.name for p in parameters[: len(names)]] == names
    for parameter, name in zip(parameters, theirs, strict=False):
        if name.endswith("="):
            assert parameter.default is not parameter.empty, name
    assert all(p.default is not p.empty for p in parameters[len(names) :])


@pytest.mark.parametrize("release,module", RELEASED)
def test_names_and_signatures_of_sonic_moe(release, module):
    name = ".".join([sonicmoe.__name__, *filter(None, [module])])
    ours = importlib.import_module(name)
    for public, theirs in NAMES[release][module].items():
        if public in ABSENT or (theirs == "imported" and module not in ("", "functional")):
            continue
        assert hasattr(ours, public), public
        value = getattr(ours, public)
        if isinstance(theirs, list):
            assert_accepts(value, theirs)
        elif isinstance(theirs, dict) and issubclass(value, enum.Enum):
            assert {member.name: member.value for member in value} == theirs
        elif isinstance(theirs, dict):
            for method, signature in theirs.items():
                if method not in ABSENT_METHODS:
                    assert_accepts(getattr(value, method), signature)
        elif theirs != "imported":
            assert value == theirs


WHEEL = (
    "download --quiet --no-deps --retries 0 --timeout 5 --ignore-requires-python "
    "sonic-moe==0.1.2.post1"
)


@pytest.mark.slow
def test_the_names_are_those_of_the_wheel(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pip", *WHEEL.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(tmp_path.glob("*.whl"))
    if not wheels:
        pytest.skip(f"the wheel cannot be had: {done.stderr.strip().splitlines()[-1:]}")
    found = {m: sonicmoe_names.names(t) for m, t in sonicmoe_names.read(str(wheels[0])).items()}
    assert found == NAMES["0.1.2.post1"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", [4, 72, 1920])
def test_count_cumsum(experts, dtype):
    """sonic-moe's own test, and ids outside of the range."""
    torch._dynamo.reset()
    x = torch.randint(0, experts, (3001,), dtype=dtype)
    want = x.bincount(minlength=experts)
    for function in (count_cumsum, torch.compile(count_cumsum, fullgraph=True, backend="eager")):
        counts, sums = function(x=x, E=experts, do_cumsum=True)
        assert counts.dtype == sums.dtype == torch.int32
        assert torch.equal(counts.long(), want) and torch.equal(sums.long(), want.cumsum(0))
        assert torch.equal(function(x, experts, do_cumsum=False), counts)
    more = torch.cat([x, torch.tensor([-1, experts], dtype=dtype)])
    assert torch.equal(count_cumsum(more, experts, False), counts)
    with pytest.raises(TypeError, match="x has dtype float32, must be int32, int64"):
        count_cumsum(x.float(), experts)
    with pytest.raises(ValueError, match=r"x has shape \(1, 3001\), must be \(N,\)"):
        count_cumsum(x[None], experts)


def test_activations_by_value():
    assert ActivationType("gelu") is ActivationType("gelu_tanh_approx") is ActivationType.GELU
    assert sonicmoe.enums.activation("gelu_tanh_approx") == "gelu_tanh"
    with pytest.raises(ValueError):
        ActivationType("mish")


def test_refusals():
    layer = Layer(8, 16, 8, 4, 2, torch.float32)
    with pytest.raises(ValueError, match="b1 is given but b2 is None"):
        layer.b_up = torch.zeros(4, 16)
        general(layer, "swiglu", True)
    layer.b_up = None
    with pytest.raises(ValueError, match='activation_type is "mish", must be'):
        general(layer, "mish", True)
    with pytest.raises(ValueError, match="E is 3, must be the number of experts"):
        w1, w2 = layer.w_up.permute(1, 2, 0), layer.w_down.permute(1, 2, 0)
        token, expert, score = sorted_lists(layer)
        moe_general_routing_inputs(layer.x, score, token, expert, w1, None, w2, None, 3)
    router = torch.randn(4, 16)
    with pytest.raises(
        ValueError, match=r"w1 has shape \(4, .*, must be \(2I, H, E\) = \(16, 16, 4"
    ):
        sonicmoe.moe_TC_softmax_topk_layer(layer.x, router, layer.w_up, None, w2, None, 1)
    with pytest.raises(ValueError, match=r"w2 has shape \(4, .*, must be \(H, I, E\) = \(16, any"):
        sonicmoe.moe_TC_softmax_topk_layer(layer.x, router, w1, None, layer.w_down, None, 1)
    with pytest.raises(NotImplementedError, match="scattermoe"):
        module()(torch.randn(4, 24).double(), KernelBackendMoE.scattermoe)


INSTALLED = """
from sonicmoe_cpp.compat import sonicmoe
sonicmoe.install()
sonicmoe.install()
import sonicmoe as installed
from sonicmoe import KernelBackendMoE, MoE, enable_quack_gemm
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.functional import moe_general_routing_inputs, moe_TC_softmax_topk_layer
from sonicmoe.functional import count_cumsum
from sonicmoe.functional.utils import is_using_quack_gemm
from sonicmoe.count_cumsum import count_cumsum as the_same
import torch
assert count_cumsum is the_same is installed.count_cumsum
assert installed is sonicmoe and is_glu(ActivationType.GEGLU) and not is_glu(ActivationType.GELU)
moe = MoE(num_experts=8, num_experts_per_tok=2, hidden_size=32, intermediate_size=16,
          activation_function=ActivationType.SWIGLU, add_bias=False, std=0.02)
moe = moe.to(dtype=torch.bfloat16)
x = torch.randn(64, 32, dtype=torch.bfloat16)
with enable_quack_gemm(True):
    assert is_using_quack_gemm()
    output, aux_loss = moe(x, kernel_backend_moe=KernelBackendMoE.sonicmoe)
assert output.shape == x.shape and output.dtype == x.dtype and aux_loss.shape == ()
"""


def test_installed_it_serves_code_written_for_sonicmoe():
    subprocess.run([sys.executable, "-c", INSTALLED], check=True)


def test_install_refuses_to_replace_what_is_in_use(monkeypatch):
    other = type(sys)("sonicmoe")
    other.__file__ = "/elsewhere/sonicmoe/__init__.py"
    monkeypatch.setitem(sys.modules, "sonicmoe", other)
    with pytest.raises(RuntimeError, match="sonicmoe is imported already, from /elsewhere"):
        sonicmoe.install()
