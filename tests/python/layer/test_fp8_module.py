"""precision="fp8" of the module MoE: when it quantises its weights, FSDP2, graphs, checkpoints."""

import copy
import os
import weakref

import pytest
import sonicmoe_cpp
import torch
from test_fp8 import BF16, D, E, K, N, T
from torch import multiprocessing
from torch.utils.checkpoint import checkpoint
from worlds import free_port, leave


def count_quantising(monkeypatch) -> list[int]:
    """A list of one number: how often modules have quantised."""
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


class OfData(torch.optim.Optimizer):
    """An optimizer that writes to .data, which does not change a parameter's version."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad.data, alpha=-0.5)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "data"])
def test_weights_are_quantised_once_for_each_value(quantised_times, kind):
    moe = module()

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


@pytest.mark.parametrize("swap", [False, True])
def test_conversions_and_loading(quantised_times, swap):
    """DTensors and tensors of other subclasses are always swapped, others by this option."""
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        moe, x = module(shared_experts=1), batch()
        other = {name: 1.5 * value for name, value in moe.state_dict().items()}
        for change in (
            lambda: moe.load_state_dict(other),
            lambda: moe.double().to(BF16),
            lambda: moe.to("meta").to_empty(device="cpu").load_state_dict(other),
        ):
            moe(x)
            before = quantised_times[0]
            change()
            got = moe(x)[0].detach()  # without a graph, which would hold the parameters
            assert quantised_times[0] == before + 2
            assert torch.equal(got, fresh_output(moe, x))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_other_memory_at_the_same_address_is_noticed(quantised_times):
    moe, x = module(), batch()
    memory = bytearray(2 * moe.w_up.numel())

    def memory_of_its_own():
        return torch.frombuffer(memory, dtype=BF16).view(moe.w_up.shape)

    moe.w_up.data = memory_of_its_own().copy_(moe.w_up.detach())
    before = moe(x)[0].detach()
    times, version = quantised_times[0], moe.w_up._version
    memory_of_its_own().mul_(2)
    moe.w_up.data = memory_of_its_own()  # another storage, as Module.to() sets it
    assert moe.w_up._version == version
    got = moe(x)[0].detach()
    assert quantised_times[0] == times + 1
    assert torch.equal(got, fresh_output(moe, x)) and not torch.equal(got, before)


def test_replaced_parameters_are_freed():
    moe, x = module(), batch()
    moe(x)
    replaced = weakref.ref(moe.w_up)
    moe.w_up = torch.nn.Parameter(moe.w_up.detach().clone())
    moe.w_down.ds_id = 0  # the module may keep nothing from now on
    moe(x)
    assert replaced() is None


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
    rounded = copy.deepcopy(moe).to(BF16)
    assert out.dtype == BF16 and torch.equal(out, rounded(x.to(BF16))[0])
    rounded.precision = None
    assert not torch.equal(out, rounded(x.to(BF16))[0])
    with pytest.raises(NotImplementedError, match="dtype is f32, must be bf16 for fp8"):
        moe(x)


def test_no_copy_is_kept_where_changes_cannot_be_seen(quantised_times, monkeypatch):
    """A capture is simulated here; test_cuda_fp8.py tests real ones."""
    moe, x = module(), batch()
    want = moe(x)[0]
    assert quantised_times[0] == 1
    moe.w_up.ds_id = 0  # marks a parameter of DeepSpeed's ZeRO-3, which replaces .data
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
        moe.w_up.data.mul_(2)  # as a replay may
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
                # With shared weights: again after the optimizer's step and after the change below
                # in step 1.
                if times[0] != (shares and (micro == 0 or step == 1)):
                    wrong.append(f"quantised {times[0]} times")
                if not torch.equal(out, whole(x)[0]):
                    wrong.append((reshards, shares, step, micro))
                if shares and step != 1:
                    continue
                # A change without an optimizer: the gathered parameter keeps its version and may
                # keep its address, so the module may keep no copy.
                for p in sharded.parameters():
                    p.data.to_local().mul_(1.25)
            optimizer.step()
            optimizer.zero_grad()
    results.put(wrong)
    leave()


@pytest.mark.slow
def test_under_fsdp2():
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(sharded_rank, (free_port(), results), nprocs=2)
    assert [results.get() for _ in range(2)] == [[], []]


def test_low_rank_factors():
    """Factors add to the fp8 products: nothing while B is zero."""
    moe, x = module(), batch()
    plain = moe(x)[0]
    moe.add_lora(8, 16.0)
    out = moe(x)[0]
    assert torch.equal(out, plain)
    out.float().square().mean().backward()
    assert moe.w_up.grad is None and moe.lora.up_b.grad.abs().sum() > 0
    with torch.no_grad():
        moe.lora.up_b.copy_(moe.lora.up_b.grad)
    assert not torch.equal(moe(x)[0], plain)


def test_auto_quantises_nothing_where_it_takes_bf16():
    moe = module(precision="auto")
    moe(batch())
    assert moe._fp8["experts"]._quantised is None
