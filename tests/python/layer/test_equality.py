"""Forward and every gradient against the same layer in plain PyTorch."""

import pytest
import reference
import sonicmoe_cpp
import torch
import torch.nn.functional as F
from devices import DTYPES
from reference import Layer, assert_twice

SHAPES = {
    "usual": (67, 48, 24, 8, 2),
    "odd": (33, 37, 19, 5, 3),
    "one expert": (17, 16, 8, 1, 1),
    "all experts": (20, 24, 16, 6, 6),
    "few tokens": (3, 32, 16, 16, 2),
    "tiles": (300, 64, 40, 4, 2),
}


def compare(layer: Layer) -> None:
    exact = layer.to(torch.float64).step(reference.moe)
    plain = layer.step(reference.moe)
    got = layer.step(sonicmoe_cpp.moe)
    for name in exact:
        assert_twice(name, got[name], plain[name], exact[name], layer.x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape, dtype):
    compare(Layer(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations(activation, bias, dtype):
    compare(Layer(65, 40, 24, 6, 2, dtype=dtype, activation=activation, bias=bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interleaved(dtype):
    compare(Layer(40, 24, 16, 5, 2, dtype=dtype, gate_layout="interleaved", bias=True))


@pytest.mark.parametrize(
    "name,parameters",
    [
        ("swiglu_oai", {"alpha": 1.1, "limit": 0.75}),
        ("swiglu_clamped", {"limit": 0.75}),
        ("swiglu_step", {"limit": 0.75}),
        ("situ", {"alpha": 1.5, "limit": 0.75}),
        ("situ", {"alpha": 0.02, "limit": 1e9}),
    ],
)
def test_alpha_and_limit(name, parameters):
    layer = Layer(50, 16, 12, 4, 2, dtype=torch.float32, activation=name, bias=True)
    layer.options |= parameters
    exact = layer.to(torch.float64).step(reference.moe)
    plain = layer.step(reference.moe)
    layer.options = {"activation": sonicmoe_cpp.Activation(name, **parameters)}
    got = layer.step(sonicmoe_cpp.moe)
    for name in exact:
        assert_twice(name, got[name], plain[name], exact[name], layer.x.dtype)


@pytest.mark.parametrize("name", ["swiglu_oai", "swiglu_clamped", "swiglu_step"])
@pytest.mark.parametrize("path", [sonicmoe_cpp.moe, sonicmoe_cpp.lora_moe])
@pytest.mark.parametrize("device,dtype", DTYPES)
def test_clamps_pass_their_gradient_at_equality(device, dtype, path, name):
    """W1 copies one input each to gate and up, at, inside and beyond the limit, so H is exact."""
    # silu exceeds the limit of 2 from 2.2179 on.
    values = [-2.125, -2.0, -1.875, 0.5, 1.875, 2.0, 2.125, 2.203125, 2.25]
    values = torch.tensor(values, dtype=torch.float64)
    points = torch.cartesian_prod(values, values)
    x = F.pad(points, (0, 6)).to(device, dtype).requires_grad_()
    w_up, w_down = torch.zeros(1, 16, 8), torch.zeros(1, 8, 8)
    w_up[0, 0, 0] = w_up[0, 8, 1] = w_down[0, 0, 0] = 1
    ids = torch.zeros(len(points), 1, dtype=torch.int64, device=device)
    inputs = (x, ids, torch.ones(len(points), 1, device=device))
    weights = (w_up.to(device, dtype), w_down.to(device, dtype))
    out = path(*inputs, *weights, activation=sonicmoe_cpp.Activation(name, limit=2.0))
    got = torch.cat([out[:, :1], torch.autograd.grad(out[:, 0].sum(), x)[0][:, :2]], dim=1)
    points.requires_grad_()
    want = reference.activate(name, points[:, 0], points[:, 1], limit=2.0)
    (slopes,) = torch.autograd.grad(want.sum(), points)
    want = torch.cat([want.detach()[:, None], slopes], dim=1)
    assert torch.equal(got.cpu() == 0, want == 0)
    torch.testing.assert_close(got.cpu().double(), want, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_ids_may_be_int32():
    layer = Layer(40, 24, 16, 5, 2, dtype=torch.float32)
    wide = layer.step(sonicmoe_cpp.moe)
    layer.ids = layer.ids.int()
    narrow = layer.step(sonicmoe_cpp.moe)
    assert all(torch.equal(wide[name], narrow[name]) for name in wide)


def test_inference_gives_the_same_bits():
    layer = Layer(90, 32, 24, 6, 2, dtype=torch.bfloat16)
    trained = layer.call(sonicmoe_cpp.moe)
    with torch.no_grad():
        inferred = layer.call(sonicmoe_cpp.moe)
    assert trained.requires_grad and not inferred.requires_grad
    assert torch.equal(trained, inferred)


def test_the_number_of_threads_does_not_matter():
    layer = Layer(300, 48, 32, 6, 2, dtype=torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(layer.step(sonicmoe_cpp.moe))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_scores_of_another_dtype_are_cast():
    layer = Layer(40, 24, 16, 5, 2, dtype=torch.bfloat16)
    rounded = layer.weights.detach().bfloat16()
    results = []
    for weights in (rounded, rounded.float()):
        layer.weights = weights.clone().requires_grad_()
        results.append(layer.step(sonicmoe_cpp.moe))
    got, want = results
    assert got["weights"].dtype == torch.bfloat16 and want["weights"].dtype == torch.float32
    for name, value in want.items():
        assert torch.equal(got[name], value.to(got[name].dtype)), name


def test_only_wanted_gradients_are_computed():
    layer = Layer(40, 24, 16, 5, 2, dtype=torch.float32, bias=True)
    everything = layer.step(sonicmoe_cpp.moe)
    for name in layer.leaves():
        other = layer.to(torch.float32)
        for leaf, value in other.leaves().items():
            value.requires_grad_(leaf == name)
        out = other.call(sonicmoe_cpp.moe)
        out.backward(other.dout)
        for leaf, value in other.leaves().items():
            if leaf == name:
                assert torch.equal(value.grad, everything[name])
            else:
                assert value.grad is None


def test_backward_twice_gives_the_same_bits():
    layer = Layer(40, 24, 16, 5, 2, dtype=torch.bfloat16)
    out = layer.call(sonicmoe_cpp.moe)
    leaves = list(layer.leaves().values())
    first = torch.autograd.grad(out, leaves, layer.dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, layer.dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_derivative_is_refused():
    layer = Layer(4, 8, 8, 2, 1)
    out = layer.call(sonicmoe_cpp.moe)
    (dx,) = torch.autograd.grad(out, layer.x, layer.dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dx.sum().backward()
