"""transformers with experts_implementation="sonicmoe_cpp" against its own eager experts."""

import contextlib
import copy
import re
import sys
from pathlib import Path

import pytest
import sonicmoe_cpp
import torch
import torch.nn.functional as F
from devices import DEVICES, DTYPES, Waits
from quantised_tensor import CodedTensor
from reference import activate, assert_twice, error
from sonicmoe_cpp import Activation
from sonicmoe_cpp.integrations import hf
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import hf_architectures  # noqa: E402
import hf_models  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.integrations.moe import (  # noqa: E402
    batched_mm_experts_forward,
    use_experts_implementation,
)

hf.register()
SWIGLU_OAI = Activation("swiglu_oai", alpha=1.702, limit=7.0)


def gradients(model, implementation, ids, labels):
    model.set_experts_implementation(implementation)
    model.zero_grad(set_to_none=True)
    out = model(ids, labels=labels)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None for g in grads.values())
    return {"logits": out.logits.detach()} | grads


@contextlib.contextmanager
def choices(recorded: list):
    """Records the choices of every torch.topk, or repeats recorded ones: a token must not go to
    other experts because its logits were rounded."""
    replay, topk, calls = bool(recorded), torch.topk, 0

    def chosen(values, *arguments, **options):
        nonlocal calls
        if not replay:
            recorded.append(topk(values, *arguments, **options)[1].cpu())
        calls += 1
        indices = recorded[calls - 1].to(values.device)
        return torch.return_types.topk((values.gather(-1, indices), indices))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", chosen)
        yield
    assert calls == len(recorded) > 0


@pytest.mark.parametrize("device,dtype", DTYPES)
@pytest.mark.parametrize("architecture", hf_models.ARCHITECTURES)
def test_model(architecture, device, dtype):
    """Logits and gradients of a whole model: our error is at most twice that of eager experts."""
    model = hf_models.build(architecture)
    ids = torch.randint(96, (3, 17), generator=torch.Generator().manual_seed(2))
    recorded = []
    with choices(recorded):
        exact = gradients(model.double(), "eager", ids, ids)
    rounded = copy.deepcopy(model).to(device, dtype)
    ids = ids.to(device)
    results = []
    for implementation in ("eager", "sonicmoe_cpp"):
        with choices(recorded):
            results.append(gradients(rounded, implementation, ids, ids))
    eager, ours = results
    for name, want in exact.items():
        if dtype == torch.float32:
            assert error(ours[name], eager[name]) < 1e-5, name
        else:
            assert_twice(name, ours[name].cpu(), eager[name].cpu(), want, dtype)


@pytest.mark.skipif(
    "deepseek_v4" not in transformers.CONFIG_MAPPING, reason="this transformers has no DeepSeek-V4"
)
@pytest.mark.parametrize("first", ["moe", "hash_moe"])
def test_deepseek_v4_in_fp64(first):
    """hash_moe: a table gives the experts of each token id. route() gives the choice of moe."""
    model = hf_models.build("deepseek_v4", mlp_layer_types=[first, "moe"]).double()
    g = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), 6, generator=g).topk(buffer.shape[1]).indices)
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=g))
    router = model.model.layers[1].mlp.gate
    logits, weights, ids = router(torch.randn(9, router.hidden_dim, generator=g).double())
    rule = {"score": "sqrt_softplus", "renormalize": True, "scale": router.routed_scaling_factor}
    bias = router.e_score_correction_bias.float()
    our_ids, ours = sonicmoe_cpp.route(logits, router.top_k, bias=bias, **rule)
    order = our_ids.argsort(-1), ids.argsort(-1)
    assert torch.equal(our_ids.gather(1, order[0]), ids.gather(1, order[1]))
    torch.testing.assert_close(ours.gather(1, order[0]), weights.gather(1, order[1]))
    assert {plan.activation for plan in hf.supports(model).served.values()} == {
        Activation("swiglu_clamped", limit=0.5)
    }
    ids = torch.randint(96, (3, 17), generator=torch.Generator().manual_seed(2))
    recorded, results = [], []
    for implementation in ("eager", "sonicmoe_cpp"):
        with choices(recorded):
            results.append(gradients(model, implementation, ids, ids))
    eager, ours = results
    assert all(error(ours[name], eager[name]) <= 1e-12 for name in eager)


@pytest.mark.skipif(
    "inkling2" not in transformers.CONFIG_MAPPING, reason="this transformers has no Inkling-2"
)
def test_inkling2_has_the_caps_of_its_config():
    """look_at() compares output and gradients with eager."""
    (found,) = hf_architectures.look_at("inkling2")
    assert found.plan.activation == Activation("situ", alpha=4.0, limit=25.0)


def test_supports():
    model = hf_models.build("gpt_oss")
    found = hf.supports(model)
    assert found and list(found.served) == [name for name, _ in hf_models.experts_of(model)]
    assert set(found.served.values()) == {hf.Plan(SWIGLU_OAI, "interleaved")}
    name, experts = hf_models.experts_of(model)[1]
    experts.limit = None
    found = hf.supports(model)
    assert not found and "activation of GptOssExperts" in found.refused[name]
    assert len(found.served) == 1 and found.never_asked == []
    assert not hf.supports(nn.Linear(2, 2))


NEVER_ASK = {
    "jetmoe": {"num_local_experts": 4, "kv_channels": 8},
    "doge": {"num_experts": 16, "is_moe": True},
}
OWN_EXPERTS = {"jetmoe": "JetMoeParallelExperts", "doge": "DogeCDMoE"}


@pytest.mark.parametrize("architecture", NEVER_ASK)
def test_a_model_that_never_asks_is_warned_of(architecture):
    config = transformers.CONFIG_MAPPING[architecture](**hf_models.SIZE | NEVER_ASK[architecture])
    options = {"experts_implementation": "sonicmoe_cpp"}
    build = transformers.AutoModelForCausalLM.from_config
    with pytest.warns(UserWarning, match='="sonicmoe_cpp" has no effect on .*ForCausalLM: '):
        model = build(copy.deepcopy(config), **options)
    found = hf.supports(model)
    assert not found and not found.served and type(model).__name__ in found.never_asked
    assert OWN_EXPERTS[architecture] in found.own_experts
    model = build(config, experts_implementation="eager")
    with pytest.warns(UserWarning, match="does not let its experts be replaced"):
        model.set_experts_implementation("sonicmoe_cpp")


def test_no_other_model_is_warned_of(recwarn):
    hf_models.build("qwen3_moe").set_experts_implementation("eager")
    config = transformers.LlamaConfig(**hf_models.SIZE)
    transformers.AutoModelForCausalLM.from_config(config, experts_implementation="sonicmoe_cpp")
    config = transformers.CONFIG_MAPPING["jetmoe"](**hf_models.SIZE | NEVER_ASK["jetmoe"])
    transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    assert not [w for w in recwarn if "has no effect" in str(w.message)]


MADE_WITH = re.compile(r"with transformers ([0-9.]+)")


def rows_of(table):
    """{result: set of architectures}."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: set(row[1].split(", ")) for row in rows if len(row) == 2}


def test_the_table_of_architectures_is_what_running_them_gives():
    """With another release than the table's, its architectures must be in the same rows."""
    page = (Path(__file__).parents[3] / "docs" / "huggingface.md").read_text()
    version = MADE_WITH.search(page).group(1)
    found = hf_architectures.table()
    if transformers.__version__ == version:
        assert found in page
    elif tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip(f"the table was made with transformers {version}")
    else:
        shown, known = rows_of(page), set().union(*rows_of(page).values())
        for result, names in rows_of(found).items():
            assert names & known <= shown.get(result, set()), result


def test_models_are_built_with_it_and_generate():
    model = hf_models.build("qwen3_moe")
    assert model.config._experts_implementation == "sonicmoe_cpp"
    ids = torch.tensor([[5, 9, 2, 77]])
    options = {"max_new_tokens": 4, "do_sample": False}
    ours = model.generate(ids, **options)
    model.set_experts_implementation("eager")
    assert torch.equal(ours, model.generate(ids, **options))


@pytest.mark.parametrize(
    "architecture,plan",
    [
        ("qwen3_moe", hf.Plan(Activation("swiglu"), "concatenated")),
        ("gpt_oss", hf.Plan(SWIGLU_OAI, "interleaved")),
    ],
)
def test_plan(architecture, plan):
    for _, experts in hf_models.experts_of(hf_models.build(architecture)):
        assert hf.plan_of(experts) == plan


class Config:
    _experts_implementation = "sonicmoe_cpp"
    num_experts, hidden, width = 5, 16, 8


def make_experts(act="silu", gate=None, init=None, **flags):
    """Experts as a model file writes them; gate(self, gate, up) replaces the default."""

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = config.num_experts
            self.act_fn = ACT2FN[act] if isinstance(act, str) else act
            for name, value in (init or {}).items():
                setattr(self, name, value)
            gated = flags.get("has_gate", True)
            rows, up = config.width * (1 + gated), "gate_up_proj" if gated else "up_proj"
            g = torch.Generator().manual_seed(0)
            for name, n, k in (
                (up, rows, config.hidden),
                ("down_proj", config.hidden, config.width),
            ):
                shape = (k, n) if flags.get("is_transposed") else (n, k)
                weight = torch.randn(self.num_experts, *shape, generator=g) * k**-0.5
                setattr(self, name, nn.Parameter(weight))
                bias = torch.randn(self.num_experts, n, generator=g)
                if flags.get("has_bias"):
                    setattr(self, f"{name}_bias", nn.Parameter(bias))

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the eager forward must not run")

    if gate is not None:

        def _apply_gate(self, gate_up):
            if flags.get("is_concatenated", True):
                return gate(self, *gate_up.chunk(2, dim=-1))
            return gate(self, gate_up[..., ::2], gate_up[..., 1::2])

        Experts._apply_gate = _apply_gate
    return use_experts_implementation(Experts, **flags)(Config())


def default_gate(self, gate, up):
    return self.act_fn(gate) * up


def routing(tokens=23, k=2, sentinels=False):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, Config.hidden, generator=g)
    ids = torch.randint(Config.num_experts, (tokens, k), generator=g)
    weights = torch.rand(tokens, k, generator=g)
    if sentinels:
        ids[::3, 0] = Config.num_experts
        ids[5] = Config.num_experts
        weights[ids == Config.num_experts] = 0
    return x, ids, weights


def compare(experts, x, ids, weights, reference=batched_mm_experts_forward):
    results = []
    for function in (type(experts).forward, reference):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        leaves += experts.parameters()
        out = function(experts, leaves[0], ids, leaves[1])
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
        grads = torch.autograd.grad(out, leaves, dout.to(out))
        results.append((out, *grads))
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and error(got, want) < 1e-5
    return results[0]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("concatenated", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("sentinels", [False, True])
def test_flags(transposed, concatenated, bias, has_gate, sentinels):
    flags = {"is_transposed": transposed, "is_concatenated": concatenated}
    flags |= {"has_bias": bias, "has_gate": has_gate}
    experts = make_experts(gate=default_gate, **flags)
    experts._is_expert_parallel = sentinels
    x, ids, weights = routing(sentinels=sentinels)
    out, dx, dweights, *_ = compare(experts, x, ids, weights)
    if sentinels:
        assert (dweights[ids == Config.num_experts] == 0).all()
        assert (out[5] == 0).all() and (dx[5] == 0).all()


def test_layout_is_what_the_class_computes_not_what_it_declares():
    def gate(self, first, second):
        both = torch.cat([first, second], dim=-1)
        return self.act_fn(both[..., ::2]) * both[..., 1::2]

    experts = make_experts(gate=gate)  # is_concatenated says True
    assert hf.plan_of(experts) == hf.Plan(Activation("swiglu"), "interleaved")
    compare(experts, *routing())


# Every name that transformers knows, as (gated, ungated); the others are refused. Several names are
# one function: gelu_fast and gelu_accurate spell the tanh form with rounded constants.
RECOGNISED = {
    "silu": ("swiglu", "silu"),
    "swish": ("swiglu", "silu"),
    "gelu": ("geglu", "gelu"),
    "gelu_python": ("geglu", "gelu"),
    "gelu_new": ("geglu_tanh", "gelu_tanh"),
    "gelu_fast": ("geglu_tanh", "gelu_tanh"),
    "gelu_accurate": ("geglu_tanh", "gelu_tanh"),
    "gelu_pytorch_tanh": ("geglu_tanh", "gelu_tanh"),
    "gelu_python_tanh": ("geglu_tanh", "gelu_tanh"),
    "relu": ("reglu", "relu"),
    "relu2": (None, "relu2"),
}


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("act", ACT2FN)
def test_every_activation_of_transformers_is_recognised_or_refused(act, has_gate):
    experts = make_experts(act, has_gate=has_gate)
    known = RECOGNISED.get(act, (None, None))[0 if has_gate else 1]
    if known is not None:
        assert hf.plan_of(experts).activation == Activation(known)
        return
    with pytest.raises(NotImplementedError, match="activation of Experts") as refusal:
        experts(*routing())
    assert type(experts.act_fn).__name__ in str(refusal.value)


def clamped(self, gate, up):
    gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
    if self.alpha is None:
        return self.act_fn(gate) * up
    return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


@pytest.mark.parametrize(
    "alpha,limit",
    [(1.702, 7.0), (1.0, 0.5), (2.25, 100.0), (None, 10.0), (None, 0.5), (None, 2e4)],
)
@pytest.mark.parametrize("in_fp32", [False, True])
def test_clamped_swiglu_is_solved_for_its_parameters(alpha, limit, in_fp32):
    def gate(self, gate, up):
        if in_fp32:
            return clamped(self, gate.float(), up.float()).to(gate.dtype)
        return clamped(self, gate, up)

    name = "swiglu_clamped" if alpha is None else "swiglu_oai"
    experts = make_experts(gate=gate, init={"alpha": alpha, "limit": limit})
    assert hf.plan_of(experts).activation == Activation(name, alpha=alpha, limit=limit)
    compare(experts, *routing())
    experts.limit = 3.0  # a changed module is examined again
    assert hf.plan_of(experts).activation == Activation(name, alpha=alpha, limit=3.0)


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize(
    "name,alpha,limit",
    [
        ("situ", 4.0, 25.0),
        ("situ", 0.3, 1500.0),
        ("situ", 95.0, 2e-3),
        ("swiglu_step", None, 7.0),
        ("swiglu_step", None, 0.5),
    ],
)
def test_caps_and_late_clamps_are_solved_for(name, alpha, limit, in_fp32):
    def gate(self, gate, up):
        dtype = gate.dtype
        if in_fp32:
            gate, up = gate.float(), up.float()
        return activate(name, gate, up, alpha, limit).to(dtype)

    experts = make_experts(gate=gate)
    assert hf.plan_of(experts).activation == Activation(name, alpha=alpha, limit=limit)
    compare(experts, *routing())


@pytest.mark.parametrize(
    "gate",
    [
        lambda self, gate, up: self.act_fn(gate).clamp(max=10) * up,
        lambda self, gate, up: 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * up,
        lambda self, gate, up: self.act_fn(gate.clamp(-7, 7)) * up.clamp(-7, 7),
        lambda self, gate, up: self.act_fn(gate.clamp(max=7)) * up,
        lambda self, gate, up: self.act_fn(gate) * up.clamp(-7, 7),
        lambda self, gate, up: self.act_fn(gate.clamp(max=7)) * up.clamp(-6, 6),
        lambda self, gate, up: self.act_fn(gate.clamp(max=-7)) * up.clamp(7, -7),
        lambda self, gate, up: F.gelu(gate.clamp(max=7)) * up.clamp(-7, 7),
        lambda self, gate, up: self.act_fn(up) * gate,
        lambda self, gate, up: self.act_fn(gate) * up * 1.001,
        lambda self, gate, up: self.act_fn(gate) * up / up.norm(dim=-1, keepdim=True),
        lambda self, gate, up: (self.act_fn(gate) * up)[..., :1],
    ],
    ids=[
        "late clamp",
        "capped gate only",
        "gate clamped below too",
        "gate clamped only",
        "up clamped only",
        "two limits",
        "a negative limit",
        "clamped gelu",
        "swapped",
        "scaled",
        "normed",
        "one column",
    ],
)
def test_almost_an_activation_is_refused(gate):
    with pytest.raises(NotImplementedError, match=r"_apply_gate|SiLU"):
        make_experts(gate=gate)(*routing())


def test_quantised_experts_are_refused_by_name():
    experts = make_experts().to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="gate_up_proj of Experts is quantised"):
        experts(*routing())
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    kind = use_experts_implementation(
        type("FP8Experts", (fp8.FP8Experts,), {}), experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    config = transformers.Qwen3MoeConfig(**hf_models.SIZE, num_experts=4, moe_intermediate_size=32)
    config._experts_implementation = "sonicmoe_cpp"
    experts = kind(config, block_size=(16, 16))
    with pytest.raises(NotImplementedError, match="gate_up_proj of FP8Experts is quantised"):
        experts(*routing())
    assert list(hf.supports(nn.Sequential(experts)).refused) == ["0"]


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_weights_that_become_quantised_tensors_are_refused_by_name(name):
    experts = make_experts().bfloat16()
    assert hf.supports(nn.Sequential(experts))
    whole = getattr(experts, name)
    coded = nn.Parameter(CodedTensor(torch.zeros(whole.shape, dtype=torch.int8)), False)
    setattr(experts, name, coded)
    sentence = rf"{name} of Experts is quantised \(CodedTensor\)"
    assert re.match(sentence, hf.supports(nn.Sequential(experts)).refused["0"])
    with pytest.raises(NotImplementedError, match=sentence):
        experts(*routing())
    setattr(experts, name, whole)
    assert hf.supports(nn.Sequential(experts))


def test_a_post_expert_norm_of_another_name_is_refused():
    experts = make_experts()
    experts.has_post_expert_norm = True
    with pytest.raises(NotImplementedError, match="has_post_expert_norm"):
        experts(*routing())


def test_dtypes_of_tokens_and_weights_may_differ():
    x, ids, weights = routing()
    experts = make_experts(has_bias=True)
    want = experts(x, ids, weights)
    experts = experts.bfloat16()
    experts.down_proj_bias.data = experts.down_proj_bias.float()
    out = experts(x, ids, weights)
    assert out.dtype == torch.float32 and error(out, want) < 1e-2
    experts = make_experts()
    want = experts(x, ids, weights)
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(x.bfloat16(), ids, weights)
    assert out.dtype == torch.bfloat16 and error(out, want) < 1e-2


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph(device):
    torch._dynamo.reset()
    experts = make_experts(gate=clamped, init={"alpha": 1.702, "limit": 7.0}, has_bias=True)
    experts = experts.to(device, torch.bfloat16)
    x, ids, weights = (t.to(device) for t in routing())
    x = x.bfloat16()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, experts):
        out = function(x, ids, weights)
        results.append((out, *torch.autograd.grad(out.sum(), list(experts.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("has_gate", [True, False])
def test_export_and_fake_tensors_before_the_first_call(has_gate):
    x, ids, weights = routing()
    experts = make_experts(has_gate=has_gate, act="silu" if has_gate else "relu2")
    program = torch.export.export(experts, (x, ids, weights), strict=False)
    assert torch.equal(program.module()(x, ids, weights), experts(x, ids, weights))
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = make_experts(has_gate=has_gate)(*(torch.empty_like(t) for t in (x, ids, weights)))
    assert out.shape == x.shape


def test_layers_of_one_class_share_a_graph_when_they_are_alike():
    """Compiled layer by layer, as models are. A layer with another limit gets its own graph."""
    torch._dynamo.reset()
    layers = [
        make_experts(gate=clamped, init={"alpha": 1.702, "limit": limit})
        for limit in (7.0, 7.0, 0.5)
    ]
    x, ids, weights = routing()
    want = [layer(x, ids, weights) for layer in layers]
    assert not torch.equal(want[0], want[2])
    counter = CompileCounterWithBackend("aot_eager")
    graphs = []
    for layer, expected in zip(layers, want, strict=True):
        layer.__class__ = type(layers[0])
        out = torch.compile(layer, fullgraph=True, backend=counter)(x, ids, weights)
        assert torch.equal(out, expected)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] < graphs[2]


def test_distributed_weights_are_taken_locally():
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    experts = make_experts()
    x, ids, weights = routing()
    want = experts(x, ids, weights)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        for name, parameter in list(experts.named_parameters()):
            whole = nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()]))
            setattr(experts, name, whole)
        out = experts(x, ids, weights)
        assert torch.equal(out, want)
        out.sum().backward()
        assert all(type(p.grad).__name__ == "DTensor" for p in experts.parameters())
    finally:
        distributed.destroy_process_group()


def test_nothing_waits_for_the_device():
    experts = make_experts(has_bias=True)
    x, ids, weights = routing(sentinels=True)
    hf.plan_of(experts)  # once a module, on the CPU
    with Waits() as seen:
        experts(x, ids, weights).sum().backward()
    assert seen.calls == []


def test_without_transformers_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"needs transformers 5\.7 or later"):
        hf.register()


def test_an_old_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(hf.metadata, "version", lambda name: "5.6.2")
    with pytest.raises(ImportError, match=r"5\.7 or later: 5\.6\.2 is installed"):
        hf.register()
    monkeypatch.setattr(hf.metadata, "version", lambda name: "5.10rc1")
    assert hf.register() == "sonicmoe_cpp"
