"""Every form of input: empty slots, pairs, grouped rows, layouts, main gradients, T = 0."""

import pytest
import reference
import sonicmoe_cpp
import torch
from reference import Layer, assert_twice


def compare(layer: Layer, ours, plain) -> None:
    exact = layer.to(torch.float64).step(plain)
    rounded, got = layer.step(plain), layer.step(ours)
    for name in exact:
        assert_twice(name, got[name], rounded[name], exact[name], layer.x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_slots(dtype):
    layer = Layer(50, 24, 16, 5, 3, dtype=dtype, bias=True)
    layer.ids[::3, 1] = -1
    layer.ids[1::4, 0] = 5
    layer.ids[7] = 2**40 + 1  # compared as 64 bits: narrowed, it would be expert 1
    compare(layer, sonicmoe_cpp.moe, reference.moe)
    got = layer.step(sonicmoe_cpp.moe)
    empty = (layer.ids < 0) | (layer.ids >= 5)
    assert (got["weights"][empty] == 0).all() and (got["weights"][~empty] != 0).all()
    assert (got["out"][7] == 0).all() and (got["x"][7] == 0).all()


def test_nan_in_an_empty_slot_reaches_nothing():
    layer = Layer(30, 16, 8, 4, 2, dtype=torch.float32)
    layer.ids[3, 1] = -1
    with torch.no_grad():
        layer.weights[3, 1] = float("nan")
    got = layer.step(sonicmoe_cpp.moe)
    assert all(value.isfinite().all() for value in got.values())


def test_an_expert_may_repeat_in_a_token():
    layer = Layer(30, 16, 8, 4, 3, dtype=torch.float32)
    layer.ids[5] = 2
    compare(layer, sonicmoe_cpp.moe, reference.moe)


@pytest.mark.parametrize("hot", [0, 3])
def test_one_hot_expert(hot):
    layer = Layer(130, 16, 8, 4, 1, dtype=torch.float32)
    layer.ids.fill_(hot)
    compare(layer, sonicmoe_cpp.moe, reference.moe)
    got = layer.step(sonicmoe_cpp.moe)
    cold = [e for e in range(4) if e != hot]
    assert (got["w_up"][cold] == 0).all() and (got["w_down"][cold] == 0).all()


def shuffled(layer):
    """Every slot as a pair, in an order of no meaning."""
    g = torch.Generator().manual_seed(3)
    order = torch.randperm(layer.ids.numel(), generator=g)
    token = torch.arange(layer.ids.shape[0]).repeat_interleave(layer.ids.shape[1])
    return order, token[order]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_in_any_order(dtype, index):
    layer = Layer(65, 24, 16, 5, 2, dtype=dtype, bias=True)
    layer.ids[4, 0] = 9
    order, token = shuffled(layer)

    def pairs(x, ids, weights, w_up, w_down, **options):
        chosen = (token.to(index), ids.flatten()[order].to(index), weights.flatten()[order])
        return sonicmoe_cpp.moe_pairs(x, chosen, w_up, w_down, **options)

    compare(layer, pairs, reference.moe)


@pytest.mark.parametrize("form", ["offsets", "ranges", "aligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_rows(dtype, form):
    counts = torch.tensor([5, 0, 17, 1])
    layer = Layer(40, 24, 16, 4, 1, dtype=dtype, bias=True)
    begin = torch.tensor([0, 8, 8, 32]) if form == "aligned" else counts.cumsum(0) - counts
    rows = torch.cat([torch.arange(b, b + c) for b, c in zip(begin, counts, strict=True)])
    expert = torch.arange(4).repeat_interleave(counts)
    with torch.no_grad():
        unused = torch.ones(40, dtype=torch.bool)
        unused[rows] = False
        dirty = layer.x.clone()
        dirty[unused] = float("nan")

    def ours(x, ids, weights, w_up, w_down, **options):
        x = torch.where(unused[:, None], dirty.to(x.dtype), x)
        ranges = (begin.int(), counts.int())
        if form == "offsets":
            ranges = torch.cat([begin, counts.sum()[None]])
        options["row_weights"] = weights[:, 0]
        return sonicmoe_cpp.moe_grouped(x, ranges, w_up, w_down, **options)

    def plain(x, ids, weights, w_up, w_down, **options):
        return reference.experts(x, rows, expert, weights[rows, 0], w_up, w_down, **options)

    compare(layer, ours, plain)
    got = layer.step(ours)
    assert (got["out"][unused] == 0).all() and (got["x"][unused] == 0).all()


def test_grouped_rows_without_weights():
    layer = Layer(12, 16, 8, 3, 1, dtype=torch.float32)
    offsets = torch.tensor([0, 4, 4, 12])
    ones = torch.ones(12)
    experts = (layer.w_up, layer.w_down)
    bare = sonicmoe_cpp.moe_grouped(layer.x, offsets, *experts)
    weighted = sonicmoe_cpp.moe_grouped(layer.x, offsets, *experts, row_weights=ones)
    assert torch.equal(bare, weighted)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("form", ["concatenated", "interleaved", "separate"])
def test_layouts_and_strides(form, transposed):
    """All forms hold the same numbers: the same bits come out, in each weight's own strides."""
    layer = Layer(40, 24, 16, 5, 2, dtype=torch.bfloat16)
    want = layer.step(sonicmoe_cpp.moe)
    gate, up = (half.detach().clone() for half in layer.w_up.chunk(2, dim=1))
    down = layer.w_down.detach().clone()
    if form == "separate":
        ups = [gate, up]
    elif form == "interleaved":
        ups = [torch.stack([gate, up], dim=2).flatten(1, 2)]
    else:
        ups = [torch.cat([gate, up], dim=1)]
    tensors = [*ups, down]
    if transposed:
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    tensors = [t.requires_grad_() for t in tensors]
    w_up = tuple(tensors[:2]) if form == "separate" else tensors[0]
    gate_layout = "interleaved" if form == "interleaved" else "concatenated"
    arguments = (layer.x, layer.ids, layer.weights, w_up, tensors[-1])
    out = sonicmoe_cpp.moe(*arguments, gate_layout=gate_layout)
    assert torch.equal(out, want["out"])
    dx, *grads = torch.autograd.grad(out, [layer.x, *tensors], layer.dout)
    assert torch.equal(dx, want["x"])
    for grad, tensor in zip(grads, tensors, strict=True):
        assert grad.stride() == tensor.stride() and grad.dtype == tensor.dtype
    gate, up = want["w_up"].chunk(2, dim=1)
    if form == "interleaved":
        grads = [grads[0][:, 0::2], grads[0][:, 1::2], grads[1]]
    elif form == "concatenated":
        grads = [*grads[0].chunk(2, dim=1), grads[1]]
    for grad, same in zip(grads, (gate, up, want["w_down"]), strict=True):
        assert torch.equal(grad, same)


def test_odd_strides_of_rows_are_fine():
    layer = Layer(20, 16, 8, 4, 2, dtype=torch.float32)
    want = layer.step(sonicmoe_cpp.moe)
    for view in (
        layer.x.detach().t().contiguous().t(),
        torch.stack([layer.x.detach()] * 2, dim=2)[:, :, 1],
        torch.cat([layer.x.detach()] * 2, dim=1)[:, 16:],
    ):
        layer.x = view.requires_grad_()
        got = layer.step(sonicmoe_cpp.moe)
        assert all(torch.equal(got[name], want[name]) for name in want)
    layer.dout = torch.ones(1, 1).expand(20, 16)
    assert all(value.isfinite().all() for value in layer.step(sonicmoe_cpp.moe).values())


@pytest.mark.parametrize("form", ["one tensor", "separate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_gradients(dtype, form):
    layer = Layer(60, 24, 16, 5, 2, dtype=dtype, bias=True)
    layer.ids[layer.ids == 4] = -1  # an expert without rows: its buffer is left alone
    exact = layer.to(torch.float64).step(reference.moe)
    plain = layer.step(sonicmoe_cpp.moe)
    w_up = layer.w_up
    if form == "separate":
        w_up = tuple(half.detach().clone().requires_grad_() for half in w_up.chunk(2, dim=1))
    ups = w_up if isinstance(w_up, tuple) else (w_up,)
    buffers = [torch.full(w.shape, 0.5) for w in (*ups, layer.w_down)]
    accum = (tuple(buffers[:2]) if form == "separate" else buffers[0], buffers[-1])
    options = {"b_up": layer.b_up, "b_down": layer.b_down, "grad_accum": accum}
    arguments = (layer.x, layer.ids, layer.weights, w_up, layer.w_down)
    first = sonicmoe_cpp.moe(*arguments, **options)
    second = sonicmoe_cpp.moe(*arguments, **options)  # two micro-batches in flight
    second.backward(layer.dout)
    first.backward(layer.dout)
    assert all(w.grad is None for w in (*ups, layer.w_down))
    assert torch.equal(layer.x.grad, plain["x"] * 2)
    for bias in ("b_up", "b_down"):
        assert getattr(layer, bias).grad.dtype == dtype
        assert reference.error(getattr(layer, bias).grad, 2 * exact[bias]) < 2e-2
    sums = (torch.cat(buffers[:-1], dim=1), buffers[-1])
    for got, name in zip(sums, ("w_up", "w_down"), strict=True):
        assert got.dtype == torch.float32
        assert (got[4] == 0.5).all()
        limit = 1e-6 if dtype == torch.float32 else 1e-2
        assert reference.error(got - 0.5, 2 * exact[name]) < limit


@pytest.mark.parametrize("keep_graph", ["ids", "pairs", "grouped"])
def test_no_tokens(keep_graph):
    layer = Layer(3, 16, 8, 4, 2, dtype=torch.float32, bias=True)
    x = torch.empty(0, 16, requires_grad=True)
    options = {"b_up": layer.b_up, "b_down": layer.b_down}
    experts = (layer.w_up, layer.w_down)
    weights = torch.empty(0, 2, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    if keep_graph == "ids":
        out = sonicmoe_cpp.moe(x, none.view(0, 2), weights, *experts, **options)
    elif keep_graph == "pairs":
        out = sonicmoe_cpp.moe_pairs(x, (none, none, weights.flatten()), *experts, **options)
    else:
        offsets = torch.zeros(5, dtype=torch.int64)
        out = sonicmoe_cpp.moe_grouped(x, offsets, *experts, **options)
    assert out.shape == (0, 16) and out.requires_grad
    out.sum().backward()
    for leaf in (layer.w_up, layer.w_down, layer.b_up, layer.b_down):
        assert leaf.grad is not None and (leaf.grad == 0).all()
    assert x.grad.shape == (0, 16)


def test_no_pairs_at_all():
    layer = Layer(3, 16, 8, 4, 2, dtype=torch.float32)
    layer.ids.fill_(-1)
    got = layer.step(sonicmoe_cpp.moe)
    assert all((value == 0).all() for value in got.values())
