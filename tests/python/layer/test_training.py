"""The layer in training loops: checkpointing, autocast, memory, FSDP2."""

import os

import pytest
import sonicmoe_cpp
import torch
import torch.multiprocessing as multiprocessing
from reference import Layer
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from worlds import free_port, leave


def gradients(module, x, wrap=lambda function, x: function(x)):
    """Bits of the output and of every gradient; wrap calls the function that gives (out, loss)."""

    def out_and_loss(x):
        out, aux = module(x)
        return out, aux.loss

    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out, loss = wrap(out_and_loss, x)
    (out.square().sum() + loss).backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_checkpointing_recomputes_the_same_bits(rounding, reentrant):
    torch.manual_seed(0)
    options = {"routing": "token_rounding", "tile": 8, "rounding": rounding, "lb_coef": 0.1}
    module = sonicmoe_cpp.MoE(6, 2, 32, 24, bias=True, **options).bfloat16()
    x = torch.randn(4, 20, 32).bfloat16()
    torch.manual_seed(7)
    plain = gradients(module, x)
    torch.manual_seed(7)
    again = gradients(module, x, lambda f, x: checkpoint(f, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_stochastic_rounding_advances_and_repeats():
    torch.manual_seed(0)
    options = {"routing": "token_rounding", "tile": 8, "rounding": "stochastic"}
    module = sonicmoe_cpp.MoE(16, 2, 8, 8, **options)
    x = torch.randn(100, 8)

    def run(seed):
        torch.manual_seed(seed)
        return [module(x)[0] for _ in range(4)]

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(first[0], later) for later in first[1:])
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def saved_bytes(function, *leaves):
    """Bytes that function's graph keeps, apart from the leaves themselves."""
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = function()
    for leaf in leaves:
        kept.pop(leaf.untyped_storage().data_ptr(), None)
    del out
    return sum(kept.values())


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("width", [16, 64])
def test_memory_kept_for_backward(width, activation):
    tokens, hidden, experts, k = 128, 32, 8, 4
    layer = Layer(tokens, hidden, width, experts, k, torch.bfloat16, activation=activation)
    leaves = [*layer.leaves().values(), layer.ids]
    kept = saved_bytes(lambda: layer.call(sonicmoe_cpp.moe), *leaves)
    gate = 2 if activation == "swiglu" else 1
    h = 2 * gate * tokens * k * width
    metadata = 20 * tokens * k + 16 * tokens + 1024 * experts
    assert kept == h + metadata


def test_nothing_is_kept_without_gradients():
    layer = Layer(64, 32, 16, 8, 4, torch.bfloat16)
    for leaf in layer.leaves().values():
        leaf.requires_grad_(False)
    assert saved_bytes(lambda: layer.call(sonicmoe_cpp.moe)) == 0


class Allocations(TorchDispatchMode):
    """Bytes of the largest tensor that each operator returned."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, torch.Tensor):
                name = str(function)
                self.largest[name] = max(self.largest.get(name, 0), t.nbytes)
        return result


def test_backward_makes_nothing_of_the_size_of_h():
    layer = Layer(128, 8, 64, 4, 4, torch.float32)
    out = layer.call(sonicmoe_cpp.moe)
    with Allocations() as made:
        torch.autograd.grad(out, list(layer.leaves().values()), layer.dout)
    assert "sonicmoe_cpp.moe_backward.default" in made.largest
    assert max(made.largest.values()) < 128 * 4 * 2 * 64 * 4, made.largest


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, _gradient):
        return None


def test_no_gradient_in_is_no_gradient_out():
    layer = Layer(16, 8, 8, 4, 2, torch.float32)
    out = Dropped.apply(layer.call(sonicmoe_cpp.moe))
    leaves = list(layer.leaves().values())
    assert torch.autograd.grad(out.sum(), leaves, allow_unused=True) == (None,) * len(leaves)


def test_autocast():
    layer = Layer(60, 32, 24, 6, 2, torch.float32, bias=True)
    want = layer.to(torch.bfloat16).step(sonicmoe_cpp.moe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer.call(sonicmoe_cpp.moe)
    assert out.dtype == torch.bfloat16 and torch.equal(out, want["out"])
    leaves = layer.leaves()
    grads = torch.autograd.grad(out, list(leaves.values()), layer.dout.bfloat16())
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        assert grad.dtype == leaf.dtype == torch.float32
        assert torch.equal(grad, want[name].float()), name
    double = Layer(10, 16, 8, 4, 2, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert double.call(sonicmoe_cpp.moe).dtype == torch.float64


def test_autocast_of_the_module():
    torch.manual_seed(0)
    module = sonicmoe_cpp.MoE(6, 2, 32, 24, lb_coef=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, aux = module(torch.randn(40, 32))
    (out.float().sum() + aux.loss).backward()
    assert out.dtype == torch.bfloat16 and aux.loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


# ---- two processes -------------------------------------------------------------------------------

TOKENS = {"even": (24, 24), "uneven": (37, 11), "one rank without": (48, 0)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        options = {"score": "softmax_before_topk"}
        self.first = sonicmoe_cpp.MoE(6, 2, 16, 8, bias=True, **options)
        self.second = sonicmoe_cpp.MoE(6, 2, 16, 8, activation="relu2", **options)

    def forward(self, x):
        x = x + self.first(x)[0]
        return x + self.second(x)[0]


def train(model, x, target, total):
    """Losses of three steps: this rank's share of the mean over all tokens."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = (model(x) - target).square().sum() / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def data():
    g = torch.Generator().manual_seed(1)
    return torch.randn(48, 16, generator=g), torch.randn(48, 16, generator=g)


def build():
    torch.manual_seed(0)
    return Model()


def worker(rank, port, results):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, sizes in TOKENS.items():
        model = build()
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=mesh)
        x, target = (t.split(list(sizes))[rank] for t in data())
        # FSDP averages gradients over the two ranks; the loss is a sum over the ranks.
        losses = train(model, x, target, 48 / 2) / 2
        dist.all_reduce(losses)
        if rank == 0:
            results.put((name, losses.tolist()))
    leave()


def mixed_worker(rank, port, results):
    """One step with parameters gathered in bf16 and gradients reduced in fp32."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.first, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    x, target = (t.chunk(2)[rank] for t in data())
    out, _ = model.first(x)
    ((out.float() - target).square().mean()).backward()
    grads = {n: p.grad.full_tensor() for n, p in model.first.named_parameters()}
    if rank == 0:
        kinds = {g.dtype for g in grads.values()}
        results.put((out.dtype, kinds, {n: g.tolist() for n, g in grads.items()}))
    leave()


@pytest.mark.slow
def test_fsdp2_gives_the_loss_of_one_process():
    want = train(build(), *data(), 48)
    assert want[2] < want[0]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(worker, (free_port(), results), nprocs=2)
    for _ in TOKENS:
        name, losses = results.get()
        torch.testing.assert_close(torch.tensor(losses), want, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_fsdp2_mixed_precision():
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(mixed_worker, (free_port(), results), nprocs=2)
    dtype, kinds, grads = results.get()
    assert dtype == torch.bfloat16 and kinds == {torch.float32}
    model = build()
    x, target = data()
    (model.first(x)[0] - target).square().mean().backward()
    for name, parameter in model.first.named_parameters():
        error = torch.tensor(grads[name]) - parameter.grad
        assert error.norm() < 2e-2 * parameter.grad.norm(), name
