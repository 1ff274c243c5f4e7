"""The layer in training on a GPU: no waits of the host, graphs, compilation, streams, FSDP2."""

import copy
import time

import pytest
import sonicmoe_cpp
import torch
from cuda_support import needs_cuda
from reference import Layer
from torch.utils.checkpoint import checkpoint

pytestmark = [needs_cuda, pytest.mark.usefixtures("each_engine")]
E, K, D, N = 16, 4, 64, 32
ROUNDED = {"routing": "token_rounding", "tile": 16}
OPTIONS = {
    "top-k": {},
    "rounded": ROUNDED,
    "sigmoid": {"score": "sigmoid", "renormalize": True},
    "expert choice": {"routing": "expert_choice"},
    "shared": {"shared_experts": 2, "router_dtype": torch.float32},
    "balanced": {"score": "sigmoid", "selection_bias": True},
}


def build(dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    return sonicmoe_cpp.MoE(E, K, D, N, lb_coef=0.1, z_coef=0.01, **options).to("cuda", dtype)


def rows(tokens, dtype=torch.bfloat16, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, D, generator=g).to("cuda", dtype)


def gradients(module, x, wrap=lambda function, x: function(x)):
    """Bits of the output and of every gradient; wrap calls the function that gives (out, loss)."""

    def out_and_loss(x):
        out, aux = module(x)
        return out, aux.loss

    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out, loss = wrap(out_and_loss, x)
    (out.float().square().mean() + loss).backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_equal(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


@pytest.fixture
def waiting_raises():
    """A function after whose call any operator of torch that waits for the device raises."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_waits_for_the_device(options, waiting_raises):
    module, x = build(bias=True, **options), rows(500)

    def steps():
        for tokens in (500, 128, 0):
            gradients(module, x[:tokens])
        with torch.no_grad():
            module(x)

    steps()
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * 10**9)  # about a second: a wait of the host shows in the time
    waiting_raises()
    steps()
    assert not torch.cuda.current_stream().query()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_captured_training_step_follows_its_routing(options):
    module = build(bias=True, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    eager = copy.deepcopy(module)
    eager_optimizer = torch.optim.SGD(eager.parameters(), lr=0.05)
    batches = [rows(300, seed=seed) for seed in range(6)]
    batches[3] = torch.zeros_like(batches[3])  # every token ties: all go to the first experts
    x = batches[0].clone()

    def step(module, optimizer, x):
        out, aux = module(x)
        loss = (out - x).float().square().mean() + aux.loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = copy.deepcopy(module.state_dict())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(module, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(module, optimizer, x)
    module.load_state_dict(before)
    for batch in batches:
        x.copy_(batch)
        graph.replay()
        want = step(eager, eager_optimizer, batch)
        assert torch.equal(loss, want)
    assert_equal(module.parameters(), eager.parameters())


def test_expert_choice_waits_for_nothing_and_can_be_captured(waiting_raises):
    """A replay routes by its current logits, not by those of the capture."""
    module, x = build(), rows(320)
    weights = [w.detach().requires_grad_() for w in (module.w_up, module.w_down)]
    draws = [torch.randn(320, E, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    logits = draws[0].cuda().requires_grad_()

    def step(logits):
        out = chosen(x, logits, *weights)
        return out, *torch.autograd.grad(out.float().square().sum(), (logits, *weights))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(logits)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    waiting_raises()
    step(logits)
    assert not torch.cuda.current_stream().query()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(logits)
    for draw in draws:
        with torch.no_grad():
            logits.copy_(draw)
        graph.replay()
        assert_equal(captured, step(logits))


def topk(x, logits, w_up, w_down):
    ids, weights = sonicmoe_cpp.route(logits, K)
    return sonicmoe_cpp.moe(x, ids, weights, w_up, w_down)


def rounded(x, logits, w_up, w_down):
    pairs = sonicmoe_cpp.token_round(logits, K, tile=16, mode="balanced")
    return sonicmoe_cpp.moe_pairs(x, pairs, w_up, w_down)


def grouped(x, logits, w_up, w_down):
    offsets = torch.arange(E + 1, device=x.device) * (x.shape[0] // E)
    row_weights = logits.sigmoid()[:, 0]
    return sonicmoe_cpp.moe_grouped(x, offsets, w_up, w_down, row_weights=row_weights)


def chosen(x, logits, w_up, w_down):
    pairs = sonicmoe_cpp.expert_choice(logits, x.shape[0] * K // E)
    return sonicmoe_cpp.moe_pairs(x, pairs, w_up, w_down)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [topk, rounded, grouped, chosen])
def test_one_graph_for_every_number_of_tokens(function, backend):
    torch._dynamo.reset()
    module = build()
    weights = module.w_up, module.w_down
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (240, 300, 1000, 130):
            g = torch.Generator().manual_seed(tokens)
            logits = torch.randn(tokens, E, generator=g).cuda().requires_grad_()
            x = rows(tokens).requires_grad_()
            results = []
            for f in (compiled, function):
                out = f(x, logits, *weights)
                loss = out.float().square().sum()
                results.append((out, *torch.autograd.grad(loss, (x, logits, *weights))))
            for got, want in zip(*results, strict=True):
                torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_compiled_code_becomes_cuda_graphs():
    """No operator of forward or backward makes torch fall back from CUDA graphs."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    module = build()
    compiled = torch.compile(topk, fullgraph=True, mode="reduce-overhead")
    logits = torch.randn(240, E, generator=torch.Generator().manual_seed(2)).cuda()
    leaves = [rows(240).requires_grad_(), logits.requires_grad_(), module.w_up, module.w_down]
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        results = []
        for function in (compiled, topk):
            out = function(*leaves)
            grads = torch.autograd.grad(out.float().square().sum(), leaves)
            results.append([t.detach().clone() for t in (out, *grads)])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("routing", ["topk", "token_rounding"])
def test_the_module_compiles(routing):
    torch._dynamo.reset()
    module = build(routing=routing, tile=16, bias=True)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (240, 400, 570):
            found, want = gradients(compiled, rows(tokens)), gradients(module, rows(tokens))
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_checkpointing_recomputes_the_same_bits(rounding, reentrant):
    module, x = build(bias=True, rounding=rounding, **ROUNDED), rows(333)
    torch.manual_seed(7)
    plain = gradients(module, x)
    torch.manual_seed(7)
    again = gradients(module, x, lambda f, x: checkpoint(f, x, use_reentrant=reentrant))
    assert_equal(again, plain)


def test_autocast():
    host = Layer(140, 72, 56, 6, 2, torch.float32, bias=True)
    layer, half = host.to(torch.float32, "cuda"), host.to(torch.bfloat16, "cuda")
    want = half.step(sonicmoe_cpp.moe)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = layer.call(sonicmoe_cpp.moe)
    assert out.dtype == torch.bfloat16 and torch.equal(out, want["out"])
    leaves = layer.leaves()
    grads = torch.autograd.grad(out, list(leaves.values()), half.dout)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        assert grad.dtype == leaf.dtype == torch.float32
        assert torch.equal(grad, want[name].float()), name


def test_autocast_of_the_module():
    module = build(torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out, aux = module(rows(140, torch.float32))
    (out.float().sum() + aux.loss).backward()
    assert out.dtype == torch.bfloat16 and aux.loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_work_is_queued_on_the_current_stream(options):
    """The inputs are written late on the current stream: work on another stream would read them too
    early."""
    module, x = build(**options), rows(300)
    want = gradients(module, x)
    late = torch.zeros_like(x)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        late.copy_(x)
        got = gradients(module, late)
    side.synchronize()
    assert_equal(got, want)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_captured_module_shows_nan_and_takes_padding(options):
    """A replay finds another mask and a NaN that the capture did not have."""
    module, x = build(**options), rows(300)
    mask = torch.zeros(300, dtype=torch.bool, device="cuda")
    module.eval()
    with torch.no_grad():
        module(x, padding_mask=mask)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, aux = module(x, padding_mask=mask)
        mask[40:60] = True
        x[7] = torch.nan
        graph.replay()
        broken = out.isnan().all(1).nonzero().flatten().tolist()
        assert broken == [7] and aux.loss.isnan()
        assert (out[40:60] == 0).all() and out[:7].isfinite().all()
        x[7] = 0
        graph.replay()
        want, losses = module(x, padding_mask=mask)
    assert torch.equal(out, want) and torch.equal(aux.loss, losses.loss)


def test_state_dicts_travel():
    module = build(torch.float32, bias=True)
    host = sonicmoe_cpp.MoE(E, K, D, N, bias=True)
    host.load_state_dict(module.state_dict())
    back = build(torch.float32, bias=True)
    back.load_state_dict(host.state_dict())
    assert_equal(back.parameters(), module.parameters())


def test_memory():
    """Forward keeps H and metadata, inference only its output. Frozen weights get no gradient."""
    tokens, hidden, width, experts, k = 4096, 256, 512, 32, 8
    layer = Layer(tokens, hidden, width, experts, k, torch.bfloat16).to(torch.bfloat16, "cuda")
    layer.call(sonicmoe_cpp.moe)
    torch.cuda.synchronize()

    def kept(function):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        after = torch.cuda.memory_allocated() - before
        del result
        return after, torch.cuda.max_memory_allocated() - before

    out = 2 * tokens * hidden
    h = 2 * 2 * tokens * k * width
    metadata = 20 * tokens * k + 16 * tokens + 1024 * experts
    now, peak = kept(lambda: layer.call(sonicmoe_cpp.moe))
    assert 0 <= now - (out + h + metadata) < 4096
    with torch.no_grad():
        now, inference_peak = kept(lambda: layer.call(sonicmoe_cpp.moe))
    assert 0 <= now - out < 4096
    assert peak - inference_peak > 0.9 * h

    def backward():
        return layer.call(sonicmoe_cpp.moe).backward(layer.dout)

    layer.w_up.requires_grad_(False)
    layer.w_down.requires_grad_(False)
    now, _ = kept(backward)
    assert layer.w_up.grad is None and layer.w_down.grad is None
    assert now < out + 4 * tokens * k + 4096


def test_the_second_call_is_as_fast_as_the_hundredth():
    module, x = build(), rows(1024)
    torch.cuda.synchronize()
    seconds = []
    for _ in range(100):
        began = time.perf_counter()
        gradients(module, x)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    late = sorted(seconds[50:])[25]
    assert seconds[1] < 4 * late, (seconds[:4], late)


def test_fsdp2_with_mixed_precision(tmp_path):
    """On one process, the sharded module trains as the plain module with the same casts."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        plain = build(torch.float32, bias=True)
        sharded = copy.deepcopy(plain)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(sharded, mesh=init_device_mesh("cuda", (1,)), mp_policy=policy)
        for tokens in (300, 0, 77):
            x = rows(tokens, torch.float32)
            out, aux = sharded(x)
            (out.float().square().sum() + aux.loss).backward()
            half = copy.deepcopy(plain).bfloat16()
            same, half_aux = half(x.bfloat16())
            (same.float().square().sum() + half_aux.loss).backward()
            assert torch.equal(out.to(same.dtype), same)
            for p, q in zip(sharded.parameters(), half.parameters(), strict=True):
                grad = p.grad.to_local()
                assert grad.dtype == torch.float32
                torch.testing.assert_close(grad, q.grad.float(), rtol=1e-2, atol=1e-3)
            sharded.zero_grad(set_to_none=True)
    finally:
        dist.destroy_process_group()
