"""Errors are one sentence that names the argument, its value and the allowed values."""

import os
import re
import shutil
import subprocess
import sys
import types

import pytest
import sonicmoe_cpp
import torch
from quantised_tensor import CodedTensor
from sonicmoe_cpp.lora import LowRank, lora_moe
from torch.torch_version import TorchVersion

T, D, N, E, K = 6, 8, 4, 3, 2


def arguments(**changes):
    values = {
        "x": torch.randn(T, D),
        "topk_ids": torch.zeros(T, K, dtype=torch.int64),
        "topk_weights": torch.ones(T, K),
        "w_up": torch.randn(E, 2 * N, D),
        "w_down": torch.randn(E, D, N),
    }
    return values | changes


def moe(**changes):
    return lambda: sonicmoe_cpp.moe(**arguments(**changes))


def pairs(*chosen):
    values = arguments()
    experts = values["w_up"], values["w_down"]
    return lambda: sonicmoe_cpp.moe_pairs(values["x"], chosen, *experts)


def grouped(offsets, w_down=None, **options):
    values = arguments() if w_down is None else arguments(w_down=w_down)
    experts = values["w_up"], values["w_down"]
    return lambda: sonicmoe_cpp.moe_grouped(values["x"], offsets, *experts, **options)


def route(k=K, logits=None, **options):
    logits = torch.randn(T, E) if logits is None else logits
    return lambda: sonicmoe_cpp.route(logits, k, **options)


def rounding(**options):
    return lambda: sonicmoe_cpp.token_round(torch.randn(T, E), K, **options)


def module(*sizes, **options):
    return lambda: sonicmoe_cpp.MoE(*(sizes or (E, K, D, N)), **options)


def ints(*size):
    return torch.zeros(*size, dtype=torch.int64)


oai = sonicmoe_cpp.Activation
CASES = [
    (moe(x=[1.0]), TypeError, "x is list, must be a torch.Tensor"),
    (
        moe(x=torch.zeros(T, D, dtype=torch.int32)),
        TypeError,
        "x has dtype int32, must be bfloat16, float16, float32, float64",
    ),
    (moe(x=torch.randn(D)), ValueError, "x has shape (8,), must be (T, d) = (any, any)"),
    (
        grouped(ints(E + 1), w_down=torch.ones(())),
        ValueError,
        "w_down has shape (), must be (E, d, n) = (any, any, any)",
    ),
    (
        lambda: sonicmoe_cpp.router_losses([1.0], ints(T, K)),
        TypeError,
        "logits is list, must be a torch.Tensor",
    ),
    (
        lambda: sonicmoe_cpp.router_losses(torch.ones(()), ints(T, K)),
        ValueError,
        "logits has shape (), must be (T, E) = (any, any)",
    ),
    (
        moe(topk_ids=torch.zeros(T, K)),
        TypeError,
        "topk_ids has dtype float32, must be int32, int64",
    ),
    (moe(topk_ids=ints(5, K)), ValueError, "topk_ids has shape (5, 2), must be (T, K) = (6, any)"),
    (
        moe(topk_weights=torch.ones(T, 3)),
        ValueError,
        "topk_weights has shape (6, 3), must be topk_ids' shape (T, K) = (6, 2)",
    ),
    (moe(topk_weights=ints(T, K)), TypeError, "topk_weights has dtype int64, must be bfloat16,"),
    (moe(w_up=None), TypeError, "w_up is NoneType, must be a torch.Tensor"),
    (
        moe(w_up=torch.randn(E, 2 * N - 1, D)),
        ValueError,
        "w_up has shape (3, 7, 8), must be (E, 2*n, d) = (3, 8, 8)",
    ),
    (
        moe(w_up=torch.randn(E, 2 * N, D), activation="relu"),
        ValueError,
        "w_up has shape (3, 8, 8), must be (E, n, d) = (3, 4, 8)",
    ),
    (
        moe(w_up=(torch.randn(E, N, D),) * 3),
        ValueError,
        "w_up has 3 tensors, must be a tensor or (gate, up)",
    ),
    (
        moe(w_up=(torch.randn(E, N, D),) * 2, activation="relu"),
        ValueError,
        "w_up is a pair (gate, up), must be one tensor: no gate here",
    ),
    (
        moe(w_up=torch.randn(E, 2 * N, D).bfloat16()),
        TypeError,
        "w_up has dtype bfloat16, must be x's float32",
    ),
    (
        moe(w_down=torch.randn(E, D - 1, N)),
        ValueError,
        "w_down has shape (3, 7, 4), must be (E, d, n) = (any, 8, any)",
    ),
    (
        moe(b_up=torch.zeros(E, N)),
        ValueError,
        "b_up has shape (3, 4), must be (E, 2*n) = (3, 8)",
    ),
    (moe(b_down=torch.zeros(D)), ValueError, "b_down has shape (8,), must be (E, d) = (3, 8)"),
    (
        moe(activation="swish"),
        ValueError,
        'activation is "swish", must be one of: swiglu, swiglu_oai, geglu, geglu_tanh, reglu, '
        "silu, gelu, gelu_tanh, relu, relu2, swiglu_clamped, situ, swiglu_step",
    ),
    (moe(activation=3), TypeError, "activation is int, must be a name or an Activation"),
    (
        moe(activation=oai("swiglu", alpha=1.5)),
        ValueError,
        "activation.alpha is 1.5 for swiglu, must be None: only swiglu_oai or situ has it",
    ),
    (
        moe(activation=oai("relu", limit=2.0)),
        ValueError,
        "activation.limit is 2.0 for relu, must be None: only swiglu_oai or swiglu_clamped or situ "
        "or swiglu_step has it",
    ),
    (
        moe(activation=oai("swiglu_clamped", alpha=1.5)),
        ValueError,
        "activation.alpha is 1.5 for swiglu_clamped, must be None: only swiglu_oai or situ has it",
    ),
    (
        moe(activation=oai("swiglu_clamped", limit=0.0)),
        ValueError,
        "activation.limit is 0.0, must be positive and finite",
    ),
    (
        moe(activation=oai("swiglu_clamped", limit=float("inf"))),
        ValueError,
        "activation.limit is inf, must be positive and finite",
    ),
    (
        moe(activation=oai("swiglu_oai", limit=-1.0)),
        ValueError,
        "activation.limit is -1.0, must be positive and finite",
    ),
    (
        moe(activation=oai("situ", limit=2e9)),
        ValueError,
        "activation limit is 2e+09 for situ, must be 1e-9 to 1e9, or 0 for the default",
    ),
    (
        moe(gate_layout="halves"),
        ValueError,
        'gate_layout is "halves", must be one of: concatenated, interleaved',
    ),
    (
        moe(grad_accum=torch.zeros(3)),
        ValueError,
        "grad_accum must be (g_up, g_down), in the form of (w_up, w_down)",
    ),
    (
        moe(grad_accum=(torch.zeros(E, 2 * N, D).half(), torch.zeros(E, D, N))),
        TypeError,
        "grad_accum[0] has dtype float16, must be float32",
    ),
    (
        moe(
            **{n: v.double() for n, v in arguments().items() if n != "topk_ids"},
            grad_accum=(torch.zeros(E, 2 * N, D), torch.zeros(E, D, N)),
        ),
        TypeError,
        "grad_accum[0] has dtype float32, must be float64",
    ),
    (
        moe(grad_accum=(torch.zeros(E, 2 * N, D), torch.zeros(E, N, D))),
        ValueError,
        "grad_accum[1] has shape (3, 4, 8), must be its weight's shape = (3, 8, 4)",
    ),
    (pairs(ints(4), ints(4)), TypeError, "pairs must be Pairs, or a tuple (token, expert, weight)"),
    (
        pairs(ints(4), ints(5), torch.ones(4)),
        ValueError,
        "pairs.expert has shape (5,), must be (C,) = (4)",
    ),
    (
        grouped(ints(3)),
        ValueError,
        "expert_offsets has shape (3,), must be (E+1,) = (4)",
    ),
    (grouped((ints(3), ints(2))), ValueError, "count has shape (2,), must be (E,) = (3)"),
    (
        grouped(ints(4), row_weights=torch.ones(5)),
        ValueError,
        "row_weights has shape (5,), must be (R,) = (6)",
    ),
    (route(9), ValueError, "k is 9, must be from 1 to E = 3"),
    (route(0), ValueError, "k is 0, must be from 1 to E = 3"),
    (route(2.0), TypeError, "k is float, must be an int"),
    (route(n_group=1.5, topk_group=1), TypeError, "n_group is float, must be an int"),
    (route(n_group=1, topk_group="1"), TypeError, "topk_group is str, must be an int"),
    (
        route(score="softmax"),
        ValueError,
        'score is "softmax", must be one of: softmax_after_topk, softmax_before_topk, sigmoid',
    ),
    (route(score=["sigmoid"]), ValueError, "score is \"['sigmoid']\", must be one of: softmax"),
    (route(scale=float("inf")), ValueError, "scale is inf, must be finite"),
    (route(logits=ints(T, E)), TypeError, "logits has dtype int64, must be bfloat16,"),
    (route(scale="2"), TypeError, "scale is str, must be a number"),
    (route(n_group=3), ValueError, "n_group and topk_group must be given together"),
    (route(n_group=2, topk_group=1), ValueError, "n_group is 2,"),
    (route(bias=torch.zeros(E)), ValueError, "bias is given"),
    (
        rounding(mode="even"),
        ValueError,
        'mode is "even", must be one of: nearest, up, down, score, stochastic, balanced',
    ),
    (rounding(tile=2.5), TypeError, "tile is float, must be an int"),
    (rounding(seed=1.5), TypeError, "seed is float, must be an int"),
    (rounding(tile=0), ValueError, "tile is 0, must be at least 1"),
    (rounding(seed=2**64), ValueError, "seed is 18446744073709551616, must be from 0 to 2^64 - 1"),
    (rounding(seed=-1), ValueError, "seed is -1, must be from 0 to 2^64 - 1"),
    (rounding(seed=torch.zeros(2)), ValueError, "seed must be an int or one int64 element"),
    (
        lambda: sonicmoe_cpp.expert_choice(torch.randn(T, E), 0),
        ValueError,
        "capacity is 0, must be at least 1",
    ),
    (
        lambda: sonicmoe_cpp.expert_choice(torch.randn(T, E), 1.0),
        TypeError,
        "capacity is float, must be an int",
    ),
    (module(4, 5, 8, 8), ValueError, "top_k is 5, must be between 1 and num_experts = 4"),
    (module(4, 2, 0, 8), ValueError, "hidden_size is 0, must be at least 1"),
    (module(4, 2.0, 8, 8), TypeError, "top_k is float, must be an int"),
    (module(4, 2, 8.0, 8), TypeError, "hidden_size is float, must be an int"),
    (module(routing="random"), ValueError, 'routing is "random", must be one of: topk, token'),
    (module(seed=-1), ValueError, "seed is -1, must be from 0 to 2^64 - 1"),
    (module(n_group=2, topk_group=1), ValueError, "n_group is 2,"),
    (module(n_group=1), ValueError, "n_group and topk_group must be given together"),
    (module(scale=float("nan")), ValueError, "scale is nan, must be finite"),
    (module(scale="1"), TypeError, "scale is str, must be a number"),
    (module(lb_coef=float("inf")), ValueError, "lb_coef is inf, must be finite"),
    (module(z_coef="1"), TypeError, "z_coef is str, must be a number"),
    (module(shared_experts=-1), ValueError, "shared_experts is -1, must be at least 0"),
    (
        moe(w_up=torch.randn(1, 2 * N, D).expand(E, -1, -1)),
        ValueError,
        "w_up has stride 0 in dimension 0, must not be expanded",
    ),
    (
        moe(w_up=(torch.randn(E, N, D), torch.randn(E, N, 1).expand(-1, -1, D))),
        ValueError,
        "w_up has stride 0 in dimension 2, must not be expanded",
    ),
    (
        moe(w_down=torch.randn(1, D, N).expand(E, -1, -1)),
        ValueError,
        "w_down has stride 0 in dimension 0, must not be expanded",
    ),
    (lambda: module()()(torch.randn(5, 7)), ValueError, "its last dimension must be 8"),
    (lambda: module()()(torch.tensor(1.0)), ValueError, "its last dimension must be 8"),
    (lambda: module()()([1.0]), TypeError, "x is list, must be a torch.Tensor"),
    (
        lambda: module()()(torch.randn(5, D).bfloat16()),
        TypeError,
        "x has dtype bfloat16, must be the module's float32, or cast by autocast",
    ),
]


@pytest.mark.parametrize(("call", "kind", "sentence"), CASES, ids=lambda v: None)
def test_refusal(call, kind, sentence):
    with pytest.raises(kind, match=re.escape(sentence)) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_what_is_remembered_does_not_let_others_pass():
    logits = torch.randn(T, E)
    sonicmoe_cpp.route(logits, 1)
    for other in (1.0, "1"):
        with pytest.raises(TypeError, match="must be an int"):
            sonicmoe_cpp.route(logits, other)


def forward_mode(function, x):
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(x, x))


def compiled(transform):
    torch._dynamo.reset()
    return torch.compile(transform, backend="aot_eager")


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "linearize": lambda f, x: torch.func.linearize(f, x),
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(
        f, x, strategy="forward-mode", vectorize=True
    ),
    "dual": forward_mode,
    "vmap": lambda f, x: torch.func.vmap(f)(x[None].requires_grad_()),
    "compiled grad": lambda f, x: compiled(torch.func.grad(f))(x),
    "compiled jvp": lambda f, x: compiled(lambda t: torch.func.jvp(f, (t,), (t,)))(x),
    "compiled dual": lambda f, x: forward_mode(compiled(f), x),
}


def transformed():
    """Functions of one tensor to a scalar, by the operator that refuses them, and that tensor. No
    other tensor requires a gradient."""
    values = {name: v.detach() for name, v in arguments().items()}
    x, logits = values.pop("x"), torch.randn(T, E)
    ids = values["topk_ids"]
    layer = sonicmoe_cpp.MoE(E, K, D, N).requires_grad_(False)
    low = {"activation": "swiglu"}
    low["up"] = LowRank(torch.randn(E, 2, D), torch.randn(E, 2 * N, 2))
    return {
        "moe_forward": (lambda t: sonicmoe_cpp.moe(t, **values).sum(), x),
        "route": (lambda t: sonicmoe_cpp.route(t, K)[1][:, 0].sum(), logits),
        "token_round": (lambda t: sonicmoe_cpp.token_round(t, K, tile=2).weight.sum(), logits),
        "expert_choice": (lambda t: sonicmoe_cpp.expert_choice(t, 2).weight.sum(), logits),
        "router_losses": (lambda t: sonicmoe_cpp.router_losses(t, ids)[0], logits),
        "lora_forward": (lambda t: lora_moe(t, **values, **low).sum(), x),
        "route of a module": (lambda t: layer(t)[0].sum(), x),
    }


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", transformed())
def test_derivatives_other_than_backward_are_refused(name, transform):
    function, x = transformed()[name]
    name = name.split(" ")[0]
    with pytest.raises(NotImplementedError, match=rf"sonicmoe_cpp.{name} .* under torch.func"):
        TRANSFORMS[transform](function, x)


def test_transforms_that_do_not_differentiate_the_layer():
    values = {name: v.detach() for name, v in arguments().items()}
    x = values.pop("x")
    want = sonicmoe_cpp.moe(x, **values)
    assert torch.equal(torch.func.vmap(lambda t: sonicmoe_cpp.moe(t, **values))(x[None])[0], want)
    scaled = torch.func.grad(lambda s: (s * sonicmoe_cpp.moe(x, **values)).sum())
    assert torch.equal(scaled(torch.ones(())), want.sum())
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(sonicmoe_cpp.moe(x, **values), want)


def test_tensors_of_quantisation_packages_are_refused_by_name():
    coded = CodedTensor(torch.zeros(E, D, N, dtype=torch.int8))
    values = {k: v.bfloat16() if v.is_floating_point() else v for k, v in arguments().items()}
    for x in (values["x"], values["x"].clone().requires_grad_()):
        with pytest.raises(TypeError, match="w_down is a CodedTensor, must be a plain"):
            sonicmoe_cpp.moe(**values | {"x": x, "w_down": coded})
    low = {"up": LowRank(torch.randn(E, 2, D).bfloat16(), torch.randn(E, 2 * N, 2).bfloat16())}
    with pytest.raises(TypeError, match="is a CodedTensor, must be a plain"):
        lora_moe(**values | {"w_down": coded}, activation="swiglu", **low)


def test_another_device_is_not_supported():
    sentence = "device is xpu, sonicmoe_cpp computes on: cpu, cuda"
    assert sonicmoe_cpp.unsupported_reason("xpu") == sentence
    assert not sonicmoe_cpp.is_available("xpu")


def test_engines_are_known_by_name():
    names = sonicmoe_cpp.engines()
    known = ", ".join(names) or "none, because this build has no CUDA backend"
    with pytest.raises(ValueError, match=f"engine is 'abacus', must be one of: {known}"):
        sonicmoe_cpp.use_engine("abacus")
    for index in (len(names), -2, 2**40):
        with pytest.raises(ValueError, match=f"index is {index}, must be -1 or that of an engine"):
            torch.ops.sonicmoe_cpp.use_engine(index)
    for name in names:
        assert sonicmoe_cpp.use_engine(name) is None
        assert sonicmoe_cpp.use_engine(None) == name
    assert sonicmoe_cpp.use_engine(None) is None


def test_mixed_devices_are_refused():
    with pytest.raises(ValueError, match="w_down is on cpu, must be on x's device meta"):
        moe(x=torch.empty(T, D, device="meta"))()


def test_operators_check_for_themselves():
    ops = torch.ops.sonicmoe_cpp
    x, ids, weights, w_up, w_down = arguments().values()
    # routing by ids, activation swiglu with its default alpha and limit, layout concatenated, the
    # precision of the tensors
    tail = (0, 0, 0.0, 0.0, 0, 0)
    with pytest.raises(ValueError, match="w_up has 7 rows an expert, must be an even number"):
        ops.moe_inference(x, ids, None, weights, None, w_up[:, :7], w_down, None, None, *tail)
    with pytest.raises(ValueError, match="x has 1 dimensions, must have 2"):
        ops.moe_inference(x[0], ids, None, weights, None, w_up, w_down, None, None, *tail)
    with pytest.raises(ValueError, match=r"routing.weights has shape \(6, 1\)"):
        bad = weights[:, :1]
        ops.moe_inference(x, ids, None, bad, None, w_up, w_down, None, None, *tail)
    layer = (x, ids, None, weights, None, w_up, w_down, None, None)
    lasts = ((0, "form", 2), (1, "activation", 12), (4, "gate_layout", 1), (5, "precision", 2))
    for position, name, last in lasts:
        for number in (-1, last + 1, 2**40):
            options = [*tail[:position], number, *tail[position + 1 :]]
            with pytest.raises(ValueError, match=f"{name} is {number}, must be from 0 to {last}"):
                ops.moe_inference(*layer, *options)
    with pytest.raises(ValueError, match="score is 4, must be from 0 to 3"):
        ops.route(weights, None, 1, 4, False, 1.0, 0, 0)
    with pytest.raises(ValueError, match="mode is 6, must be from 0 to 5"):
        ops.token_round(weights, None, 1, 0, False, 1.0, 0, 0, torch.tensor(0), 4, 6)
    with pytest.raises(ValueError, match=r"offsets has no elements, must have E \+ 1"):
        ops.grouped_gemm_k(x, x, ids.new_empty(0), None)
    with pytest.raises(ValueError, match=f"ordinal is {2**32}, must fit into 32 bits"):
        ops.cuda_problem(2**32)
    with pytest.raises(ValueError, match=f"ranks is {2**32 + 1}, must fit into 32 bits"):
        ops.exchange_bytes(x, 2**32 + 1, 1, 1, D)
    with pytest.raises(ValueError, match="addresses must be 2 contiguous int64 numbers"):
        addresses = torch.zeros(4, dtype=torch.int64)[::2]
        ops.exchange_open(x, 2, 1, 1, D, addresses, 0, 0, 0, 0)


@pytest.mark.parametrize("device", ["cuda", 0, "xpu"])
def test_a_module_on_a_device_that_torch_lacks(device):
    reason = sonicmoe_cpp.unsupported_reason(device)
    if reason is None:
        pytest.skip("this machine has the device")
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        sonicmoe_cpp.MoE(E, K, D, N, device=device)


def test_seeds_of_all_64_bits():
    logits = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    options = {"tile": 16, "mode": "stochastic"}
    found = []
    for seed in (0, 2**63 - 1, 2**63, 2**64 - 1):
        bits = torch.tensor(seed if seed < 2**63 else seed - 2**64)
        one = sonicmoe_cpp.token_round(logits, 2, seed=seed, **options)
        other = sonicmoe_cpp.token_round(logits, 2, seed=bits, **options)
        assert torch.equal(one.token, other.token)
        assert not any(torch.equal(one.token, token) for token in found)  # the top bit counts
        found.append(one.token)
    layer = module(routing="token_rounding", rounding="stochastic", tile=2, seed=2**64 - 1)()
    layer(torch.randn(T, D))


def test_missing_memory_is_an_out_of_memory_error():
    T, K, n = 1 << 20, 8, 1 << 22  # H would have 2^48 bytes, more than an address reaches
    x = torch.zeros(T, 1, requires_grad=True)
    ids = torch.arange(K, dtype=torch.int32).repeat(T, 1)
    up, down = torch.zeros(K, 2 * n, 1), torch.zeros(K, 1, n)
    sentence = r"^a tensor of Float and shape \(8388608, 8388608\) cannot be allocated"
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        sentence += ": .*DefaultCPUAllocator: can't allocate memory"
    with pytest.raises(torch.OutOfMemoryError, match=sentence):
        sonicmoe_cpp.moe(x, ids, torch.ones(T, K), up, down)


def in_a_new_process(program: str, **variables) -> str:
    environment = os.environ | variables
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    return f"{ran.returncode}: {ran.stdout}{ran.stderr}"


def test_the_distributed_package_without_a_library():
    found = in_a_new_process("import sonicmoe_cpp.distributed", SONICMOE_CPP_LIBRARY="/x")
    assert "ImportError: the library /x does not exist: install the wheel" in found, found


SECOND_COPY = """
import sys
import types
import sonicmoe_cpp
assert sonicmoe_cpp.is_available()
for name in [name for name in sys.modules if name.split(".")[0] == "sonicmoe_cpp"]:
    del sys.modules[name]
import sonicmoe_cpp
print(sonicmoe_cpp.unsupported_reason())
"""


def test_a_second_copy_of_the_package(tmp_path):
    """Another file of the library, or the same."""
    other = shutil.copy(sonicmoe_cpp._library.path(), tmp_path)
    change = f"import os\nos.environ['SONICMOE_CPP_LIBRARY'] = {other!r}\n"
    last = "import sonicmoe_cpp\nprint"
    for program in (SECOND_COPY, SECOND_COPY.replace(last, change + last)):
        found = in_a_new_process(program)
        assert found.startswith("0: another copy of sonicmoe_cpp has loaded its operators"), found


def test_refusals_by_a_newer_torch(monkeypatch):
    """torch 2.15 raises RuntimeError for every exception of an operator."""
    schema = torch.ops.sonicmoe_cpp.route.default._schema

    class Operator:
        _schema = schema

        def __call__(self, *_):
            raise RuntimeError("ValueError: k is 0, must be from 1 to E = 8")

    operators = types.SimpleNamespace(route=types.SimpleNamespace(default=Operator()))
    monkeypatch.setattr(sonicmoe_cpp._ops, "ops", operators)
    with pytest.raises(ValueError, match=r"^k is 0, must be"):
        sonicmoe_cpp._ops.kernel.__wrapped__("route")(torch.zeros(4, 8), None, 0)


REFUSED = """
import sonicmoe_cpp, torch
try:
    torch.ops.sonicmoe_cpp.route(torch.zeros(4, 8), None, 0, 0, False, 1.0, 1, 1)
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_names_of_errors_for_a_newer_torch(tmp_path):
    """The library sees a torch 2.15: since 2.14 messages begin with the name of the exception."""
    source, library = tmp_path / "version.c", tmp_path / "version.so"
    source.write_text("unsigned long long aoti_torch_abi_version(void) { return 0x20fULL << 48; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    here = "ValueError: " if TorchVersion(torch.__version__) >= "2.14" else ""
    for name, environment in ((here, {}), ("ValueError: ", {"LD_PRELOAD": str(library)})):
        found = in_a_new_process(REFUSED, **environment)
        assert found == f"0: {name}top_k is 0, must be at least 1\n"
