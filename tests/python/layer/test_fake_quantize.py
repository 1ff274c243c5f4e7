"""Fake quantisation against formulas in fp64, against packed weights, and in the layer."""

import pytest
import sonicmoe_cpp as smoe
import torch
from devices import DEVICES
from reference import error
from sonicmoe_cpp import fake_quantize, packed

FORMATS = ["fp8_blocks", "mxfp4", "nvfp4"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def weights_of(dtype=torch.float32, shape=(3, 40, 64), seed=0):
    """Experts of very different sizes; one block of zeros and one with an outlier."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g) * torch.tensor([1.0, 0.01, 3.0])[:, None, None]
    w[0, 0, :32] = 0
    w[1, 1, 5] = 30
    return w.to(dtype)


def nearest(values, scale, table):
    """values (..., B) in fp64 to the nearest of scale * table, ties to the even index."""
    scaled = (values / scale).abs()
    middle = (table[1:] + table[:-1]) / 2
    above = torch.bucketize(scaled, middle, right=True)
    below = torch.bucketize(scaled, middle, right=False)
    index = torch.where(above % 2 == 0, above, below)  # they differ on ties alone
    return table[index].copysign(values) * scale


def e4m3(values):
    return values.float().clamp(-448, 448).to(torch.float8_e4m3fn).double()


def reference(w, format):
    """The rounded weights in fp64, before the rounding to w's dtype."""
    v = w.double()
    out = torch.zeros_like(v)
    for e, row, column in torch.cartesian_prod(*(torch.arange(s) for s in v.shape)).tolist():
        if format == "fp8_blocks" and row % 128 == 0 and column % 128 == 0:
            block = v[e, row : row + 128, column : column + 128]
            scale = (block.abs().max().float() / 448).double()
            out[e, row : row + 128, column : column + 128] = e4m3(block / scale) * scale
        if format == "mxfp4" and column % 32 == 0:
            block = v[e, row, column : column + 32]
            if block.any():
                scale = 2.0 ** (block.abs().max().log2().floor() - 2)
                out[e, row, column : column + 32] = nearest(block, scale, E2M1)
        if format == "nvfp4" and column % 16 == 0:
            block = v[e, row, column : column + 16]
            outer = v[e].abs().max() / (6 * 448)
            inner = e4m3((block.abs().max() / (6 * outer)).clamp(min=2.0**-9))
            out[e, row, column : column + 16] = nearest(block, inner * outer, E2M1)
    return out


@pytest.mark.parametrize("format", FORMATS)
def test_values_are_those_of_the_format(format):
    w = weights_of()
    got, want = fake_quantize(w, format), reference(w, format)
    assert got.dtype == w.dtype
    # fp32 scales may move a value that lies on the middle between two others.
    moved = (got.double() - want).abs() > 1e-6 * want.abs()
    assert moved.double().mean() < (0.0005 if format != "mxfp4" else 1e-9)
    assert 0.01 < error(got, w) < (0.04 if format == "fp8_blocks" else 0.2)
    assert torch.equal(fake_quantize(got, "mxfp4"), got) or format != "mxfp4"


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_packed_weights(dtype):
    w = weights_of(dtype)
    assert torch.equal(fake_quantize(w, "mxfp4"), packed.pack_mxfp4(w).unpack())
    w = weights_of(dtype, shape=(3, 200, 136))
    codes = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(3, 2, 2)
    for e, r, c in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(2)).tolist():
        place = (e, slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128))
        scales[e, r, c] = w[place].float().abs().max() / 448
        codes[place] = (w[place].float() / scales[e, r, c]).to(torch.float8_e4m3fn)
    want = packed.from_fp8_blocks(codes, scales, dtype=dtype).unpack()
    assert torch.equal(fake_quantize(w, "fp8_blocks"), want)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_seen(format, value):
    w = weights_of()
    w[1, 2, 3] = value
    got = fake_quantize(w, format)
    assert got[1, 2, 3].isnan() and got[0].isfinite().all() and got[2].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_experts_and_transposed_weights(format, monkeypatch):
    w = weights_of(shape=(3, 32, 48 if format == "nvfp4" else 64))
    want = fake_quantize(w, format)
    monkeypatch.setattr(smoe._fake, "_ELEMENTS", 1)
    assert torch.equal(fake_quantize(w, format), want)
    strided = w.mT.contiguous().mT
    assert torch.equal(fake_quantize(strided, format), want)
    assert fake_quantize(w[:0], format).shape == (0, *w.shape[1:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_layer(format, device):
    """Bits and gradients of moe() on the rounded weights; the gradient goes straight through."""
    options = {"fake_quantize": format, "dtype": torch.bfloat16, "device": device}
    torch.manual_seed(0)
    layer = smoe.MoE(4, 2, 64, 32, **options)
    x = torch.randn(9, 64, device=device, dtype=torch.bfloat16)
    rounded = [fake_quantize(w, format).detach() for w in (layer.w_up, layer.w_down)]
    rounded = [w.requires_grad_() for w in rounded]
    ids, weights = smoe.route(layer.router(x), 2)
    want = smoe.moe(x, ids, weights, *rounded)
    out = layer(x)[0]
    assert torch.equal(out, want) and not torch.equal(rounded[0], layer.w_up)
    expected = torch.autograd.grad(want.float().square().sum(), rounded)
    found = torch.autograd.grad(out.float().square().sum(), [layer.w_up, layer.w_down])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_accumulated(format):
    torch.manual_seed(0)
    layer = smoe.MoE(4, 2, 64, 32, fake_quantize=format)
    x = torch.randn(9, 64)
    main = tuple(torch.zeros_like(w) for w in (layer.w_up, layer.w_down))
    layer(x, grad_accum=main)[0].square().sum().backward()
    assert layer.w_up.grad is None
    layer(x)[0].square().sum().backward()
    for got, weight in zip(main, (layer.w_up, layer.w_down), strict=True):
        assert error(got, weight.grad) < 1e-6


def test_training_moves_weights_that_are_rounded():
    """Steps smaller than the format's grid add up in the weights."""
    torch.manual_seed(0)
    layer = smoe.MoE(4, 2, 64, 32, fake_quantize="mxfp4")
    x, target = torch.randn(64, 64), torch.randn(64, 64)
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    before = layer(x)[0]
    layer.pack("mxfp4")
    assert torch.equal(layer(x)[0], before)


@pytest.mark.parametrize("format", FORMATS)
def test_compiled(format):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = smoe.MoE(4, 2, 64, 32, fake_quantize=format)
    x = torch.randn(9, 64)
    results = []
    for function in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
        out = function(x)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_factors_on_rounded_weights():
    torch.manual_seed(0)
    layer = smoe.MoE(4, 2, 64, 32, fake_quantize="mxfp4")
    x = torch.randn(9, 64)
    want = layer(x)[0]
    layer.add_lora(2, 4.0)
    assert torch.equal(layer(x)[0], want)
    layer(x)[0].square().sum().backward()
    assert layer.w_up.grad is None and layer.lora.up_b.grad.abs().sum() > 0


def test_refusals():
    w = weights_of()
    for format, sentence in (("mxfp4", "multiple of 32"), ("nvfp4", "multiple of 16")):
        with pytest.raises(ValueError, match=sentence):
            fake_quantize(w[..., :20], format)
    with pytest.raises(ValueError, match='format is "int4", must be one of: fp8_blocks'):
        fake_quantize(w, "int4")
    with pytest.raises(ValueError, match="weights has shape"):
        fake_quantize(w[0], "mxfp4")
    with pytest.raises(TypeError, match="weights has dtype float64"):
        fake_quantize(w.double(), "mxfp4")
    with pytest.raises(ValueError, match='fake_quantize is "fp4", must be one of'):
        smoe.MoE(4, 2, 64, 32, fake_quantize="fp4")
    with pytest.raises(ValueError, match="one of them must be None"):
        smoe.MoE(4, 2, 64, 32, fake_quantize="mxfp4", precision="fp8")


def test_experts_of_transformers():
    pytest.importorskip("transformers")
    import hf_models
    from sonicmoe_cpp.integrations import hf

    hf.register()
    model = hf_models.build("qwen3_moe", hidden_size=32, moe_intermediate_size=32)
    ids = torch.arange(1, 12)[None]
    plain = model(ids).logits
    hf.set_fake_quantize(model, "mxfp4")
    got = model(ids, labels=ids)
    assert error(got.logits, plain) > 1e-3
    got.loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if "experts" in n}
    hf.set_fake_quantize(model, None)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts" in name:
                p.copy_(fake_quantize(p, "mxfp4"))
    want = model(ids, labels=ids)
    assert torch.equal(want.logits, got.logits)
    want.loss.backward()
    assert all(torch.equal(found[n], p.grad) for n, p in model.named_parameters() if n in found)
    hf.set_precision(model, "fp8")
    with pytest.raises(ValueError, match="one of them must be None"):
        hf.set_fake_quantize(model, "mxfp4")
    hf.set_precision(model, None)
    packed_model = hf_models.build("qwen3_moe", hidden_size=32, moe_intermediate_size=32)
    hf.quantize_experts(packed_model, "mxfp4")
    with pytest.raises(ValueError, match="is packed, must be unpacked to be trained"):
        hf.set_fake_quantize(packed_model, "mxfp4")
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="is not computed by sonicmoe_cpp"):
        hf.set_fake_quantize(model, "mxfp4")
