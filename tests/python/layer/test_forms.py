"""Every form of input: empty slots, pairs, grouped rows, layouts, main gradients, T = 0."""

import cuda_support
import pytest
import reference
import sonicmoe_cpp
import torch
from devices import DEVICES, DTYPES
from reference import Layer, assert_twice

pytestmark = pytest.mark.usefixtures("poisoned", "each_engine")
on_each = pytest.mark.parametrize("device, dtype", DTYPES)


def compare(layer: Layer, device, ours, plain) -> dict:
    """Returns the results of ours() on the device, after a comparison with plain() in float64."""
    if device == "cuda":
        return cuda_support.compare(layer, ours, plain)
    exact = layer.to(torch.float64).step(plain)
    rounded, got = layer.step(plain), layer.step(ours)
    for name in exact:
        assert_twice(name, got[name], rounded[name], exact[name], layer.x.dtype)
    return got


def sums_of_rows_compare(dtype) -> bool:
    """Whether gradients of biases are compared: not in fp32, where our sum over hundreds of rows,
    one after the other, is less exact than torch's pairwise sum. test_equality.py compares them
    over fewer rows."""
    return dtype != torch.float32


@on_each
def test_empty_slots(device, dtype):
    layer = Layer(150, 72, 56, 5, 3, dtype, bias=True)
    layer.ids[::3, 1] = -1
    layer.ids[1::4, 0] = 5
    layer.ids[7] = 2**40 + 1  # compared as 64 bits: narrowed, it would be expert 1
    got = compare(layer, device, sonicmoe_cpp.moe, reference.moe)
    empty = (layer.ids < 0) | (layer.ids >= 5)
    weights = got["weights"].cpu()
    assert (weights[empty] == 0).all() and (weights[~empty] != 0).all()
    assert (got["out"][7] == 0).all() and (got["x"][7] == 0).all()


@on_each
def test_nan_in_an_empty_slot_reaches_nothing(device, dtype):
    layer = Layer(30, 16, 8, 4, 2, dtype)
    layer.ids[3, 1] = -1
    with torch.no_grad():
        layer.weights[3, 1] = float("nan")
    got = layer.to(dtype, device).step(sonicmoe_cpp.moe)
    assert all(value.isfinite().all() for value in got.values())


@on_each
def test_an_expert_may_repeat_in_a_token(device, dtype):
    layer = Layer(130, 64, 32, 4, 3, dtype)
    layer.ids[5] = 2
    layer.ids[100:] = 1
    compare(layer, device, sonicmoe_cpp.moe, reference.moe)


@pytest.mark.parametrize("hot", [0, 3])
@on_each
def test_one_hot_expert(device, dtype, hot):
    layer = Layer(700, 64, 32, 4, 1, dtype)
    layer.ids.fill_(hot)
    got = compare(layer, device, sonicmoe_cpp.moe, reference.moe)
    cold = [e for e in range(4) if e != hot]
    assert (got["w_up"][cold] == 0).all() and (got["w_down"][cold] == 0).all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@on_each
def test_pairs_in_any_order(device, dtype, index):
    layer = Layer(300, 72, 56, 5, 2, dtype, bias=sums_of_rows_compare(dtype))
    layer.ids[4, 0] = 9
    order = torch.randperm(layer.ids.numel(), generator=torch.Generator().manual_seed(3))
    token = torch.arange(300).repeat_interleave(2)[order]

    def pairs(x, ids, weights, w_up, w_down, **options):
        on = x.device
        chosen = (token.to(on, index), ids.flatten()[order.to(on)].to(index))
        chosen += (weights.flatten()[order.to(on)],)
        return sonicmoe_cpp.moe_pairs(x, chosen, w_up, w_down, **options)

    compare(layer, device, pairs, reference.moe)


@pytest.mark.parametrize("form", ["offsets", "ranges", "aligned"])
@on_each
def test_grouped_rows(device, dtype, form):
    counts = torch.tensor([70, 0, 129, 1])
    layer = Layer(300, 72, 56, 4, 1, dtype, bias=sums_of_rows_compare(dtype))
    begin = torch.tensor([0, 128, 128, 264]) if form == "aligned" else counts.cumsum(0) - counts
    rows = torch.cat([torch.arange(b, b + c) for b, c in zip(begin, counts, strict=True)])
    expert = torch.arange(4).repeat_interleave(counts)
    unused = torch.ones(300, dtype=torch.bool)
    unused[rows] = False

    def ours(x, ids, weights, w_up, w_down, **options):
        on = x.device
        x = torch.where(unused[:, None].to(on), float("nan"), x)
        ranges = (begin.int().to(on), counts.int().to(on))
        if form == "offsets":
            ranges = torch.cat([begin, counts.sum()[None]]).to(on)
        options["row_weights"] = weights[:, 0]
        return sonicmoe_cpp.moe_grouped(x, ranges, w_up, w_down, **options)

    def plain(x, ids, weights, w_up, w_down, **options):
        on = x.device
        scores = weights[rows.to(on), 0]
        return reference.experts(x, rows.to(on), expert.to(on), scores, w_up, w_down, **options)

    got = compare(layer, device, ours, plain)
    assert (got["out"].cpu()[unused] == 0).all() and (got["x"].cpu()[unused] == 0).all()


@on_each
def test_grouped_rows_without_weights(device, dtype):
    layer = Layer(120, 64, 32, 3, 1, dtype).to(dtype, device)
    offsets = torch.tensor([0, 40, 40, 120], device=device)
    experts = (layer.w_up, layer.w_down)
    bare = sonicmoe_cpp.moe_grouped(layer.x, offsets, *experts)
    ones = torch.ones(120, device=device)
    assert torch.equal(bare, sonicmoe_cpp.moe_grouped(layer.x, offsets, *experts, row_weights=ones))


def stored(gate, up, form, transposed):
    """Gate and up weights as the tensors of a form; `transposed` gives them MN-major strides."""
    if form == "separate":
        tensors = [gate, up]
    elif form == "interleaved":
        tensors = [torch.stack([gate, up], dim=2).flatten(1, 2)]
    else:
        tensors = [torch.cat([gate, up], dim=1)]
    if transposed:
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    return tensors


def halves(tensors, form):
    """The inverse of stored."""
    if form == "separate":
        return tensors
    (fused,) = tensors
    return [fused[:, 0::2], fused[:, 1::2]] if form == "interleaved" else fused.chunk(2, dim=1)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("form", ["concatenated", "interleaved", "separate"])
@on_each
def test_layouts_and_strides(device, dtype, form, transposed):
    """All forms hold the same numbers, so results have the same bits, in the strides of each
    weight."""
    layer = Layer(140, 72, 56, 5, 2, dtype).to(dtype, device)
    want = layer.step(sonicmoe_cpp.moe)
    down = layer.w_down.detach().clone()
    if transposed:
        down = down.transpose(1, 2).contiguous().transpose(1, 2)
    up_halves = (half.detach().clone() for half in layer.w_up.chunk(2, dim=1))
    tensors = [t.requires_grad_() for t in (*stored(*up_halves, form, transposed), down)]
    w_up = tuple(tensors[:2]) if form == "separate" else tensors[0]
    gate_layout = "interleaved" if form == "interleaved" else "concatenated"
    arguments = (layer.x, layer.ids, layer.weights, w_up, tensors[-1])
    out = sonicmoe_cpp.moe(*arguments, gate_layout=gate_layout)
    assert torch.equal(out, want["out"])
    dx, *grads = torch.autograd.grad(out, [layer.x, *tensors], layer.dout)
    if device == "cuda" and form == "interleaved" and transposed:
        # For MN-major interleaved weights gate and up columns of H alternate, so dH W1 is summed in
        # another order.
        assert reference.error(dx, want["x"]) < torch.finfo(dtype).eps
    else:
        assert torch.equal(dx, want["x"])
    for grad, tensor in zip(grads, tensors, strict=True):
        assert grad.stride() == tensor.stride() and grad.dtype == tensor.dtype
    found = [*halves(grads[:-1], form), grads[-1]]
    for grad, same in zip(found, (*want["w_up"].chunk(2, dim=1), want["w_down"]), strict=True):
        assert torch.equal(grad, same)


@on_each
def test_rows_of_any_strides_are_fine(device, dtype):
    layer = Layer(120, 64, 32, 4, 2, dtype).to(dtype, device)
    want = layer.step(sonicmoe_cpp.moe)
    x = layer.x.detach()
    shifted = torch.cat([x[:, :3], x, x[:, :5]], dim=1)[:, 3:67]  # no multiple of 16 bytes
    odd = torch.cat([x, x[:, :5]], dim=1)[:, :64]  # rows of 69
    for view in (x.t().contiguous().t(), torch.stack([x, x], dim=2)[:, :, 1], shifted, odd):
        layer.x = view.requires_grad_()
        got = layer.step(sonicmoe_cpp.moe)
        assert all(torch.equal(got[name], want[name]) for name in want)
    layer.dout = torch.ones(1, 1, device=device, dtype=dtype).expand(120, 64)
    assert all(value.isfinite().all() for value in layer.step(sonicmoe_cpp.moe).values())


@pytest.mark.parametrize("form", ["one tensor", "separate"])
@pytest.mark.parametrize(
    ("device", "dtype"), [*DTYPES, pytest.param("cpu", torch.float64, id="cpu-fp64")]
)
def test_main_gradients(device, dtype, form):
    host = Layer(300, 72, 56, 5, 2, dtype, bias=True)
    host.ids[host.ids == 4] = -1  # an expert without rows: its buffer is left alone
    exact = host.to(torch.float64, device).step(reference.moe)
    layer = host.to(dtype, device)
    plain = layer.step(sonicmoe_cpp.moe)
    w_up = layer.w_up
    if form == "separate":
        w_up = tuple(half.detach().clone().requires_grad_() for half in w_up.chunk(2, dim=1))
    ups = w_up if isinstance(w_up, tuple) else (w_up,)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    buffers = [torch.full(w.shape, 0.5, device=device, dtype=kind) for w in (*ups, layer.w_down)]
    accum = (tuple(buffers[:2]) if form == "separate" else buffers[0], buffers[-1])
    options = {"b_up": layer.b_up, "b_down": layer.b_down, "grad_accum": accum}
    arguments = (layer.x, layer.ids, layer.weights, w_up, layer.w_down)
    first = sonicmoe_cpp.moe(*arguments, **options)
    second = sonicmoe_cpp.moe(*arguments, **options)  # two micro-batches in flight
    second.backward(layer.dout)
    first.backward(layer.dout)
    assert all(w.grad is None for w in (*ups, layer.w_down))
    assert torch.equal(layer.x.grad, plain["x"] * 2)
    sums = (torch.cat(buffers[:-1], dim=1), buffers[-1])
    limit = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 1e-2)
    bias_limit = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)  # summed in dtype
    for got, name in zip(sums, ("w_up", "w_down"), strict=True):
        assert got.dtype == kind and (got[4] == 0.5).all()
        assert reference.error(got - 0.5, 2 * exact[name]) < limit, name
    for bias in ("b_up", "b_down"):
        grad = getattr(layer, bias).grad
        assert grad.dtype == dtype and reference.error(grad, 2 * exact[bias]) < bias_limit, bias


@pytest.mark.parametrize("form", ["one tensor", "separate"])
@pytest.mark.parametrize("how", ["eager", "compiled"])
@on_each
def test_main_gradients_of_frozen_weights(device, dtype, how, form):
    layer = Layer(300, 72, 56, 5, 2, dtype, bias=True).to(dtype, device)
    halves = [half.detach().clone() for half in layer.w_up.chunk(2, dim=1)]
    ups = halves if form == "separate" else [layer.w_up.detach().clone()]
    weights = [*ups, layer.w_down.detach().clone()]

    def step(frozen):
        leaves = [w.clone().requires_grad_(at not in frozen) for at, w in enumerate(weights)]
        inputs = [t.detach().clone().requires_grad_() for t in (layer.x, layer.b_up, layer.b_down)]
        x, b_up, b_down = inputs
        buffers = [torch.full(w.shape, 0.5, device=device) for w in weights]

        def run(x):
            pair = tuple if form == "separate" else lambda one: one[0]
            experts, accum = (pair(leaves[:-1]), leaves[-1]), (pair(buffers[:-1]), buffers[-1])
            options = {"b_up": b_up, "b_down": b_down, "grad_accum": accum}
            return sonicmoe_cpp.moe(x, layer.ids, layer.weights.detach(), *experts, **options)

        torch.compiler.reset()
        run = torch.compile(run, fullgraph=True) if how == "compiled" else run
        run(x).backward(layer.dout)
        assert all(w.grad is None for w in leaves)
        return buffers, [t.grad for t in inputs]

    every, others = step(frozen=())
    assert all((buffer != 0.5).any() for buffer in every)
    for frozen in ([0], [len(weights) - 1], range(len(weights))):
        buffers, found = step(frozen)
        for at, buffer in enumerate(buffers):
            assert (buffer == 0.5).all() if at in frozen else torch.equal(buffer, every[at])
        assert all(torch.equal(a, b) for a, b in zip(found, others, strict=True))


def main_gradients_and_leaves(device, separate=False):
    """A layer whose weights are views of leaves, its buffers, the leaves by name and the loss."""
    layer = Layer(30, 72, 56, 5, 2, torch.float32).to(torch.bfloat16, device)
    ups = layer.w_up.chunk(2, dim=1) if separate else layer.w_up
    buffers = torch.zeros(5, 112, 72, device=device), torch.zeros(5, 72, 56, device=device)
    accum = (buffers[0].chunk(2, dim=1), buffers[1]) if separate else buffers
    arguments = (layer.x, layer.ids, layer.weights, ups, layer.w_down)
    out = sonicmoe_cpp.moe(*arguments, grad_accum=accum)
    leaves = {"x": layer.x, "w_up": layer.w_up, "w_down": layer.w_down}
    return leaves, dict(zip(("w_up", "w_down"), buffers, strict=True)), (out * layer.dout).sum()


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_only_the_weights_among_the_inputs_of_backward_add_to_main_gradients(device, separate):
    leaves, every, loss = main_gradients_and_leaves(device, separate)
    loss.backward()
    for inputs in (["x"], ["w_up"], ["x", "w_down"]):
        leaves, buffers, loss = main_gradients_and_leaves(device, separate)
        loss.backward(inputs=[leaves[name] for name in inputs], retain_graph=True)
        for name, buffer in buffers.items():
            assert torch.equal(buffer, every[name]) if name in inputs else (buffer == 0).all(), name
        rest = [leaf for name, leaf in leaves.items() if name not in inputs]
        loss.backward(inputs=rest)
        assert all(torch.equal(buffers[name], every[name]) for name in buffers)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_autograd_grad_returns_gradients_and_adds_none(device, separate):
    leaves, every, loss = main_gradients_and_leaves(device, separate)
    loss.backward()
    dx = leaves["x"].grad
    leaves, buffers, loss = main_gradients_and_leaves(device, separate)
    assert torch.equal(torch.autograd.grad(loss, leaves["x"], retain_graph=True)[0], dx)
    for name, got in zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True):
        assert torch.equal(got, dx if name == "x" else every[name].bfloat16()), name
    assert all((buffer == 0).all() for buffer in buffers.values())


def splits_backward_of_custom_functions():
    """Whether torch tells the shapes of a custom function's outputs: torch 2.11 does not."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dout):
            return dout

    try:
        return Copy.apply(torch.ones(1, requires_grad=True)).grad_fn._input_metadata is not None
    except RuntimeError:
        return False


@pytest.mark.parametrize("device", DEVICES)
def test_the_two_backwards_of_a_zero_bubble_schedule(device):
    from torch.distributed.pipelining import _backward

    if not splits_backward_of_custom_functions():
        pytest.skip("this torch's stage_backward_input cannot pass a custom autograd function")
    leaves, every, loss = main_gradients_and_leaves(device)
    loss.backward()
    dx = leaves.pop("x").grad
    leaves, buffers, loss = main_gradients_and_leaves(device)
    x = leaves.pop("x")
    _, groups = _backward.stage_backward_input([loss], None, [x], iter(leaves.values()))
    assert torch.equal(x.grad, dx)
    assert all((buffer == 0).all() for buffer in buffers.values())
    _backward.stage_backward_weight(iter(leaves.values()), groups)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, every[name].bfloat16()) and (buffers[name] == 0).all()


@pytest.mark.parametrize("form", ["ids", "pairs", "grouped"])
@on_each
def test_no_tokens(device, dtype, form):
    layer = Layer(3, 16, 8, 4, 2, dtype, bias=True).to(dtype, device)
    x = torch.empty(0, 16, device=device, dtype=dtype, requires_grad=True)
    options = {"b_up": layer.b_up, "b_down": layer.b_down}
    experts = (layer.w_up, layer.w_down)
    weights = torch.empty(0, 2, device=device, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64, device=device)
    if form == "ids":
        out = sonicmoe_cpp.moe(x, none.view(0, 2), weights, *experts, **options)
    elif form == "pairs":
        out = sonicmoe_cpp.moe_pairs(x, (none, none, weights.flatten()), *experts, **options)
    else:
        offsets = torch.zeros(5, dtype=torch.int64, device=device)
        out = sonicmoe_cpp.moe_grouped(x, offsets, *experts, **options)
    assert out.shape == (0, 16) and out.requires_grad
    out.sum().backward()
    for leaf in (layer.w_up, layer.w_down, layer.b_up, layer.b_down):
        assert leaf.grad is not None and (leaf.grad == 0).all()
    assert x.grad.shape == (0, 16)


@on_each
def test_no_pairs_at_all(device, dtype):
    layer = Layer(130, 16, 8, 4, 2, dtype, bias=True)
    layer.ids.fill_(-1)
    got = layer.to(dtype, device).step(sonicmoe_cpp.moe)
    assert all((value == 0).all() for value in got.values())
