"""precision="fp8" against the same formulas in plain torch, with the same quantisation points; the
object of quantised weights, graphs and refusals. test_fp8_module.py has the module."""

import pytest
import reference
import sonicmoe_cpp
import torch
import torch.nn.functional as F
from reference import Layer
from sonicmoe_cpp._call import NEEDS
from sonicmoe_cpp._fakes import fp8_weights_bytes
from sonicmoe_cpp._names import PRECISION
from torch.library import opcheck

BF16 = torch.bfloat16
T, D, N, E, K = 61, 256, 128, 5, 2


# ---- the same in plain torch ---------------------------------------------------------------------


def scale_of(largest):
    """The smallest power of two s with largest <= 448 s; 1 for 0."""
    _, exponent = torch.frexp(largest / 448)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    scale = torch.where(scale / 2 * 448 >= largest, scale / 2, scale)
    return torch.where(largest == 0, 1.0, scale)


def coded(v, *block):
    """v quantised to e4m3 and back, in blocks of the last dimensions. The last block of a dimension
    may be smaller."""
    over = [-size % b for size, b in zip(v.shape[-len(block) :], block, strict=True)]
    padded = F.pad(v.float(), [n for size in reversed(over) for n in (0, size)])
    sizes = [
        s
        for size, b in zip(padded.shape[-len(block) :], block, strict=True)
        for s in (size // b, b)
    ]
    blocks = padded.reshape(*v.shape[: -len(block)], *sizes)
    inner = [blocks.dim() - 1 - 2 * i for i in range(len(block))]
    scale = scale_of(blocks.abs().amax(inner, keepdim=True))
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    restored = (codes.float() * scale).reshape(padded.shape)
    return restored[tuple(slice(size) for size in v.shape)]


def rows8(v):
    return coded(v, 128)


def weights8(w):
    return coded(w, 128, 128)


def rounded(v):
    return v.to(BF16).float()


def halves(t, gated, layout, dim):
    if not gated:
        return None, t
    if layout == "interleaved":
        return t.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return t.chunk(2, dim)


def joined(gate, up, layout, dim):
    if gate is None:
        return up
    if layout == "interleaved":
        return torch.stack((gate, up), dim + 1).flatten(dim, dim + 1)
    return torch.cat((gate, up), dim)


def plain_step(layer: Layer, keep_h: str | None) -> dict:
    """The output and every gradient of one layer, by the formulas of docs/fp8.md."""
    name, layout = layer.options["activation"], layer.options["gate_layout"]
    gated = reference.is_gated(name)
    x, dout = layer.x.detach().float(), layer.dout.float()
    score = layer.weights.detach()
    w_gate, w_up = halves(layer.w_up.detach().float(), gated, layout, 1)
    w_down = layer.w_down.detach().float()
    biased = layer.b_up is not None
    b_gate, b_up = halves(layer.b_up.detach().float(), gated, layout, 1) if biased else (None, None)
    b_down = layer.b_down.detach().float() if biased else torch.zeros(w_down.shape[:2])
    out, dx = torch.zeros_like(x), torch.zeros_like(x)
    dscore, grads = torch.zeros_like(score), []
    for e in range(E):
        token, slot = torch.where(layer.ids == e)
        s = score[token, slot, None]
        parts = [(w_gate, b_gate)] * gated + [(w_up, b_up)]
        h = [
            rounded(rows8(x)[token] @ weights8(w[e]).T + (b[e] if biased else 0)) for w, b in parts
        ]
        a = rounded(reference.activate(name, h[0] if gated else None, h[-1]))
        y = rounded(rows8(a) @ weights8(w_down[e]).T + b_down[e])
        out.index_add_(0, token, s * y)
        kept = [(v if keep_h == "bf16" else rows8(v)).requires_grad_() for v in h]
        value = reference.activate(name, kept[0] if gated else None, kept[-1])
        da = rows8(dout)[token] @ weights8(w_down[e])
        dh = [rounded(g) for g in torch.autograd.grad(value, kept, s * da)]
        value = value.detach()
        dscore[token, slot] = (da * rounded(value)).sum(1) + dout[token] @ b_down[e]
        dx_rows = sum(rows8(g) @ weights8(w[e]) for g, (w, _) in zip(dh, parts, strict=True))
        dx.index_add_(0, token, rounded(dx_rows))
        dw_up = joined(*([None] * (not gated)), *(g.T @ x[token] for g in dh), layout, 0)
        db_up = joined(*([None] * (not gated)), *(g.sum(0) for g in dh), layout, 0)
        dw_down = dout[token].T @ rounded(s * value)
        grads.append((dw_up, dw_down, db_up, (s * dout[token]).sum(0)))
    names = ("w_up", "w_down") + (("b_up", "b_down") if biased else ())
    stacked = dict(zip(names, map(torch.stack, zip(*grads, strict=True)), strict=False))
    return {"out": rounded(out), "x": rounded(dx), "weights": dscore} | stacked


def fp8_layer(d=D, n=N, **options) -> Layer:
    return Layer(T, d, n, E, K, **options).to(BF16)


def with_options(**options):
    def function(*arguments, **others):
        return sonicmoe_cpp.moe(*arguments, **others, **options)

    return function


@pytest.mark.parametrize("keep_h", [None, "bf16"])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("activation", ["swiglu", "reglu", "swiglu_oai", "gelu", "relu2"])
def test_against_the_same_formulas(activation, layout, keep_h):
    check_formulas(fp8_layer(activation=activation, gate_layout=layout, bias=True), keep_h)


@pytest.mark.parametrize("keep_h", [None, "bf16"])
@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
@pytest.mark.parametrize(("d", "n"), [(64, 64), (192, 320), (320, 128), (128, 192)])
def test_last_blocks_of_64(d, n, activation, keep_h):
    check_formulas(fp8_layer(d, n, activation=activation, bias=True), keep_h)


def check_formulas(layer, keep_h):
    got = layer.step(with_options(precision="fp8", keep_h=keep_h))
    exact = layer.to(torch.float32).step(reference.moe)
    for name, want in plain_step(layer, keep_h).items():
        close, far = reference.error(got[name], want), reference.error(exact[name], want)
        # Few codes differ: where one of the two rounded to the other neighbour.
        assert close < 0.008, (name, close)
        if name != "b_down":  # db_down does not depend on quantised values
            assert far > 2 * close, (name, far, close)


def test_the_output_does_not_depend_on_the_kept_h():
    layer = fp8_layer(bias=True)
    outs = [layer.call(with_options(precision="fp8", keep_h=keep)) for keep in (None, "bf16")]
    with torch.no_grad():
        outs.append(layer.call(with_options(precision="fp8")))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_pairs_and_grouped_are_the_same_layer():
    layer = fp8_layer()
    want = layer.call(with_options(precision="fp8"))
    token = torch.arange(T).repeat_interleave(K)
    pairs = (token, layer.ids.flatten(), layer.weights.flatten())
    experts = (layer.w_up, layer.w_down)
    got = sonicmoe_cpp.moe_pairs(layer.x, pairs, *experts, precision="fp8")
    torch.testing.assert_close(got, want)
    expert, order = layer.ids.flatten().sort(stable=True)
    offsets = torch.searchsorted(expert, torch.arange(E + 1))
    rows = sonicmoe_cpp.moe_grouped(
        *(layer.x[token[order]], offsets, *experts),
        row_weights=layer.weights.flatten()[order],
        precision="fp8",
    )
    summed = torch.zeros(T, D).index_add(0, token[order], rows.float())
    assert reference.error(summed, want) < 0.006


def test_a_token_does_not_depend_on_the_others():
    layer = fp8_layer(bias=True)
    whole = layer.step(with_options(precision="fp8"))
    half = slice(7, 38)
    part = fp8_layer(bias=True)
    part.ids, part.dout = layer.ids[half], layer.dout[half]
    for name in ("x", "weights"):
        setattr(part, name, getattr(layer, name)[half].detach().requires_grad_())
    got = part.step(with_options(precision="fp8"))
    for name in ("out", "x", "weights"):
        assert torch.equal(got[name], whole[name][half]), name


# ---- quantised weights ---------------------------------------------------------------------------


def test_quantised_weights_are_those_of_the_call():
    layer = fp8_layer(bias=True)
    quantised = sonicmoe_cpp.quantize_weights(layer.w_up, layer.w_down)
    assert quantised.codes.dtype == torch.uint8 and not quantised.codes.requires_grad
    assert tuple(quantised[1:]) == (E, 2, N, D)
    assert quantised.codes.shape == (fp8_weights_bytes(E, 2, N, D),)
    want = layer.step(with_options(precision="fp8"))
    for options in ({}, {"keep_h": "bf16"}):
        got = layer.step(with_options(precision="fp8", fp8_weights=quantised, **options))
        if not options:
            for name in want:
                assert torch.equal(got[name], want[name]), name
    # The products read the codes, not the weights.
    layer.w_up.data.zero_()
    again = layer.call(with_options(precision="fp8", fp8_weights=quantised))
    assert torch.equal(again, want["out"])


def test_quantised_weights_of_a_pair_and_without_a_gate():
    layer = fp8_layer()
    fused = sonicmoe_cpp.quantize_weights(layer.w_up, layer.w_down)
    apart = sonicmoe_cpp.quantize_weights(tuple(layer.w_up.chunk(2, 1)), layer.w_down)
    assert torch.equal(fused.codes, apart.codes)
    plain = fp8_layer(activation="relu2")
    assert sonicmoe_cpp.quantize_weights(plain.w_up, plain.w_down, activation="relu2").gates == 1


def test_main_gradients():
    layer = fp8_layer()
    fresh = layer.step(with_options(precision="fp8"))
    sums = [torch.ones(w.shape) for w in (layer.w_up, layer.w_down)]
    out = layer.call(with_options(precision="fp8", grad_accum=tuple(sums)))
    out.backward(layer.dout)
    for name, total in zip(("w_up", "w_down"), sums, strict=True):
        torch.testing.assert_close((total - 1).to(BF16), fresh[name], rtol=0.02, atol=0.02)


def test_memory_kept_for_backward():
    def kept(**options):
        layer = Layer(512, D, N, E, K).to(BF16)
        sizes = []
        own = {t.data_ptr() for t in (layer.x, layer.w_up, layer.w_down)}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(0 if t.data_ptr() in own else t.nbytes) or t, lambda t: t
        ):
            layer.call(with_options(**options))
        return max(sizes)

    assert kept() == 512 * K * 2 * N * 2
    assert kept(precision="fp8") <= 0.55 * kept()
    assert kept(precision="fp8", keep_h="bf16") == kept()


# ---- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp8", "fp8_keeps_bf16"])
@pytest.mark.parametrize(("d", "n"), [(D, N), (192, 64)])
def test_operators(precision, d, n):
    layer = fp8_layer(d, n, bias=True)
    tensors = (layer.x, layer.ids, None, layer.weights, None, layer.w_up, layer.w_down)
    options = (layer.b_up, layer.b_down, 0, 0, 0.0, 0.0, 0, PRECISION[precision])
    arguments = tuple(
        t.detach() if isinstance(t, torch.Tensor) else t for t in (*tensors, *options)
    )
    ops = torch.ops.sonicmoe_cpp
    weights = (None, layer.w_up.detach(), layer.w_down.detach(), 0, 0)
    opcheck(ops.quantize_weights, weights)
    codes = ops.quantize_weights(*weights)
    for quantised in (codes, None):
        opcheck(ops.moe_inference, (*arguments, quantised))
        opcheck(ops.moe_forward, (*tensors, *options, None, None, None, quantised))
        out, h, saved = ops.moe_forward(*arguments, None, None, None, quantised)
        needs = sum(NEEDS.values())
        backward = (torch.randn_like(out), *arguments, h, saved, needs)
        opcheck(ops.moe_backward, (*backward, quantised))
        main = (None, torch.zeros(layer.w_up.shape), torch.zeros(layer.w_down.shape))
        opcheck(ops.moe_backward_accumulate, (*backward, *main, quantised))


@pytest.mark.parametrize("quantised", [False, True])
def test_one_graph(quantised):
    def function(x, weights, layer):
        found = sonicmoe_cpp.quantize_weights(layer.w_up, layer.w_down) if quantised else None
        experts = (layer.w_up, layer.w_down)
        return sonicmoe_cpp.moe(x, layer.ids, weights, *experts, precision="fp8", fp8_weights=found)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed, tokens in enumerate((24, 61)):
        layer = Layer(tokens, D, N, E, K, seed=seed).to(BF16)
        results = []
        for run in (function, compiled):
            out = run(layer.x, layer.weights, layer)
            leaves = (layer.x, layer.weights, layer.w_up, layer.w_down)
            results.append((out, *torch.autograd.grad(out, leaves, layer.dout)))
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)


# ---- "auto" and refusals -------------------------------------------------------------------------


def test_auto_takes_the_faster_one(monkeypatch):
    layer = fp8_layer()
    plain, fp8 = layer.call(sonicmoe_cpp.moe), layer.call(with_options(precision="fp8"))
    # On the CPU, fp8 is never faster.
    assert torch.equal(layer.call(with_options(precision="auto")), plain)
    given = sonicmoe_cpp.quantize_weights(layer.w_up, layer.w_down)
    # Without given weights the call quantises them twice, so it needs twice as many rows.
    for weights, least in ((given, T * K), (None, T * K // 2)):
        for more, want in ((0, fp8), (1, plain)):
            rows = least + more
            monkeypatch.setattr(sonicmoe_cpp.fp8, "_auto_rows", lambda *_, rows=rows: rows)
            monkeypatch.setattr(sonicmoe_cpp._library, "_choices", 1000 + rows)
            call = with_options(precision="auto", fp8_weights=weights)
            assert torch.equal(layer.call(call), want), (weights is None, more)


def test_auto_in_a_graph():
    torch._dynamo.reset()
    layer = fp8_layer()

    def function(x):
        experts = (layer.w_up, layer.w_down)
        return sonicmoe_cpp.moe(x, layer.ids, layer.weights, *experts, precision="auto")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(layer.x), layer.call(sonicmoe_cpp.moe))


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"precision": "fp4"}, ValueError, "precision is 'fp4', must be None or one of: \"fp8\""),
        ({"keep_h": "bf16"}, ValueError, "keep_h is 'bf16', must be None: precision is None"),
        (
            {"precision": "fp8", "keep_h": "fp16"},
            ValueError,
            "keep_h is 'fp16', must be None or one of: \"bf16\"",
        ),
        (
            {"precision": "fp8", "fp8_weights": torch.zeros(4)},
            TypeError,
            "fp8_weights is Tensor, must be what quantize_weights",
        ),
    ],
)
def test_refusals(options, error, sentence):
    with pytest.raises(error, match=sentence):
        fp8_layer().call(with_options(**options))


def test_refusals_of_weights_dtypes_and_sizes():
    layer = fp8_layer()
    other = Layer(T, D, 2 * N, E, K).to(BF16)
    quantised = sonicmoe_cpp.quantize_weights(other.w_up, other.w_down)
    with pytest.raises(ValueError, match=r"fp8_weights are of \(E, G, n, d\) = \(5, 2, 256, 256\)"):
        layer.call(with_options(precision="fp8", fp8_weights=quantised))
    with pytest.raises(ValueError, match="fp8_weights is given, must be None"):
        other.call(with_options(fp8_weights=quantised))
    with pytest.raises(NotImplementedError, match="dtype is f16, must be bf16 for fp8"):
        layer.to(torch.float16).call(with_options(precision="fp8"))
    odd = Layer(T, D, 96, E, K).to(BF16)
    with pytest.raises(NotImplementedError, match="width is 96, must be a multiple of 64"):
        odd.call(with_options(precision="fp8"))
    with pytest.raises(NotImplementedError, match="width is 96, must be a multiple of 64"):
        sonicmoe_cpp.quantize_weights(odd.w_up, odd.w_down)
