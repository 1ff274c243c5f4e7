"""Two GPUs: work on the one that is not current, and training on two ranks over NCCL."""

import copy
import os

import pytest
import sonicmoe_cpp
import torch
import torch.distributed as dist
from cuda_support import needs_cuda
from torch import multiprocessing
from worlds import leave

pytestmark = [
    needs_cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
E, K, D, N, T = 16, 4, 64, 32, 512
SPLITS = {"even": (256, 256), "uneven": (300, 212), "one without tokens": (512, 0)}


def build(device, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    return sonicmoe_cpp.MoE(E, K, D, N, bias=True, **options).to(device, dtype)


def tokens(device, dtype=torch.bfloat16):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def gradients(module, x):
    """The loss, a sum over tokens, and every parameter's gradient."""
    module.zero_grad(set_to_none=True)
    out, _ = module(x)
    loss = out.float().square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters())]


def assert_equal(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got.cpu(), want.cpu())


@pytest.fixture
def first_is_current():
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0
    for device in (1, 0):  # setting a stream makes its device the current one
        torch.cuda.set_stream(torch.cuda.default_stream(device))


@pytest.mark.parametrize("options", [{}, {"routing": "token_rounding", "tile": 16}], ids=str)
def test_a_device_that_is_not_current(first_is_current, options):
    found = [gradients(build(d, **options), tokens(d)) for d in ("cuda:1", "cuda:0")]
    assert all(t.device.index == 1 for t in found[0])
    assert_equal(*found)


def test_routing_on_a_device_that_is_not_current(first_is_current):
    def results(device):
        logits = tokens(device, torch.float32)[:, :E].requires_grad_()
        pairs = sonicmoe_cpp.token_round(logits, K, tile=16)
        chosen = sonicmoe_cpp.expert_choice(logits, 100)
        (pairs.weight.sum() + chosen.weight.sum()).backward()
        return *pairs, *chosen, logits.grad

    assert_equal(results("cuda:1"), results("cuda:0"))


def test_the_current_stream_of_a_device_that_is_not_current(first_is_current):
    """The input is written late on that stream: work on another stream would read it too early."""
    module, x = build("cuda:1"), tokens("cuda:1")
    want = gradients(module, x)
    late = torch.zeros_like(x)
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(1)
    torch.cuda.set_stream(side)
    torch.cuda._sleep(10**8)
    torch.cuda.set_device(0)
    assert torch.cuda.current_stream(1) == side
    late.copy_(x)
    got = gradients(module, late)
    side.synchronize()
    assert_equal(got, want)


def test_mixed_devices_are_refused(first_is_current):
    module, x = build("cuda:1"), tokens("cuda:0")
    ids, weights = sonicmoe_cpp.route(x[:, :E], K)
    with pytest.raises(ValueError, match="on cuda:1, must be on x's device cuda:0"):
        sonicmoe_cpp.moe(x, ids, weights, module.w_up, module.w_down)
    with pytest.raises(ValueError, match="topk_ids is on cuda:0, must be on x's device cuda:1"):
        sonicmoe_cpp.moe(x.to("cuda:1"), ids, weights, module.w_up, module.w_down)


def sharded_gradients(part, device):
    """FSDP2 with fp32 parameters: bf16 in the layer, fp32 in the reduction."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = build(device, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(module, mesh=init_device_mesh("cuda", (2,)), mp_policy=policy)
    loss, *found = gradients(module, part.float())
    return loss, [g.full_tensor() for g in found]


def replicated_gradients(part, device):
    module = torch.nn.parallel.DistributedDataParallel(build(device), device_ids=[device])
    loss, *found = gradients(module, part)
    return loss, found


WAYS = {"fsdp2": sharded_gradients, "ddp": replicated_gradients}


def worker(rank, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for split, sizes in SPLITS.items():
        part = tokens(rank).split(sizes)[rank]
        for way, gradients_by in WAYS.items():
            loss, found = gradients_by(part, rank)
            dist.all_reduce(loss)
            results[way, split] = [loss.cpu(), *(g.cpu() for g in found)]
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    leave()


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    multiprocessing.spawn(worker, (str(folder),), nprocs=2)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_as_one_process(of_two_ranks, way, split):
    """The ranks average their gradients, but the loss is a sum: they have half of one process's
    gradients."""
    loss, *found = of_two_ranks[way, split]
    parts = [gradients(copy.deepcopy(build(0)), p) for p in tokens(0).split(SPLITS[split])]
    torch.testing.assert_close(loss, sum(p[0] for p in parts).cpu(), rtol=1e-6, atol=0)
    # DDP reduces in bf16, FSDP2 in fp32.
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if way == "ddp" else {"rtol": 1e-5, "atol": 1e-6}
    for got, *of_ranks in zip(found, *(p[1:] for p in parts), strict=True):
        torch.testing.assert_close(
            2 * got.float(), sum(g.float() for g in of_ranks).cpu(), **tolerance
        )
    whole = gradients(build(0), tokens(0))
    torch.testing.assert_close(loss, whole[0].cpu(), rtol=1e-5, atol=0)
    for got, want in zip(found, whole[1:], strict=True):
        error = (2 * got.float() - want.float().cpu()).norm() / want.float().norm().cpu()
        assert error < 1e-2
