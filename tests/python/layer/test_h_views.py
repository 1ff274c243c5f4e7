"""The layout of gate and up in H as forward keeps it, for every form of input and of weights."""

import pytest
import reference
import sonicmoe_cpp
import torch
from devices import DEVICES
from reference import Layer

T, D, N, E, K = 40, 24, 16, 5, 2


def kept(function, *arguments, **options):
    """H of a call: the only kept tensor of its width."""
    found = []

    def pack(t):
        if t.dim() == 2 and t.shape[1] in (N, 2 * N) and t.dtype == torch.bfloat16:
            found.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(*arguments, **options)
    (h,) = found
    return h


def assert_rows(views, layer, token, expert, halves):
    """Compares each row with float64: the halves of W1 times x."""
    x = layer.x.detach().double()[token]
    for got, half in zip(views, halves, strict=True):
        want = torch.einsum("rd,rnd->rn", x, half.detach().double()[expert])
        assert got.shape[1] == N
        assert reference.error(got[: len(token)].double(), want) < 1e-2


@pytest.fixture(params=DEVICES)
def layer(request):
    layer = Layer(T, D, N, E, K, torch.bfloat16).to(torch.bfloat16, request.param)
    layer.ids[3, 0] = -1
    return layer


def by_expert(ids):
    """(token, expert) of ids in the order of H."""
    expert, order = ids.flatten().sort(stable=True)
    used = (expert >= 0) & (expert < E)
    return (order // K)[used], expert[used]


@pytest.mark.parametrize("form", ["concatenated", "interleaved", "separate", "alternating"])
def test_forms_of_weights(layer, form):
    gate, up = (half.detach().contiguous() for half in layer.w_up.chunk(2, dim=1))
    w_up, gate_layout = torch.cat([gate, up], dim=1), "concatenated"
    if form == "separate":
        w_up = (gate, up)
    elif form != "concatenated":
        gate_layout = "interleaved"
        w_up = torch.stack([gate, up], dim=2).flatten(1, 2)
    if form == "alternating":  # along the contiguous dimension, as gpt-oss stores them
        w_up = w_up.transpose(1, 2).contiguous().transpose(1, 2)
    routing = (layer.ids, layer.weights)
    options = {"gate_layout": gate_layout}
    h = kept(sonicmoe_cpp.moe, layer.x, *routing, w_up, layer.w_down, **options)
    views = sonicmoe_cpp.h_views(h, w_up, **options)
    assert all(v.untyped_storage().data_ptr() == h.untyped_storage().data_ptr() for v in views)
    alternate = form == "alternating" and h.is_cuda
    assert [v.stride(1) for v in views] == [2 if alternate else 1] * 2
    assert_rows(views, layer, *by_expert(layer.ids), (gate, up))


def test_pairs(layer):
    order = torch.randperm(T * K, generator=torch.Generator().manual_seed(1))
    order = order.to(layer.x.device)
    pairs = (order // K, layer.ids.flatten()[order], layer.weights.flatten()[order])
    h = kept(sonicmoe_cpp.moe_pairs, layer.x, pairs, layer.w_up, layer.w_down)
    views = sonicmoe_cpp.h_views(h, layer.w_up)
    assert_rows(views, layer, *by_expert(layer.ids), layer.w_up.chunk(2, dim=1))


def test_grouped_rows(layer):
    counts = torch.tensor([5, 0, 17, 1, 0])
    begin = torch.tensor([0, 8, 8, 32, 33])
    ranges = [t.to(layer.x.device) for t in (begin, counts)]
    h = kept(sonicmoe_cpp.moe_grouped, layer.x, ranges, layer.w_up, layer.w_down)
    rows = [torch.arange(b, b + c) for b, c in zip(begin, counts, strict=True)]
    token = torch.cat(rows).to(layer.x.device)
    expert = torch.arange(E).repeat_interleave(counts).to(layer.x.device)
    views = sonicmoe_cpp.h_views(h, layer.w_up)
    if h.is_cuda:  # each row at its own place
        views = [view[token] for view in views]
    assert_rows(views, layer, token, expert, layer.w_up.chunk(2, dim=1))


def test_no_gate(layer):
    w_up = layer.w_up.detach()[:, :N]
    options = {"activation": "relu2"}
    h = kept(sonicmoe_cpp.moe, layer.x, layer.ids, layer.weights, w_up, layer.w_down, **options)
    gate, up = sonicmoe_cpp.h_views(h, w_up, **options)
    assert gate is None
    assert (up.data_ptr(), up.shape, up.stride()) == (h.data_ptr(), h.shape, h.stride())
    token, expert = by_expert(layer.ids)
    assert_rows([up], layer, token, expert, (w_up,))


def test_refusals():
    w_up = torch.randn(E, 2 * N, D)
    with pytest.raises(ValueError, match=r"h has shape \(7, 16\), must be \(C, 2\*n\)"):
        sonicmoe_cpp.h_views(torch.zeros(7, N), w_up)
    with pytest.raises(ValueError, match="must be contiguous"):
        sonicmoe_cpp.h_views(torch.zeros(2 * N, 7).t(), w_up)
    with pytest.raises(TypeError, match="h is NoneType"):
        sonicmoe_cpp.h_views(None, w_up)
