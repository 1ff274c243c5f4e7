"""Low-rank factors beside frozen experts, against merged weights in plain PyTorch."""

import itertools
import math

import pytest
import reference
import sonicmoe_cpp
import torch
import torch.nn.functional as F
from devices import DEVICES, DTYPES, Waits
from reference import Layer, assert_twice
from sonicmoe_cpp import Activation, LowRank, lora_moe
from sonicmoe_cpp._fakes import LORA_NEEDS
from torch.autograd.graph import saved_tensors_hooks
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

ops = torch.ops.sonicmoe_cpp
E, D, N, R = 5, 24, 16, 8
FACTORS = ("up_a", "up_b", "down_a", "down_b")


class Adapted(Layer):
    """A layer whose weights are frozen, with factors beside them."""

    NAMES = (*Layer.NAMES, *FACTORS)

    def __init__(self, tokens=40, rank=R, only=None, **options):
        super().__init__(tokens, D, N, E, 2, torch.float64, **options)
        g = torch.Generator().manual_seed(9)
        up, down = self.w_up.shape, self.w_down.shape
        shapes = [(E, rank, D), (E, up[1], rank), (E, rank, down[2]), (E, D, rank)]
        for name, shape in zip(FACTORS, shapes, strict=True):
            value = torch.randn(shape, generator=g, dtype=torch.float64) * shape[2] ** -0.5
            used = only is None or name.startswith(only)
            setattr(self, name, value.requires_grad_() if used else None)
        self.ids[::5, 1] = E
        self.freeze()

    def freeze(self):
        for name in ("w_up", "w_down", "b_up", "b_down"):
            if getattr(self, name) is not None:
                getattr(self, name).requires_grad_(False)

    def on(self, device, dtype):
        other = self.to(dtype)
        other.__class__ = Adapted
        other.ids, other.dout = other.ids.to(device), other.dout.to(device)
        for name in self.NAMES:
            value = getattr(other, name)
            if value is not None:
                setattr(other, name, value.detach().to(device).requires_grad_())
        other.freeze()
        return other

    def leaves(self):
        return {name: value for name, value in super().leaves().items() if value.requires_grad}

    def options_with_bias(self):
        return {"b_up": self.b_up, "b_down": self.b_down} | self.options

    def ours(self):
        up = None if self.up_a is None else LowRank(self.up_a, self.up_b, 0.5)
        down = None if self.down_a is None else LowRank(self.down_a, self.down_b, 2.0)
        inputs = (self.x, self.ids, self.weights, self.w_up, self.w_down)
        return lora_moe(*inputs, up=up, down=down, **self.options_with_bias())

    def merged(self):
        w_up, w_down = self.w_up, self.w_down
        if self.up_a is not None:
            w_up = w_up + 0.5 * self.up_b @ self.up_a
        if self.down_a is not None:
            w_down = w_down + 2.0 * self.down_b @ self.down_a
        inputs = (self.x, self.ids, self.weights, w_up, w_down)
        return reference.moe(*inputs, **self.options_with_bias())

    def gradients(self, out):
        leaves = self.leaves()
        grads = torch.autograd.grad(out, list(leaves.values()), self.dout)
        return {"out": out.detach()} | dict(zip(leaves, grads, strict=True))


def need_products(device):
    """Skips the test if the engine has no grouped GEMM; the CPU's has one."""
    if device == "cpu":
        return
    try:
        Adapted(8).on(device, torch.bfloat16).ours()
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("device,dtype", DTYPES)
def test_output_and_gradients(device, dtype, activation, bias, layout):
    need_products(device)
    layer = Adapted(activation=activation, bias=bias, gate_layout=layout)
    exact = layer.gradients(layer.merged())
    rounded = layer.on("cpu", dtype)
    plain = rounded.gradients(rounded.merged())
    rounded = layer.on(device, dtype)
    got = rounded.gradients(rounded.ours())
    assert set(got) == {"out", "x", "weights", *FACTORS}
    for name, want in exact.items():
        assert_twice(name, got[name].cpu(), plain[name], want, dtype)
    assert (got["weights"].cpu()[layer.ids == E] == 0).all()


@pytest.mark.parametrize("only", ["up", "down"])
@pytest.mark.parametrize("rank", [1, 3])
def test_one_projection(only, rank):
    layer = Adapted(only=only, rank=rank)
    want, got = layer.gradients(layer.merged()), layer.gradients(layer.ours())
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)


def test_without_factors_it_is_the_layer():
    layer = Adapted(only="neither", bias=True)
    inputs = (layer.x, layer.ids, layer.weights, layer.w_up, layer.w_down)
    layers = sonicmoe_cpp.moe(*inputs, **layer.options_with_bias())
    want, got = layer.gradients(layers), layer.gradients(layer.ours())
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize(
    "activation,limit",
    [
        ("swiglu", None),
        ("swiglu_oai", 0.75),
        ("swiglu_clamped", 0.75),
        ("swiglu_step", 0.75),
        ("situ", 0.75),
        ("geglu", None),
        ("gelu_tanh", None),
        ("relu2", None),
    ],
)
def test_finite_differences(activation, limit):
    layer = Adapted(4, rank=2, activation=activation, bias=True)
    layer.options["activation"] = Activation(activation, limit=limit)
    names = list(layer.leaves())

    def call(*values):
        for name, value in zip(names, values, strict=True):
            setattr(layer, name, value)
        return layer.ours()

    assert torch.autograd.gradcheck(call, list(layer.leaves().values()))


def test_layouts_and_strides():
    layer = Adapted(gate_layout="interleaved")
    want = layer.gradients(layer.ours())
    for name in ("w_up", "w_down"):
        w = getattr(layer, name)
        setattr(layer, name, w.transpose(1, 2).contiguous().transpose(1, 2))
    layer.x = layer.x.detach().t().contiguous().t().requires_grad_()
    got = layer.gradients(layer.ours())
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_odd_routings():
    layer = Adapted()
    layer.ids = torch.full_like(
        layer.ids, 3
    )  # a token has one expert several times, the others no rows
    want, got = layer.gradients(layer.merged()), layer.gradients(layer.ours())
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)
    layer.ids.fill_(-1)
    with torch.no_grad():
        layer.weights.fill_(float("nan"))
    assert all((value == 0).all() for value in layer.gradients(layer.ours()).values())
    none = Adapted(3)
    for name in ("x", "ids", "weights", "dout"):
        value = getattr(none, name).detach()[:0]
        setattr(none, name, value.requires_grad_(name in ("x", "weights")))
    assert all((value == 0).all() for value in none.gradients(none.ours()).values())


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operator makes; views of leaves do not
    count."""

    def __init__(self, leaves):
        super().__init__()
        self.given = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.given:
                self.bytes = max(self.bytes, t.nbytes)
        return result


def wide_layer():
    """A layer with few tokens and large weights, so that a copy of a weight is larger than all
    else."""
    layer = Adapted(4)
    g = torch.Generator().manual_seed(1)
    for name in Adapted.NAMES:
        value = getattr(layer, name)
        if value is not None and value.dim() == 3:
            more = torch.randn(16 * E, *value.shape[1:], generator=g, dtype=torch.float64)
            setattr(layer, name, more.requires_grad_(value.requires_grad))
    return layer


def test_the_sum_of_weight_and_factors_is_never_formed():
    layer = wide_layer()
    weights = (layer.w_up, layer.w_down)
    with Largest(weights) as seen:
        layer.gradients(layer.ours())
    assert seen.bytes == layer.up_b.nbytes < layer.w_down.nbytes  # a gradient of the factors
    with Largest(weights) as seen:
        layer.gradients(layer.merged())
    assert seen.bytes >= layer.w_up.nbytes


def kept(function, *leaves):
    """Bytes that the graph of function() keeps, apart from the leaves."""
    storages = {}

    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = function()
    for leaf in leaves:
        storages.pop(leaf.untyped_storage().data_ptr(), None)
    del out
    return sum(storages.values())


def test_memory_kept_for_backward():
    layer = Adapted().on("cpu", torch.bfloat16)
    leaves = [v for n in Adapted.NAMES if (v := getattr(layer, n)) is not None]
    rows = layer.ids.numel()
    h, low = 2 * rows * 2 * N, 2 * rows * R
    metadata = 20 * rows + 16 * layer.x.shape[0] + 1024 * E
    assert kept(layer.ours, *leaves, layer.ids) == h + low + metadata


def test_checkpointing_recomputes_the_same_bits():
    layer = Adapted(bias=True).on("cpu", torch.bfloat16)
    want = layer.gradients(layer.ours())
    got = layer.gradients(checkpoint(layer.ours, use_reentrant=False))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph(device):
    need_products(device)
    torch._dynamo.reset()
    layer = Adapted(bias=True).on(device, torch.bfloat16)

    def call(x):
        layer.x = x
        return layer.ours()

    out = torch.compile(call, fullgraph=True, backend="aot_eager")(layer.x)
    got, want = layer.gradients(out), layer.gradients(layer.ours())
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)


def test_autocast_casts_what_it_is_given():
    layer = Adapted().on("cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer.gradients(layer.ours().float())
    want = layer.gradients(layer.ours())
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        assert 1e-5 < reference.error(got[name], value) < 2e-2


def test_autocast_casts_as_in_the_layer():
    """x of autocast's dtype, weights of another: lora_moe casts and refuses as moe() does."""
    layer = Adapted(bias=True).on("cpu", torch.float32)
    x = layer.x.detach().bfloat16()
    inputs = (layer.ids, layer.weights.detach(), layer.w_up, layer.w_down)
    with torch.autocast("cpu", torch.bfloat16):
        want = sonicmoe_cpp.moe(x, *inputs, **layer.options_with_bias())
        got = lora_moe(x, *inputs, **layer.options_with_bias())
        assert got.dtype == want.dtype == torch.bfloat16
        assert reference.error(got, want) < 2e-2
        for function in (sonicmoe_cpp.moe, lora_moe):
            with pytest.raises(TypeError, match=r"has dtype bfloat16, must be x's float64"):
                function(x.double(), *inputs)
    with pytest.raises(TypeError, match=r"w_down has dtype float32, must be x's bfloat16"):
        lora_moe(x, *inputs)


def test_factors_may_be_kept_in_fp32():
    layer = Adapted().on("cpu", torch.bfloat16)
    want = layer.gradients(layer.ours())
    for name in FACTORS:
        setattr(layer, name, getattr(layer, name).detach().float().requires_grad_())
    got = layer.gradients(layer.ours())
    assert all(got[name].dtype == torch.float32 for name in FACTORS)
    for name, value in want.items():
        assert torch.equal(got[name].to(value.dtype), value), name


def test_nothing_waits_for_the_device():
    layer = Adapted(bias=True)
    with Waits() as seen:
        layer.gradients(layer.ours())
    assert seen.calls == []
    with Waits() as seen:
        layer.gradients(layer.merged())
    assert seen.calls


def test_refusals():
    layer = Adapted(bias=True)
    layer.w_up.requires_grad_()
    with pytest.raises(ValueError, match="w_up requires a gradient, must be frozen"):
        layer.ours()
    layer.freeze()
    layer.up_b = layer.up_b.detach()[:, :, :-1]
    with pytest.raises(ValueError, match=r"up\.b has shape .* must be \(E, 2\*n, r\)"):
        layer.ours()
    inputs = (layer.x, layer.ids, layer.weights)
    with pytest.raises(TypeError, match=r"w_up is a pair \(gate, up\), must be one tensor"):
        lora_moe(*inputs, tuple(layer.w_up.chunk(2, 1)), layer.w_down)
    with pytest.raises(TypeError, match="up is tuple, must be a LowRank or None"):
        lora_moe(*inputs, layer.w_up, layer.w_down, up=(layer.up_a, layer.up_b))
    with pytest.raises(TypeError, match=r"down\.b is NoneType, must be a torch\.Tensor"):
        lora_moe(*inputs, layer.w_up, layer.w_down, down=LowRank(layer.down_a, None))
    with pytest.raises(TypeError, match="w_down has dtype"):
        lora_moe(*inputs, layer.w_up, layer.w_down.float())
    with pytest.raises(ValueError, match=r"up\.a has rank 0, must be at least 1"):
        none = LowRank(layer.up_a[:, :0], layer.up_b[:, :, :0])
        lora_moe(*inputs, layer.w_up, layer.w_down, up=none)
    with pytest.raises(ValueError, match=r"down\.scale is nan, must be finite"):
        nan = LowRank(layer.down_a, layer.down_b, math.nan)
        lora_moe(*inputs, layer.w_up, layer.w_down, down=nan)
    with pytest.raises(ValueError, match=r"down\.b is on meta, must be on x.s device cpu"):
        away = LowRank(layer.down_a, layer.down_b.to("meta"))
        lora_moe(*inputs, layer.w_up, layer.w_down, down=away)
    weights = {"w_up": layer.w_up, "w_down": layer.w_down, "b_up": None, "b_down": None}
    for name in ("w_down", "b_up", "b_down"):
        with pytest.raises(TypeError, match=f"{name} is list, must be a torch.Tensor"):
            lora_moe(*inputs, **weights | {name: [1.0]})


# ---- the other forms, and fp8 --------------------------------------------------------------------


def factors_of(layer):
    return {
        "up": LowRank(layer.up_a, layer.up_b, 0.5),
        "down": LowRank(layer.down_a, layer.down_b, 2.0),
    }


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai", "relu2"])
def test_pairs_and_grouped_rows_are_as_ids(activation):
    layer = Adapted(bias=True, activation=activation)
    want = layer.gradients(layer.ours())
    experts = (layer.w_up, layer.w_down)
    options = factors_of(layer) | layer.options_with_bias()

    tokens = torch.arange(layer.x.shape[0]).repeat_interleave(2)
    mixed = torch.randperm(tokens.numel(), generator=torch.Generator().manual_seed(3))
    chosen = layer.ids.flatten()[mixed], layer.weights.flatten()[mixed]
    pairs = (tokens[mixed], *chosen)
    got = layer.gradients(sonicmoe_cpp.lora_moe_pairs(layer.x, pairs, *experts, **options))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)

    order = layer.ids.flatten().argsort(stable=True)
    count = torch.bincount(layer.ids.flatten(), minlength=E + 1)[:E]
    offsets = F.pad(count.cumsum(0), (1, 0))
    rows, weights = layer.x[tokens[order]], layer.weights.flatten()[order]
    y = sonicmoe_cpp.lora_moe_grouped(rows, offsets, *experts, row_weights=weights, **options)
    got = layer.gradients(torch.zeros_like(layer.x).index_add(0, tokens[order], y))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_experts_share_a_factor(dtype):
    layer = Adapted(bias=True).on("cpu", dtype)
    for name in ("up_a", "down_b"):
        setattr(layer, name, getattr(layer, name).detach()[:1].clone().requires_grad_())
    got = layer.gradients(layer.ours())
    shared = {name: getattr(layer, name) for name in ("up_a", "down_b")}
    for name, value in shared.items():
        setattr(layer, name, value.detach().expand(E, -1, -1).clone().requires_grad_())
    want = layer.gradients(layer.ours())
    for name, value in want.items():
        summed = value.sum(0, keepdim=True) if name in shared else value
        assert torch.equal(got[name], summed), name


@pytest.mark.parametrize("factors", [torch.bfloat16, torch.float32])
def test_experts_in_fp8(factors):
    """Only the products of the frozen weights are quantised: with weights that e4m3 holds exactly,
    and rows of one block with one magnitude, fp8 and bf16 differ by rounding alone."""
    g = torch.Generator().manual_seed(2)
    signs = [torch.randint(0, 2, s, generator=g) * 2.0 - 1 for s in ((3, 256, 128), (3, 128, 128))]
    w_up, w_down = (s.bfloat16() / 8 for s in signs)
    x = (torch.randint(0, 2, (20, 128), generator=g) * 2.0 - 1).bfloat16().requires_grad_()
    ids = torch.randint(0, 3, (20, 2), generator=g)
    weights = torch.rand(20, 2, generator=g)
    shapes = ((3, 8, 128), (3, 256, 8), (3, 8, 128), (3, 128, 8))
    leaves = [torch.randn(s, generator=g).to(factors).div(11).requires_grad_() for s in shapes]
    low = {"up": LowRank(*leaves[:2], 0.5), "down": LowRank(*leaves[2:], 2.0)}
    quantised = sonicmoe_cpp.quantize_weights(w_up, w_down)

    def results(**options):
        out = lora_moe(x, ids, weights, w_up, w_down, **low, **options)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, *leaves))

    plain, coded = results(), results(precision="fp8")
    for got, want in zip(coded, plain, strict=True):
        assert got.dtype == want.dtype
        assert 0 < reference.error(got, want) < 0.1
    given = results(precision="fp8", fp8_weights=quantised)
    assert all(torch.equal(a, b) for a, b in zip(given, coded, strict=True))


def test_operators():
    layer = Adapted(6).on("cpu", torch.bfloat16)
    layer.ids %= E  # an empty slot would leave a row of H unwritten
    options = (0, 0, 0.0, 0.0, 0, 0)
    tensors = (layer.x, layer.ids, None, layer.weights.float(), None, layer.w_up, layer.w_down)
    factors = tuple(getattr(layer, name) for name in FACTORS)
    arguments = (*tensors, None, None, *options, *factors, 0.5, 2.0)
    opcheck(ops.lora_inference, tuple(a.detach() if torch.is_tensor(a) else a for a in arguments))
    opcheck(ops.lora_forward, arguments)
    out, h, saved = ops.lora_forward(*arguments)
    needs = sum(LORA_NEEDS.values())
    backward = (out.detach(), *arguments[:-6], h, saved, needs, *factors, 0.5, 2.0)
    backward = tuple(a.detach() if torch.is_tensor(a) else a for a in backward)
    opcheck(ops.lora_backward, backward)


def test_flops():
    layer = Adapted(6)
    rows, up, down = 12, D + 2 * N, N + D
    with FlopCounterMode(display=False) as counter:
        out = layer.ours()
    assert counter.get_total_flops() == 2 * rows * (3 * N * D + R * (up + down))
    with FlopCounterMode(display=False) as counter:
        layer.gradients(out)
    assert counter.get_total_flops() == 2 * rows * (3 * N * D + R * (2 * up + 2 * down + N))


# ---- frozen experts and factors ------------------------------------------------------------------


class Outputs(TorchDispatchMode):
    """The shapes that an operator returned."""

    def __init__(self, operator):
        super().__init__()
        self.operator, self.shapes = operator, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.name() == self.operator:
            self.shapes = [tuple(t.shape) for t in result]
        return result


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_experts_get_no_gradient_and_none_is_computed(device):
    layer = Adapted(only="neither").on(device, torch.bfloat16)
    inputs = (layer.x, layer.ids, layer.weights, layer.w_up, layer.w_down)
    with Outputs("sonicmoe_cpp::moe_backward") as seen:
        sonicmoe_cpp.moe(*inputs).backward(layer.dout)
    assert layer.w_up.grad is None and layer.w_down.grad is None
    assert seen.shapes == [(40, D), (40, 2), (0,), (0,), (0,), (0,), (0,)]


@pytest.mark.parametrize("frozen", [*itertools.combinations(FACTORS, 1), FACTORS, ("x", "up_a")])
def test_gradients_of_frozen_factors_are_not_computed(frozen):
    layer = Adapted(bias=True)
    want = layer.gradients(layer.ours())
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    out = layer.ours()
    with Outputs("sonicmoe_cpp::lora_backward") as seen:
        got = layer.gradients(out)
    assert set(want) - set(got) == set(frozen)
    assert all(torch.equal(value, want[name]) for name, value in got.items())
    names = ("x", "weights", *FACTORS)
    shapes = [(0,) if name in frozen else tuple(want[name].shape) for name in names]
    assert seen.shapes == shapes
