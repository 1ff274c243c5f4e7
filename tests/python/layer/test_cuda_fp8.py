"""precision="fp8" on CUDA: against the same formulas in plain torch and against the CPU, in graphs,
and on several streams."""

import math

import pytest
import reference
import sonicmoe_cpp
import torch
from cuda_support import needs_cuda
from reference import Layer
from test_fp8 import BF16, D, E, K, N, fp8_layer, plain_step, with_options
from test_fp8_module import batch, module


def problem() -> str | None:
    """Why the GPU's default engine cannot compute in fp8, or None."""
    if sonicmoe_cpp.unsupported_reason("cuda") is not None:
        return None  # needs_cuda gives the reason
    layer = fp8_layer().to(BF16, "cuda")
    try:
        layer.call(with_options(precision="fp8"))
    except NotImplementedError as error:
        if "engine hopper" in sonicmoe_cpp.show_config():
            raise  # this engine has fp8
        return str(error)
    return None


REASON = problem()
pytestmark = [
    needs_cuda,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("poisoned"),
]


@pytest.mark.parametrize("keep_h", [None, "bf16"])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_against_the_same_formulas(activation, layout, keep_h):
    layer = fp8_layer(activation=activation, gate_layout=layout, bias=True)
    got = layer.to(BF16, "cuda").step(with_options(precision="fp8", keep_h=keep_h))
    for name, want in plain_step(layer, keep_h).items():
        assert reference.error(got[name].cpu(), want) < 0.012, name


def test_codes_of_the_weights_are_those_of_the_cpu():
    layer = fp8_layer()
    experts = [sonicmoe_cpp.quantize_weights(x.w_up, x.w_down).codes.cpu()
               for x in (layer, layer.to(BF16, "cuda"))]  # fmt: skip
    # The codes of both orientations of the weights; the scales, which follow them, contain padding.
    codes = E * 2 * (2 * N * D) + E * 2 * (N * D)
    assert torch.equal(*(e[:codes] for e in experts))


def test_the_same_bits_on_every_run():
    layer = fp8_layer(bias=True).to(BF16, "cuda")
    first, second = (layer.step(with_options(precision="fp8")) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name
    for keep_h in (None, "bf16"):
        assert torch.equal(layer.call(with_options(precision="fp8", keep_h=keep_h)), first["out"])


def test_a_graph_quantises_what_it_finds():
    """A replay quantises the weights that it finds; the module keeps no copy after a capture."""
    moe, x = module().cuda(), batch().cuda()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            moe(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = moe(x)
        for _ in range(2):
            for weight in (moe.w_up, moe.w_down):
                weight.data.mul_(1.5)
            graph.replay()
            assert torch.equal(out, moe(x)[0])


def test_another_stream_makes_a_copy_of_its_own():
    moe, x = module().cuda(), batch().cuda()
    want = moe(x)[0]
    first = moe._fp8["experts"]._quantised
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = moe(x)[0]
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    assert moe._fp8["experts"]._quantised is not first


def test_auto_takes_fp8_for_large_layers(monkeypatch):
    sizes = {"hidden_size": 2048, "intermediate_size": 1024, "num_experts": 4, "top_k": 2}
    moe = sonicmoe_cpp.MoE(**sizes, precision="auto", dtype=BF16, device="cuda")
    # As on a device where fp8 is faster, and on another one. The choice is remembered for a shape,
    # so the second one gets a shape of its own.
    for least, large in ((4 * 128, 8192), (math.inf, 4096)):
        monkeypatch.setattr(sonicmoe_cpp.fp8, "_auto_rows", lambda *_, least=least: least)
        for tokens in (16, large):
            moe.forget_fp8_weights()
            moe(torch.randn(tokens, 2048, dtype=BF16, device="cuda"))
            took = moe._fp8["experts"]._quantised is not None
            assert took == (2 * tokens >= least), (tokens, least)


def test_no_call_waits_for_the_device():
    moe, x = module().cuda(), batch().cuda().requires_grad_()
    moe(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe(x)[0].float().square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sizes_of_large_layers():
    layer = Layer(1000, 1024, 512, 8, 4, bias=True).to(BF16)
    exact = layer.to(torch.float32, "cuda").step(reference.moe)
    results = [x.step(with_options(precision="fp8")) for x in (layer, layer.to(BF16, "cuda"))]
    for name, want in exact.items():
        cpu, cuda = (reference.error(r[name].cpu(), want.cpu()) for r in results)
        assert cuda < 1.1 * cpu + 1e-3, (name, cuda, cpu)


@pytest.mark.parametrize("keep_h", [None, "bf16"])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("width", [N, N + 64])
@pytest.mark.parametrize("rank", [1, 16, 72])
def test_low_rank_factors(rank, width, layout, keep_h):
    """Output and gradients as on the CPU, with factors in fp32, also with a last block of 64."""
    g = torch.Generator().manual_seed(rank)
    tokens = 200

    def normal(*size, std=1.0, dtype=BF16):
        return (torch.randn(size, generator=g) * std).to(dtype)

    x, dout = normal(tokens, D), normal(tokens, D)
    ids, scores = torch.randint(0, E, (tokens, K), generator=g), torch.rand(tokens, K, generator=g)
    w_up, w_down = normal(E, 2 * width, D, std=D**-0.5), normal(E, D, width, std=width**-0.5)
    shapes = ((E, rank, D), (E, 2 * width, rank), (E, rank, width), (E, D, rank))
    factors = [normal(*s, std=s[2] ** -0.5, dtype=torch.float32) for s in shapes]

    def step(device):
        leaves = [t.to(device).requires_grad_() for t in (x, scores, *factors)]
        up, down = (sonicmoe_cpp.LowRank(*leaves[i : i + 2], 0.5) for i in (2, 4))
        style = {"gate_layout": layout, "precision": "fp8", "keep_h": keep_h}
        experts = (w_up.to(device), w_down.to(device))
        routing = (ids.to(device), leaves[1])
        out = sonicmoe_cpp.lora_moe(leaves[0], *routing, *experts, up=up, down=down, **style)
        return out, *torch.autograd.grad(out, leaves, dout.to(device))

    for i, (got, want) in enumerate(zip(step("cuda"), step("cpu"), strict=True)):
        assert got.dtype == want.dtype
        assert reference.error(got.cpu(), want) < 0.012, i


def test_a_layer_with_factors():
    """MoE with add_lora: the same bits again, compiled and in a graph; it learns."""
    moe, x = module().cuda(), batch().cuda()
    frozen = moe(x)[0]
    moe.add_lora(16, 16.0)
    assert torch.equal(moe(x)[0], frozen)  # B is zero
    with torch.no_grad():
        for b in (moe.lora.up_b, moe.lora.down_b):
            b.normal_(std=0.1)
    parameters = list(moe.lora.parameters())

    def step(function):
        out = function(x)[0]
        return out, *torch.autograd.grad(out.float().square().sum(), parameters)

    first = step(moe)
    assert reference.error(first[0], frozen) > 0.01
    assert all(torch.equal(a, b) for a, b in zip(step(moe), first, strict=True))
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(step(compiled), first, strict=True))
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            moe(x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            out, _ = moe(x)
        graph.replay()
    assert torch.equal(out, first[0])
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = moe(x)[0].float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
