"""precision="fp8" against the same formulas in plain torch, with the same quantisation points; the
object of quantised weights, the module's cache, graphs, checkpoints and refusals."""

import copy
import os

import pytest
import reference
import sonicmoe_cpp
import torch
from reference import Layer
from sonicmoe_cpp import _ops
from sonicmoe_cpp._names import PRECISION
from test_training import free_port
from torch import multiprocessing
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

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
    """v through e4m3 and back, in blocks of the last dimensions."""
    sizes = [
        s for size, b in zip(v.shape[-len(block) :], block, strict=True) for s in (size // b, b)
    ]
    blocks = v.float().reshape(*v.shape[: -len(block)], *sizes)
    inner = [blocks.dim() - 1 - 2 * i for i in range(len(block))]
    scale = scale_of(blocks.abs().amax(inner, keepdim=True))
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).reshape(v.shape)


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
    b_down = layer.b_down.detach().float() if biased else torch.zeros(E, D)
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


def fp8_layer(**options) -> Layer:
    return Layer(T, D, N, E, K, **options).to(BF16)


def with_options(**options):
    def function(*arguments, **others):
        return sonicmoe_cpp.moe(*arguments, **others, **options)

    return function


@pytest.mark.parametrize("keep_h", [None, "bf16"])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("activation", ["swiglu", "reglu", "swiglu_oai", "gelu", "relu2"])
def test_against_the_same_formulas(activation, layout, keep_h):
    layer = fp8_layer(activation=activation, gate_layout=layout, bias=True)
    got = layer.step(with_options(precision="fp8", keep_h=keep_h))
    exact = layer.to(torch.float32).step(reference.moe)
    for name, want in plain_step(layer, keep_h).items():
        close, far = reference.error(got[name], want), reference.error(exact[name], want)
        # A code that rounds the other way in one of the two is a small part of all codes.
        assert close < 0.008, (name, close)
        if name != "b_down":  # which nothing quantised goes into
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
    assert quantised.codes.shape == (_ops.fp8_weights_bytes(E, 2, N, D),)
    want = layer.step(with_options(precision="fp8"))
    for options in ({}, {"keep_h": "bf16"}):
        got = layer.step(with_options(precision="fp8", fp8_weights=quantised, **options))
        if not options:
            for name in want:
                assert torch.equal(got[name], want[name]), name
    # The codes are what is multiplied: the weights themselves are not read.
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
def test_operators(precision):
    layer = fp8_layer(bias=True)
    tensors = (layer.x, layer.ids, None, layer.weights, None, layer.w_up, layer.w_down)
    options = (layer.b_up, layer.b_down, 0, 0, 0.0, 0.0, 0, PRECISION[precision])
    arguments = tuple(
        t.detach() if isinstance(t, torch.Tensor) else t for t in (*tensors, *options)
    )
    ops = _ops.ops
    weights = (None, layer.w_up.detach(), layer.w_down.detach(), 0, 0)
    opcheck(ops.quantize_weights, weights)
    codes = ops.quantize_weights(*weights)
    for quantised in (codes, None):
        opcheck(ops.moe_inference, (*arguments, quantised))
        opcheck(ops.moe_forward, (*tensors, *options, None, None, None, quantised))
        out, h, saved = ops.moe_forward(*arguments, None, None, None, quantised)
        needs = sum(_ops.NEEDS.values())
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


# ---- the module ----------------------------------------------------------------------------------


def count_quantising(monkeypatch) -> list[int]:
    """How often modules have quantised, as a list of one number."""
    times = [0]
    original = sonicmoe_cpp.fp8.quantize_weights

    def counting(*arguments, **options):
        times[0] += 1
        return original(*arguments, **options)

    monkeypatch.setattr(sonicmoe_cpp.fp8, "quantize_weights", counting)
    return times


@pytest.fixture
def quantised_times(monkeypatch):
    return count_quantising(monkeypatch)


def module(**options):
    torch.manual_seed(0)
    options = {"precision": "fp8", "dtype": BF16} | options
    return sonicmoe_cpp.MoE(E, K, D, N, **options)


def batch(seed=0):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(seed)).to(BF16)


def test_module_is_the_function():
    moe = module(bias=True)
    x = batch()
    ids, weights = sonicmoe_cpp.route(moe.router(x), K)
    experts = (moe.w_up, moe.w_down)
    biases = {"b_up": moe.b_up, "b_down": moe.b_down}
    want = sonicmoe_cpp.moe(x, ids, weights, *experts, precision="fp8", **biases)
    assert torch.equal(moe(x)[0], want)
    assert "precision=fp8" in repr(moe)


def fresh_output(moe, x):
    moe.forget_fp8_weights()
    return moe(x)[0]


@pytest.mark.parametrize("kind", ["sgd", "adamw", "data"])
def test_weights_are_quantised_once_for_each_value(quantised_times, kind):
    moe = module()

    class OfData(torch.optim.Optimizer):
        """Writes to .data, which leaves versions as they are."""

        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad.data, alpha=-0.5)

    optimizers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
        "data": OfData,
    }
    optimizer = optimizers[kind](list(moe.parameters()))
    for step in range(1, 4):
        for micro in range(3):
            x = batch(10 * step + micro)
            out, _ = moe(x)
            out.float().square().mean().backward()
        assert quantised_times[0] == step
        optimizer.step()
        optimizer.zero_grad()
    x = batch()
    got = moe(x)[0]
    assert torch.equal(got, fresh_output(moe, x))


def test_the_cache_sees_every_change(quantised_times):
    moe, x = module(shared_experts=1), batch()
    other = module(shared_experts=1)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)

    def load():
        moe.load_state_dict(other.state_dict())

    def replace():
        moe.w_down = torch.nn.Parameter(moe.w_down.detach() * 2)

    @torch.no_grad()
    def write():
        moe.shared_up.mul_(0.5)

    def forget():
        moe.w_up.data.mul_(2)
        moe.forget_fp8_weights()

    moe(x)
    for change in (load, replace, write, forget, moe.reset_parameters):
        change()
        before = quantised_times[0]
        got = moe(x)[0]
        assert quantised_times[0] > before, change
        assert torch.equal(moe(x)[0], got)
        assert torch.equal(got, fresh_output(moe, x))


def test_copies_and_inference_mode():
    moe, x = module(), batch()
    with torch.inference_mode():
        want = moe(x)[0].clone()
    got, _ = moe(x)  # the copy of the weights made in inference mode can be saved
    assert torch.equal(got, want)
    got.sum().backward()
    other = copy.deepcopy(moe)
    with torch.no_grad():
        other.w_down.mul_(2)
    assert torch.equal(moe(x)[0], want) and not torch.equal(other(x)[0], want)


def test_autocast_quantises_what_it_casts():
    moe, x = module(dtype=torch.float32), batch().float()
    with torch.autocast("cpu", BF16):
        out = moe(x)[0]
        assert out.dtype == BF16
        moe.precision = None
        plain = moe(x)[0]
        moe.precision = "fp8"
        assert not torch.equal(out, plain)
    with pytest.raises(NotImplementedError, match="dtype is f32, must be bf16 for fp8"):
        moe(x)


def test_no_copy_is_kept_where_changes_cannot_be_seen(quantised_times, monkeypatch):
    """A capture is pretended here; test_cuda_fp8.py has real ones."""
    moe, x = module(), batch()
    want = moe(x)[0]
    assert quantised_times[0] == 1
    moe.w_up.ds_id = 0  # a parameter of DeepSpeed's ZeRO-3, whose .data is another one after a step
    assert torch.equal(moe(x)[0], want) and quantised_times[0] == 1
    del moe.w_up.ds_id
    cache, pretended = moe._fp8["experts"], torch.device("cuda")

    class Captured(torch.nn.Parameter):
        device = pretended

    weights = tuple(torch.nn.Parameter(w.detach()) for w in moe._weights())
    for w in weights:
        w.__class__ = Captured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not sonicmoe_cpp.fp8.is_cached(moe, weights, cache)
    monkeypatch.undo()
    assert cache.captured and cache._quantised is None
    with torch.no_grad():
        moe.w_up.data.mul_(2)  # as a replay would
    assert torch.equal(moe(x)[0], fresh_output(moe, x))


def test_checkpointing():
    moe, x = module(), batch().requires_grad_()
    results = []
    for recompute in (False, True):
        out = checkpoint(moe, x, use_reentrant=False)[0] if recompute else moe(x)[0]
        leaves = (x, moe.w_up, moe.w_down)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_compiled_module():
    torch._dynamo.reset()
    moe = module(bias=True, shared_experts=1)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed in range(2):
        x = batch(seed)
        grads = []
        for function in (moe, compiled):
            out, _ = function(x)
            grads.append((out, *torch.autograd.grad(out.float().square().sum(), moe.parameters())))
        for got, want in zip(*grads, strict=True):
            assert torch.equal(got, want)
        with torch.no_grad():
            moe.w_up.mul_(1.25)  # a graph quantises in every call


def sharded_rank(rank, port, results):
    """A rank under FSDP2: after every optimizer step, all micro-batches give what a module with
    the whole parameters gives."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    wrong = []
    times = count_quantising(pytest.MonkeyPatch())
    for reshards, shares in ((True, False), (False, False), (True, True)):
        sharded = torch.nn.Sequential(module(dtype=torch.float32))
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(sharded, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        if shares:
            sonicmoe_cpp.share_fp8_weights(sharded)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.05)
        for step in range(3):
            for micro in range(2):
                whole = module()
                for p, part in zip(whole.parameters(), sharded.parameters(), strict=True):
                    p.data.copy_(part.full_tensor())
                x = batch(100 * step + 10 * micro + rank)
                times[0] = 0
                out, _ = sharded(x)
                out.float().square().mean().backward()
                # Shared: anew after an optimizer's step and after the change below, at step 1.
                if times[0] != (shares and (micro == 0 or step == 1)):
                    wrong.append(f"quantised {times[0]} times")
                if not torch.equal(out, whole(x)[0]):
                    wrong.append((reshards, shares, step, micro))
                if shares and step != 1:
                    continue
                # Not by an optimizer: the version of a gathered parameter stays as it is, and
                # so may its address, so that no copy may be kept.
                for p in sharded.parameters():
                    p.data.to_local().mul_(1.25)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    if rank == 0:
        results.put(wrong)
    dist.destroy_process_group()
    os._exit(0)  # as test_training.leave()


@pytest.mark.slow
def test_under_fsdp2():
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(sharded_rank, (free_port(), results), nprocs=2)
    assert results.get() == []


# ---- "auto" and refusals -------------------------------------------------------------------------


def test_auto_takes_the_faster_one(monkeypatch):
    layer = fp8_layer()
    plain, fp8 = layer.call(sonicmoe_cpp.moe), layer.call(with_options(precision="fp8"))
    # On the CPU, fp8 is never faster.
    assert torch.equal(layer.call(with_options(precision="auto")), plain)
    moe = module(precision="auto")
    moe(batch())
    assert moe._fp8["experts"]._quantised is None
    for least, want in ((T * K, fp8), (T * K + 1, plain)):
        monkeypatch.setattr(sonicmoe_cpp.fp8, "_auto_rows", lambda *_, least=least: least)
        monkeypatch.setattr(sonicmoe_cpp._library, "_choices", 1000 + least)
        assert torch.equal(layer.call(with_options(precision="auto")), want)


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
    odd = Layer(T, D, 64, E, K).to(BF16)
    with pytest.raises(NotImplementedError, match="width is 64, must be a multiple of 128"):
        odd.call(with_options(precision="fp8"))
    with pytest.raises(NotImplementedError, match="width is 64, must be a multiple of 128"):
        sonicmoe_cpp.quantize_weights(odd.w_up, odd.w_down)


def test_low_rank_factors_are_refused():
    with pytest.raises(NotImplementedError, match='precision is "fp8", low-rank factors need'):
        module().add_lora(8, 16.0)


def test_expert_parallelism_is_refused():
    from sonicmoe_cpp.distributed import ExpertParallelMoE

    sentence = 'precision is "fp8", expert parallelism needs precision=None'
    with pytest.raises(NotImplementedError, match=sentence):
        ExpertParallelMoE(E, K, D, N, precision="fp8")
