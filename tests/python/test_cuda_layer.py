"""The layer on CUDA: every form, activation, layout and edge, against the CPU and float64."""

import pytest
import reference
import sonicmoe_cpp
import torch
from cuda_support import DTYPES, awkward_layer, compare, compare_moe, needs_cuda
from reference import ACTIVATIONS, Layer

pytestmark = [needs_cuda, pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top_k(dtype, activation, bias):
    compare_moe(Layer(150, 72, 56, 6, 3, dtype, activation=activation, bias=bias))


@pytest.mark.parametrize("hidden, width", [(8, 8), (24, 200), (200, 72), (264, 264)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_awkward_numbers_of_rows(dtype, hidden, width):
    got = compare_moe(awkward_layer(hidden, width, dtype, bias=True))
    for name in ("w_up", "w_down", "b_up", "b_down"):
        assert (got[name][0] == 0).all(), name  # the expert without rows


def test_one_hot_expert():
    layer = Layer(1000, 64, 32, 16, 1, torch.bfloat16)
    layer.ids.fill_(11)
    compare_moe(layer)


def test_empty_slots():
    layer = Layer(150, 72, 56, 5, 3, torch.bfloat16, bias=True)
    layer.ids[::3, 1] = -1
    layer.ids[1::4, 0] = 5
    layer.ids[7] = 2**40 + 1
    with torch.no_grad():
        layer.weights[0, 1] = float("nan")
    got = layer.to(torch.bfloat16, "cuda").step(sonicmoe_cpp.moe)
    empty = ((layer.ids < 0) | (layer.ids >= 5)).cuda()
    assert (got["weights"][empty] == 0).all() and (got["weights"][~empty] != 0).all()
    assert (got["out"][7] == 0).all() and (got["x"][7] == 0).all()
    with torch.no_grad():
        layer.weights[0, 1] = 0
    compare_moe(layer)


def test_an_expert_may_repeat_in_a_token():
    layer = Layer(130, 64, 32, 4, 3, torch.bfloat16)
    layer.ids[5] = 2
    layer.ids[100:] = 1
    compare_moe(layer)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_pairs_in_any_order(index):
    layer = Layer(300, 72, 56, 5, 2, torch.bfloat16, bias=True)
    layer.ids[4, 0] = 9
    order = torch.randperm(layer.ids.numel(), generator=torch.Generator().manual_seed(3))
    token = torch.arange(300).repeat_interleave(2)[order]

    def pairs(x, ids, weights, w_up, w_down, **options):
        on = x.device
        chosen = (token.to(on, index), ids.flatten()[order.to(on)].to(index))
        chosen += (weights.flatten()[order.to(on)],)
        return sonicmoe_cpp.moe_pairs(x, chosen, w_up, w_down, **options)

    compare(layer, pairs, reference.moe)


@pytest.mark.parametrize("mode", ["nearest", "up", "down"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_pairs(dtype, mode):
    layer = Layer(500, 72, 56, 6, 2, dtype)
    logits = torch.randn(500, 6, generator=torch.Generator().manual_seed(1))
    logits[:, 2] += 1
    pairs = sonicmoe_cpp.token_round(logits, 2, mode=mode)
    used = pairs.trimmed()
    capacity = pairs.token.shape[0]
    layer.weights = pairs.weight.clone().requires_grad_()
    layer.ids = torch.stack([pairs.token, pairs.expert])  # the routing, carried along

    def ours(x, ids, weights, w_up, w_down, **options):
        return sonicmoe_cpp.moe_pairs(x, (*ids, weights), w_up, w_down, **options)

    def plain(x, ids, weights, w_up, w_down, **options):
        return reference.experts(x, *ids, weights, w_up, w_down, **options)

    assert used.token.shape[0] % 128 == 0 and used.token.shape[0] <= capacity
    got = compare(layer, ours, plain)
    assert (got["weights"][used.token.shape[0] :] == 0).all()


@pytest.mark.parametrize("form", ["offsets", "ranges", "aligned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_rows(dtype, form):
    counts = torch.tensor([70, 0, 129, 1])
    layer = Layer(300, 72, 56, 4, 1, dtype, bias=True)
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

    got = compare(layer, ours, plain)
    assert (got["out"].cpu()[unused] == 0).all() and (got["x"].cpu()[unused] == 0).all()


def test_grouped_rows_without_weights():
    layer = Layer(120, 64, 32, 3, 1, torch.bfloat16).to(torch.bfloat16, "cuda")
    offsets = torch.tensor([0, 40, 40, 120], device="cuda")
    experts = (layer.w_up, layer.w_down)
    bare = sonicmoe_cpp.moe_grouped(layer.x, offsets, *experts)
    ones = torch.ones(120, device="cuda")
    assert torch.equal(bare, sonicmoe_cpp.moe_grouped(layer.x, offsets, *experts, row_weights=ones))


def stored(gate, up, form, transposed):
    """(gate, up) as the tensors of a form, each in the strides asked for."""
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


# Interleaved and transposed alternates in the contiguous dimension, which has no strided view that
# the kernels read.
FORMS = [("concatenated", False), ("interleaved", False), ("separate", False)]
FORMS += [("concatenated", True), ("separate", True)]


@pytest.mark.parametrize("form, transposed", FORMS)
def test_layouts_and_strides(form, transposed):
    layer = Layer(140, 72, 56, 5, 2, torch.bfloat16).to(torch.bfloat16, "cuda")
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
    assert torch.equal(dx, want["x"])
    for grad, tensor in zip(grads, tensors, strict=True):
        assert grad.stride() == tensor.stride() and grad.dtype == tensor.dtype
    found = [*halves(grads[:-1], form), grads[-1]]
    for grad, same in zip(found, (*want["w_up"].chunk(2, dim=1), want["w_down"]), strict=True):
        assert torch.equal(grad, same)


def test_rows_of_any_strides_are_fine():
    layer = Layer(120, 64, 32, 4, 2, torch.bfloat16).to(torch.bfloat16, "cuda")
    want = layer.step(sonicmoe_cpp.moe)
    x = layer.x.detach()
    shifted = torch.cat([x[:, :3], x, x[:, :5]], dim=1)[:, 3:67]  # 6 bytes past a boundary
    odd = torch.cat([x, x[:, :5]], dim=1)[:, :64]  # rows of 69
    for view in (x.t().contiguous().t(), torch.stack([x, x], dim=2)[:, :, 1], shifted, odd):
        layer.x = view.requires_grad_()
        got = layer.step(sonicmoe_cpp.moe)
        assert all(torch.equal(got[name], want[name]) for name in want)
    layer.dout = torch.ones(1, 1, device="cuda", dtype=torch.bfloat16).expand(120, 64)
    assert all(value.isfinite().all() for value in layer.step(sonicmoe_cpp.moe).values())


@pytest.mark.parametrize("form", ["one tensor", "separate"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_main_gradients(dtype, form):
    host = Layer(300, 72, 56, 5, 2, dtype, bias=True)
    host.ids[host.ids == 4] = -1
    exact = host.to(torch.float64, "cuda").step(reference.moe)
    layer = host.to(dtype, "cuda")
    plain = layer.step(sonicmoe_cpp.moe)
    w_up = layer.w_up
    if form == "separate":
        w_up = tuple(half.detach().clone().requires_grad_() for half in w_up.chunk(2, dim=1))
    ups = w_up if isinstance(w_up, tuple) else (w_up,)
    buffers = [torch.full(w.shape, 0.5, device="cuda") for w in (*ups, layer.w_down)]
    accum = (tuple(buffers[:2]) if form == "separate" else buffers[0], buffers[-1])
    options = {"b_up": layer.b_up, "b_down": layer.b_down, "grad_accum": accum}
    for _ in range(2):
        out = sonicmoe_cpp.moe(layer.x, layer.ids, layer.weights, w_up, layer.w_down, **options)
        out.backward(layer.dout)
    assert all(w.grad is None for w in (*ups, layer.w_down))
    assert torch.equal(layer.x.grad, plain["x"] * 2)
    sums = (torch.cat(buffers[:-1], dim=1), buffers[-1])
    for got, name in zip(sums, ("w_up", "w_down"), strict=True):
        assert got.dtype == torch.float32 and (got[4] == 0.5).all()
        assert reference.error(got - 0.5, 2 * exact[name]) < 1e-2, name
    for bias in ("b_up", "b_down"):
        grad = getattr(layer, bias).grad
        assert grad.dtype == dtype and reference.error(grad, 2 * exact[bias]) < 2e-2, bias


@pytest.mark.parametrize("frozen", [("w_up", "w_down"), ("x",), ("w_down", "weights"), ("b_up",)])
def test_what_is_frozen_gets_no_gradient(frozen):
    layer = Layer(140, 72, 56, 5, 2, torch.bfloat16, bias=True).to(torch.bfloat16, "cuda")
    want = layer.step(sonicmoe_cpp.moe)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    layer.call(sonicmoe_cpp.moe).backward(layer.dout)
    for name, leaf in layer.leaves().items():
        if name in frozen:
            assert leaf.grad is None
        else:
            assert torch.equal(leaf.grad, want[name]), name


@pytest.mark.parametrize("form", ["ids", "pairs", "grouped"])
def test_no_tokens(form):
    layer = Layer(3, 16, 8, 4, 2, torch.bfloat16, bias=True).to(torch.bfloat16, "cuda")
    x = torch.empty(0, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {"b_up": layer.b_up, "b_down": layer.b_down}
    experts = (layer.w_up, layer.w_down)
    weights = torch.empty(0, 2, device="cuda", requires_grad=True)
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    if form == "ids":
        out = sonicmoe_cpp.moe(x, none.view(0, 2), weights, *experts, **options)
    elif form == "pairs":
        out = sonicmoe_cpp.moe_pairs(x, (none, none, weights.flatten()), *experts, **options)
    else:
        offsets = torch.zeros(5, dtype=torch.int64, device="cuda")
        out = sonicmoe_cpp.moe_grouped(x, offsets, *experts, **options)
    assert out.shape == (0, 16) and out.requires_grad
    out.sum().backward()
    for leaf in (layer.w_up, layer.w_down, layer.b_up, layer.b_down):
        assert leaf.grad is not None and (leaf.grad == 0).all()
    assert x.grad.shape == (0, 16)


def test_no_pairs_at_all():
    layer = Layer(130, 16, 8, 4, 2, torch.bfloat16, bias=True)
    layer.ids.fill_(-1)
    got = layer.to(torch.bfloat16, "cuda").step(sonicmoe_cpp.moe)
    assert all((value == 0).all() for value in got.values())


def test_equal_inputs_give_equal_bits():
    layer = Layer(700, 72, 56, 6, 3, torch.bfloat16, bias=True).to(torch.bfloat16, "cuda")
    first, again = layer.step(sonicmoe_cpp.moe), layer.step(sonicmoe_cpp.moe)
    assert all(torch.equal(first[name], again[name]) for name in first)
    with torch.no_grad():
        assert torch.equal(layer.call(sonicmoe_cpp.moe), first["out"])


def refused(message, error, **changes):
    layer = Layer(20, 16, 8, 4, 2, torch.bfloat16).to(torch.bfloat16, "cuda")
    for name, change in changes.items():
        setattr(layer, name, change(getattr(layer, name).detach()))
    with pytest.raises(error, match=message):
        layer.call(sonicmoe_cpp.moe)


def test_refusals():
    refused("w_up has dtype float16, must be x's bfloat16", TypeError, w_up=torch.Tensor.half)
    refused("w_down is on cpu, must be on x's device cuda:0", ValueError, w_down=torch.Tensor.cpu)
    refused("topk_ids is on cpu", ValueError, ids=torch.Tensor.cpu)
    refused("w_down has shape", ValueError, w_down=lambda w: w[:, :8])
    single = dict.fromkeys(("x", "w_up", "w_down"), torch.Tensor.float)
    refused("dtype is f32", NotImplementedError, **single)
    odd = {"x": lambda x: x[:, :12], "w_up": lambda w: w[:, :, :12], "w_down": lambda w: w[:, :12]}
    refused("multiples of 8", NotImplementedError, **odd)
    refused("strides", NotImplementedError, w_down=lambda w: torch.cat([w, w[..., :3]], 2)[..., :8])
