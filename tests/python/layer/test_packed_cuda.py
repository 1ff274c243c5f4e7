"""Packed weights on a GPU: large tensors, streams, CUDA graphs, waits, memory. test_packed.py runs
the bit contract on the GPU too."""

import dataclasses
import threading

import cuda_support
import packed_support
import pytest
import sonicmoe_cpp
import torch
from packed_support import FORMATS, Problem, make, same_bits
from sonicmoe_cpp import packed

pytestmark = [cuda_support.needs_cuda, pytest.mark.usefixtures("poisoned")]
each_engine = pytest.mark.usefixtures("each_engine")


@pytest.fixture(autouse=True)
def no_buffers():
    packed.release_buffers()
    yield
    packed.release_buffers()


def unpacked(weights):
    return [w.unpack() for w in weights]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", packed_support.DTYPES)
@pytest.mark.parametrize("shape", ((12, 1536, 512), (3, 200, 2880), (1, 8, 64)))
def test_cuda_unpacks_the_bits_of_the_cpu(format, dtype, shape):
    """The largest shape has more chunks than the grid has blocks, up to 192 multiprocessors."""
    weights = make(format, shape, dtype)
    assert torch.equal(weights.to("cuda").unpack().cpu(), weights.unpack())


def test_cuda_unpacks_every_scale_of_mxfp4():
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255 * 16)[: 255 * 16 * 16]
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(1, 255, 16)
    for dtype in packed_support.DTYPES:
        weights = packed.from_mxfp4(blocks.reshape(1, 255, 16, 16), scales, dtype=dtype)
        assert torch.equal(weights.to("cuda").unpack().cpu(), weights.unpack())


def test_cuda_refuses_what_it_cannot_address():
    weights = make("fp8_blocks", (1, 8, 24)).to("cuda")
    with pytest.raises(
        NotImplementedError, match="columns is 24, must be a multiple of 16 on CUDA"
    ):
        weights.unpack()
    weights = make("nf4", (1, 8, 64)).to("cuda")
    out = torch.empty(1 * 8 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(1, 8, 64)
    with pytest.raises(NotImplementedError, match="out must be aligned to 16 bytes on CUDA"):
        weights.unpack(out)


@each_engine
def test_cuda_calls_do_not_wait():
    problem = Problem("cuda")
    weights = problem.weights("nf4_nested")
    problem.run("ids", *weights, lora=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run("ids", *weights, lora=True)
        weights[0].unpack()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_engine
@pytest.mark.parametrize("lora", (False, True), ids=("frozen", "lora"))
def test_cuda_graph_unpacks_in_every_replay(lora):
    problem = Problem("cuda")
    weights, other = problem.weights("nf4"), problem.weights("mxfp4")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        problem.run("ids", *weights, lora=lora)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = problem.run("ids", *weights, lora=lora)
    for _ in range(2):
        problem.run("ids", *other, lora=lora)  # overwrites the buffers outside of the graph
        packed.release_buffers()
        for w in weights:
            w.scales.mul_(2.0)  # a replay reads the scales of its time
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(got, problem.run("ids", *unpacked(weights), lora=lora))


def test_cuda_reduce_overhead():
    problem = Problem("cuda")
    weights = problem.weights("nf4_nested")
    expected = problem.run("ids", *unpacked(weights), lora=True)

    def wrap(call):
        return torch.compile(call, mode="reduce-overhead", fullgraph=True)

    for _ in range(4):  # warm-up, capture, replays
        torch.compiler.cudagraph_mark_step_begin()
        assert same_bits(problem.run("ids", *weights, lora=True, wrap=wrap), expected)


@each_engine
def test_cuda_streams_and_threads():
    problems = [Problem("cuda", seed=seed) for seed in range(4)]
    weights = [p.weights(format) for p, format in zip(problems, FORMATS, strict=True)]
    expected = [
        p.run("ids", *unpacked(w), lora=True) for p, w in zip(problems, weights, strict=True)
    ]
    torch.cuda.synchronize()
    wrong = []

    def work(i, stream):
        with torch.cuda.stream(stream):
            for _ in range(20):
                if not same_bits(problems[i].run("ids", *weights[i], lora=True), expected[i]):
                    wrong.append(i)

    shared = torch.cuda.Stream()
    for streams in ([torch.cuda.Stream() for _ in problems], [shared] * len(problems)):
        threads = [threading.Thread(target=work, args=each) for each in enumerate(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert not wrong


@each_engine
def test_cuda_layers_share_two_buffers():
    problem = Problem("cuda", sizes=(64, 512, 512, 16, 2))
    layers = [problem.weights(format) for format in FORMATS]
    size = sum(w.shape.numel() * 2 for w in layers[0])
    x = problem.x.clone().requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = x
    for weights in layers * 2:
        out = sonicmoe_cpp.moe(out, problem.ids, problem.scores, *weights).tanh()
    out.sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * size
    packed.release_buffers()


@pytest.fixture
def limit():
    yield packed.limit_buffers
    packed.limit_buffers(None)


@each_engine
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("order", ("K", "MN"))
@pytest.mark.parametrize("lora", (False, True), ids=("frozen", "lora"))
@pytest.mark.parametrize("form", ("ids", "pairs", "grouped"))
def test_cuda_unpacks_a_few_experts_at_a_time(limit, format, order, lora, form):
    """7 experts of 96 and 48 KiB: one at a time, 2 and 5, 5 and 7."""
    problem = Problem("cuda", sizes=(300, 192, 128, 7, 2))
    weights = problem.weights(format, order)
    options = {"biases": True, "lora": lora}
    expected = problem.run(form, *unpacked(weights), **options)
    for kib in (1, 240, 500):
        limit(kib * 1024)
        assert same_bits(problem.run(form, *weights, **options), expected)
    w_up, w_down = weights
    rolled = w_down.codes.view(torch.uint8).roll(1, 0).view(w_down.codes.dtype)
    wrong = w_up, dataclasses.replace(w_down, codes=rolled)  # the next expert's
    assert not same_bits(problem.run(form, *wrong, **options), expected)


@each_engine
def test_cuda_gpt_oss_style_a_few_experts_at_a_time(limit):
    problem = Problem("cuda", sizes=(300, 192, 128, 7, 2))
    weights = problem.weights("mxfp4")
    options = {"activation": "swiglu_oai", "gate_layout": "interleaved", "lora": True}
    expected = problem.run("ids", *unpacked(weights), biases=True, **options)
    limit(200 * 1024)
    assert same_bits(problem.run("ids", *weights, biases=True, **options), expected)


@each_engine
def test_cuda_graph_of_a_few_experts_at_a_time(limit):
    problem = Problem("cuda")
    weights = problem.weights("nf4_nested")
    expected = problem.run("ids", *unpacked(weights), lora=True)
    limit(1)
    problem.run("ids", *weights, lora=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = problem.run("ids", *weights, lora=True)
    packed.release_buffers()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(got, expected)


@each_engine
def test_cuda_memory_under_a_limit(limit):
    problem = Problem("cuda", sizes=(64, 512, 512, 16, 2))
    weights = problem.weights("nf4")
    limit(1 << 20)  # of 24 MiB
    problem.run("ids", *weights, lora=True)
    packed.release_buffers()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    problem.run("ids", *weights, lora=True)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 12 << 20


def test_cuda_moves_a_module():
    module = sonicmoe_cpp.MoE(4, 2, 128, 64, dtype=torch.bfloat16)
    module.pack("nf4", nested=True)
    codes = module.w_up.codes.clone()
    module.cuda()
    assert module.w_up().device.type == "cuda" and torch.equal(module.w_up.codes.cpu(), codes)
    x = torch.randn(16, 128, device="cuda", dtype=torch.bfloat16)
    module(x)[0].sum().backward()
