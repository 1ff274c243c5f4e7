"""The layer with packed weights: the bits of the layer with unpacked weights, on each device."""

import copy
import dataclasses
import threading

import packed_support
import pytest
import sonicmoe_cpp
import torch
from devices import DEVICES
from packed_support import FORMATS, Problem, make, same_bits
from sonicmoe_cpp import _packed_ops, packed
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("poisoned", "each_engine")
on_each = pytest.mark.parametrize("device", DEVICES)
each_format = pytest.mark.parametrize("format", FORMATS)
FORMS = ("ids", "pairs", "grouped")


@pytest.fixture(autouse=True)
def no_buffers():
    packed.release_buffers()
    yield
    packed.release_buffers()


@pytest.fixture
def unpackings(monkeypatch):
    """The operands that calls unpack, in order, as shapes."""
    found = []
    run = _packed_ops._ops.run

    def counted(name, *arguments):
        if name == "unpack_weights":
            found.append(tuple(arguments[0].shape))
        return run(name, *arguments)

    monkeypatch.setattr(_packed_ops._ops, "run", counted)
    return found


def unpacked(weights):
    return [w.unpack() for w in weights]


@on_each
@each_format
@pytest.mark.parametrize("order", ("K", "MN"))
@pytest.mark.parametrize("lora", (False, True), ids=("frozen", "lora"))
@pytest.mark.parametrize("form", FORMS)
def test_layer_has_the_bits_of_unpacked_weights(device, format, order, lora, form):
    problem = Problem(device)
    weights = problem.weights(format, order)
    options = {"biases": True, "lora": lora}
    got = problem.run(form, *weights, **options)
    assert same_bits(got, problem.run(form, *unpacked(weights), **options))
    assert all(t.isfinite().all() and t.abs().max() > 0 for t in got)


@on_each
@pytest.mark.parametrize("dtype", packed_support.DTYPES[1:])
def test_other_dtypes(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("CUDA has no products in fp32")
    problem = Problem(device, dtype)
    for format in FORMATS:
        weights = problem.weights(format)
        assert same_bits(problem.run("ids", *weights), problem.run("ids", *unpacked(weights)))


@on_each
def test_gpt_oss_style(device):
    problem = Problem(device)
    weights = problem.weights("mxfp4")
    options = {"activation": "swiglu_oai", "gate_layout": "interleaved", "biases": True}
    got = problem.run("ids", *weights, **options)
    assert same_bits(got, problem.run("ids", *unpacked(weights), **options))
    other = problem.run("ids", *weights, activation="swiglu_oai", biases=True)
    assert not torch.equal(got[0], other[0])


@on_each
@pytest.mark.parametrize(
    "spoil",
    (
        lambda w: {"scales": w.scales.roll(1)},
        lambda w: {"codes": w.codes << 4 | w.codes >> 4},
        lambda w: {"nested_scales": w.nested_scales * 2},
        lambda w: {"nested_offset": w.nested_offset * 0},
    ),
    ids=("the neighbour's absmax", "codes exchanged", "scale off by 2", "no offset"),
)
def test_the_comparison_rejects_mistakes(device, spoil):
    problem = Problem(device)
    w_up, w_down = problem.weights("nf4_nested")
    sound = problem.run("ids", w_up, w_down)
    for wrong in (
        (dataclasses.replace(w_up, **spoil(w_up)), w_down),
        (w_up, dataclasses.replace(w_down, **spoil(w_down))),
    ):
        both = zip(problem.run("ids", *wrong), sound, strict=True)
        assert not any(torch.equal(s, t) for s, t in both)


@on_each
def test_fp8_products(device):
    problem = Problem(device, sizes=(40, 128, 128, 2, 1))
    weights = problem.weights("nf4")
    try:
        expected = problem.run("ids", *unpacked(weights), precision="fp8")
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert same_bits(problem.run("ids", *weights, precision="fp8"), expected)


@on_each
def test_autocast_casts_the_unpacked_weights(device):
    problem = Problem(device)
    kind = {"cpu": torch.bfloat16, "cuda": torch.float16}[device]
    weights = [w.to(dtype=torch.float32) for w in problem.weights("nf4_nested")]
    bf16 = problem.weights("nf4_nested")
    with torch.autocast(device, dtype=kind):
        for given in (weights, bf16):
            got = problem.run("ids", *given)
            assert same_bits(got, problem.run("ids", *unpacked(given)))


@on_each
@pytest.mark.parametrize("lora", (False, True), ids=("frozen", "lora"))
def test_checkpointing_and_compile(device, lora):
    problem = Problem(device)
    weights = problem.weights("nf4_nested")
    expected = problem.run("ids", *unpacked(weights), lora=lora)

    def checkpointed(call):
        return lambda *given, **options: checkpoint(call, *given, use_reentrant=False, **options)

    def compiled(call):
        return torch.compile(call, backend="aot_eager", fullgraph=True)

    for wrap in (checkpointed, compiled, lambda call: compiled(checkpointed(call))):
        assert same_bits(problem.run("ids", *weights, lora=lora, wrap=wrap), expected)


@pytest.fixture
def limit():
    yield packed.limit_buffers
    packed.limit_buffers(None)


def test_the_limit_of_buffers_is_a_number_of_bytes(limit):
    for wrong in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match=r"most is .*, must be a number of bytes from 1 on"):
            limit(wrong)


def test_the_cpu_ignores_the_limit_of_buffers(limit, unpackings):
    problem = Problem()
    weights = problem.weights("mxfp4")
    expected = problem.run("ids", *unpacked(weights))
    unpackings.clear()
    limit(1)
    assert same_bits(problem.run("ids", *weights), expected) and len(unpackings) == 2


@pytest.fixture
def parts(limit, monkeypatch):
    """Calls on the CPU as on a GPU under a limit: stand-ins for the operators unpacking_* unpack
    all experts and call the layer's operators. The result lists (E', E'') of the calls."""
    calls = []
    run = _packed_ops._ops.run

    def operand(given, name, memory):
        transposed = memory.stride(2) != 1
        stored = memory.transpose(1, 2) if transposed else memory
        assert stored.is_contiguous()
        out = torch.empty((given["experts"], *stored.shape[1:]), dtype=memory.dtype)
        parts = (given[f"{name}_{part}"] for part in (*_packed_ops.PARTS, "format", "block"))
        run("unpack_weights", out, *parts)
        return out.transpose(1, 2) if transposed else out

    def stand_in(name, *arguments):
        if not name.startswith("unpacking_"):
            return run(name, *arguments)
        names = [argument.name for argument in _packed_ops._ops.arguments_of(name)]
        given = dict(zip(names, arguments, strict=True))
        calls.append((given["w_up"].shape[0], given["w_down"].shape[0]))
        given |= {w: operand(given, w[2:], given[w]) for w in ("w_up", "w_down")}
        by = name.removeprefix("unpacking_")
        lora = given["up_a"] is not None
        inner = f"{'lora' if lora else 'moe'}_{by}"
        given |= dict.fromkeys(("fp8_weights", "g_gate", "g_up", "g_down"))
        found = run(inner, *(given[a.name] for a in _packed_ops._ops.arguments_of(inner)))
        if by != "backward":
            return found
        bits = _packed_ops.LORA_NEEDS if lora else _packed_ops.NEEDS
        named = dict(zip(bits, found, strict=True))
        return tuple(named.get(n, torch.empty(0)) for n in _packed_ops.DIFFERENTIABLE)

    monkeypatch.setattr(_packed_ops._ops, "run", stand_in)
    monkeypatch.setattr(_packed_ops, "_in_parts", lambda a, operands: a.most_bytes > 0)
    return calls


@each_format
@pytest.mark.parametrize("order", ("K", "MN"))
@pytest.mark.parametrize("lora", (False, True), ids=("frozen", "lora"))
def test_parts_get_the_arguments_of_the_call(parts, limit, format, order, lora):
    """An expert has 32 KiB in w_up and 16 KiB in w_down; there are 4."""
    problem = Problem()
    weights = problem.weights(format, order)
    options = {"biases": True, "lora": lora}
    expected = problem.run("ids", *weights, **options)
    for kib, experts in ((1, (1, 1)), (40, (1, 2)), (64, (2, 4))):
        limit(kib * 1024)
        parts.clear()
        assert same_bits(problem.run("ids", *weights, **options), expected)
        assert parts == [experts] * 2
        (kept,) = (k for (_, name), k in _packed_ops._kept.items() if name == "parts")
        assert kept.memory.numel() == max(experts[0] * 32, experts[1] * 16) * 1024


def test_a_compiled_layer_keeps_no_buffer(unpackings):
    problem = Problem()
    weights = problem.weights("nf4")
    compiled = torch.compile(sonicmoe_cpp.moe, backend="aot_eager", fullgraph=True)
    problem.run("ids", *weights, wrap=lambda _: compiled)
    assert not _packed_ops._kept
    assert len(unpackings) == 4  # in forward and in backward


def test_unpack_in_a_graph():
    weights = make("nf4_nested", (2, 4, 128)).mT
    compiled = torch.compile(lambda w: w.unpack() * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(weights), weights.unpack() * 2)


@on_each
def test_nothing_unpacked_is_kept_for_backward(device):
    problem = Problem(device)
    weights = problem.weights("nf4")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        problem.run("ids", *weights, lora=True)
    shapes = {tuple(w.shape) for w in weights}
    assert kept and not any(tuple(t.shape) in shapes and t.is_floating_point() for t in kept)
    pointers = {t.data_ptr() for w in weights for t in w.tensors().values()}
    assert pointers <= {t.data_ptr() for t in kept}


@on_each
def test_backward_unpacks_only_on_a_miss(device, unpackings):
    problem = Problem(device)
    first, second = problem.weights("nf4"), problem.weights("mxfp4")
    shapes = [tuple(w.shape) for w in first]
    problem.run("ids", *first)
    assert unpackings == shapes  # one layer: its weights are still there in backward
    unpackings.clear()

    def call(*given, **options):
        out = sonicmoe_cpp.moe(*given[:3], *first, **options)
        return sonicmoe_cpp.moe(out.tanh(), *given[1:], **options)

    got = problem.run("ids", *second, wrap=lambda _: call)
    assert unpackings == [*shapes * 3]  # forward of both, backward of the first
    unpackings.clear()

    def again(*given, **options):
        def layer(w_up, w_down):
            def run(x):
                return sonicmoe_cpp.moe(x, *given[1:3], w_up, w_down, **options)

            return lambda x: checkpoint(run, x, use_reentrant=False)

        return layer(*second)(layer(*first)(given[0]).tanh())

    assert same_bits(problem.run("ids", *second, wrap=lambda _: again), got)
    assert unpackings == [*shapes * 4]  # forward and recomputation of both, no backward


@on_each
def test_a_change_before_backward_is_seen(device, unpackings):
    problem = Problem(device)
    weights = problem.weights("nf4")
    other = problem.weights("nf4_nested")
    plain = problem.run("ids", *unpacked(weights))
    x = problem.x.clone().requires_grad_()
    out = sonicmoe_cpp.moe(x, problem.ids, problem.scores, *weights)
    # Another layer's weights, and another place for the same ones.
    sonicmoe_cpp.moe(problem.x, problem.ids, problem.scores, *other)
    unpackings.clear()
    out.backward(problem.dout)
    assert len(unpackings) == 2
    assert torch.equal(x.grad, plain[2])
    weights[0].scales.mul_(2.0)
    out = sonicmoe_cpp.moe(x, problem.ids, problem.scores, *weights)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weights[0].scales.mul_(2.0)
        out.backward(problem.dout)


@on_each
def test_inference_mode_and_no_grad(device):
    problem = Problem(device)
    weights = problem.weights("fp8_blocks")
    expected = sonicmoe_cpp.moe(problem.x, problem.ids, problem.scores, *unpacked(weights))
    with torch.inference_mode():
        got = sonicmoe_cpp.moe(problem.x, problem.ids, problem.scores, *weights)
        made_here = problem.weights("fp8_blocks")
    assert torch.equal(got, expected)
    # Inference tensors have no version; the buffer that inference mode has left is used again.
    got = sonicmoe_cpp.moe(problem.x, problem.ids, problem.scores, *made_here)
    assert torch.equal(got, expected)
    assert same_bits(problem.run("ids", *weights), problem.run("ids", *unpacked(weights)))


@on_each
def test_unpack(device):
    for format in FORMATS:
        weights = make(format, (2, 24, 128)).to(device)
        values = weights.unpack()
        assert values.is_contiguous() and values.device == weights.device
        assert torch.equal(values.cpu(), packed_support.decoded(weights.to("cpu")))
        out = torch.empty_like(values)
        assert weights.unpack(out) is out and torch.equal(out, values)
        turned = weights.mT
        assert turned.shape == (2, 128, 24) and torch.equal(turned.unpack(), values.mT)
        assert torch.equal(turned.unpack(torch.empty_like(values).mT), values.mT)
        assert turned.mT.shape == weights.shape
        both = weights.to(dtype=torch.float32)
        assert torch.equal(both.unpack().to(torch.bfloat16), values)


def test_threads_have_buffers_of_their_own():
    problems = [Problem(seed=seed) for seed in range(4)]
    weights = [p.weights(format) for p, format in zip(problems, FORMATS, strict=True)]
    expected = [p.run("ids", *unpacked(w)) for p, w in zip(problems, weights, strict=True)]
    wrong = []

    def work(i):
        for _ in range(30):
            if not same_bits(problems[i].run("ids", *weights[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- modules -------------------------------------------------------------------------------------


def new_moe(device, **options):
    torch.manual_seed(3)
    options = {"device": device, "dtype": torch.bfloat16, **options}
    return sonicmoe_cpp.MoE(4, 2, 128, 64, **options)


def step(module, x):
    out, _ = module(x)
    out.sum().backward()
    return [out.detach(), *(p.grad for p in module.parameters() if p.requires_grad)]


@on_each
@pytest.mark.parametrize("format", ("nf4", "mxfp4"))
@pytest.mark.parametrize("routing", ("topk", "token_rounding"))
def test_moe_holds_packed_weights(device, format, routing):
    module = new_moe(device, bias=True, routing=routing, tile=8)
    module.pack(format)
    same = new_moe(device, bias=True, routing=routing, tile=8)
    with torch.no_grad():
        same.w_up.copy_(module.w_up().unpack())
        same.w_down.copy_(module.w_down().unpack())
    for m in (module, same):
        torch.manual_seed(4)
        m.add_lora(8, 16.0)
        torch.nn.init.normal_(m.lora.up_b)
    x = torch.randn(48, 128, device=device, dtype=torch.bfloat16)
    assert same_bits(step(module, x), step(same, x))
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert trained == [
        "router.weight",
        *(f"lora.{f}" for f in ("up_a", "up_b", "down_a", "down_b")),
    ]


@on_each
def test_state_dict_keeps_codes_and_scales(device):
    module = new_moe(device)
    module.pack("nf4", nested=True)
    state = module.state_dict()
    assert state["w_up.codes"].dtype == torch.uint8
    assert state["w_down.nested_offset"].shape == (1,)
    other = new_moe(device, dtype=torch.bfloat16)
    other.w_up.data.add_(1.0)
    other.pack("nf4", nested=True)
    other.load_state_dict(state)
    x = torch.randn(48, 128, device=device, dtype=torch.bfloat16)
    for again in (other, copy.deepcopy(module)):
        assert torch.equal(again(x)[0], module(x)[0])


@pytest.mark.parametrize("strict", (True, False))
@pytest.mark.parametrize(
    "format, options",
    [(None, {}), ("nf4", {}), ("nf4", {"block": 32}), ("mxfp4", {})],
)
def test_a_state_dict_of_another_format_is_refused_whole(format, options, strict):
    module, other = new_moe("cpu"), new_moe("cpu")
    module.pack("nf4", nested=True)
    other.w_up.data.add_(1.0)
    if format:
        other.pack(format, **options)
    before = {name: t.clone() for name, t in module.w_up.state_dict().items()}
    has = "is not packed" if format is None else "has codes uint8"
    sentence = (
        rf"w_up of the state dict {has}.*, must have codes uint8 \(4, 128, 64\), scales uint8"
    )
    with pytest.raises(RuntimeError, match=sentence) as refusal:
        module.load_state_dict(other.state_dict(), strict=strict)
    assert str(refusal.value).count("\n\t") == 2  # one for each of w_up and w_down
    assert all(torch.equal(t, before[n]) for n, t in module.w_up.state_dict().items())


def test_casts_of_a_module_keep_codes_and_scales():
    module = new_moe("cpu", dtype=torch.float32)
    module.pack("nf4", nested=True)
    before = {name: t.clone() for name, t in module.w_up.state_dict().items()}
    module.bfloat16()
    assert module.w_up.dtype == torch.bfloat16 and module.w_up().dtype == torch.bfloat16
    after = module.w_up.state_dict()
    assert all(torch.equal(t, after[n]) and t.dtype == after[n].dtype for n, t in before.items())
    held = packed.PackedExperts(make("fp8_blocks", (1, 128, 128))).half()
    assert held.codes.dtype == torch.float8_e4m3fn and held().unpack().dtype == torch.float16
    assert torch.equal(held().unpack(), make("fp8_blocks", (1, 128, 128), torch.float16).unpack())


def test_module_on_meta():
    module = sonicmoe_cpp.MoE(4, 2, 128, 64, device="meta", dtype=torch.bfloat16)
    module.pack("nf4")
    same = new_moe("cpu")
    same.pack("nf4")
    state = same.state_dict()
    module.load_state_dict(state, assign=True)
    assert {n: t.shape for n, t in module.state_dict().items()} == {
        n: t.shape for n, t in state.items()
    }
    x = torch.randn(8, 128, dtype=torch.bfloat16)
    assert torch.equal(module(x)[0], same(x)[0])


def test_module_in_a_graph():
    module = new_moe("cpu")
    module.pack("mxfp4")
    module.add_lora(8, 16.0)
    x = torch.randn(48, 128, dtype=torch.bfloat16)
    expected = step(module, x)
    module.zero_grad()
    got = step(torch.compile(module, backend="aot_eager", fullgraph=True), x)
    assert same_bits(got, expected)


def test_flops_are_those_of_the_layer():
    from torch.utils.flop_counter import FlopCounterMode

    problem = Problem()
    weights = problem.weights("nf4")
    for options in ({}, {"lora": True}, {"biases": True}):
        counts = []
        for given in (weights, [w.requires_grad_(False) for w in unpacked(weights)]):
            with FlopCounterMode(display=False) as counter:
                problem.run("ids", *given, **options)
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0
