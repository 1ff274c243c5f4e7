"""MoE.add_lora: modules with low-rank factors beside frozen experts."""

import copy
import io
import math

import pytest
import reference
import sonicmoe_cpp
import torch

E, D, N = 5, 24, 16
FACTORS = ("up_a", "up_b", "down_a", "down_b")


def test_module_casts_under_autocast_as_without_factors():
    module = sonicmoe_cpp.MoE(E, 2, D, N)
    x = torch.randn(16, D).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        plain = module(x)[0]
        module.add_lora(rank=8, alpha=8.0)
        out = module(x)[0]
    assert reference.error(out, plain) < 2e-2
    out.float().sum().backward()
    assert module.lora.up_b.grad.abs().sum() > 0


def test_module_trains_its_factors_only():
    torch.manual_seed(0)
    module = sonicmoe_cpp.MoE(E, 2, D, N, bias=True)
    x, target = torch.randn(64, D), torch.randn(64, D)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    plain = module(x)[0]
    module.add_lora(rank=4, alpha=8.0)
    assert module.lora.scale == 2.0
    torch.testing.assert_close(module(x)[0], plain)  # B is zero before training
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained == {"router.weight", *(f"lora.{name}" for name in FACTORS)}
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (module(x)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for name in ("w_up", "w_down", "b_up", "b_down"):
        assert torch.equal(getattr(module, name), before[name])


def test_module_refuses_distributed_weights():
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        module = fully_shard(sonicmoe_cpp.MoE(E, 2, D, N), mesh=mesh)
        with pytest.raises(ValueError, match="is a DTensor: add_lora must come before fully_shard"):
            module.add_lora(4, 8)
        assert module.w_up.requires_grad and getattr(module, "lora", None) is None
    finally:
        distributed.destroy_process_group()


def test_module_initialises_its_factors_after_the_meta_device():
    with torch.device("meta"):
        module = sonicmoe_cpp.MoE(E, 2, D, N)
        module.add_lora(rank=4, alpha=8)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.lora.parameters():
            parameter.fill_(float("nan"))  # what memory may hold
    module.reset_parameters()
    assert (module.lora.up_b == 0).all() and (module.lora.down_b == 0).all()
    for a, width in ((module.lora.up_a, D), (module.lora.down_a, N)):
        assert 0.9 * width**-0.5 < a.abs().max() <= width**-0.5
    assert module(torch.randn(8, D))[0].isfinite().all()


def test_factors_of_a_bf16_module_are_fp32():
    """An optimizer's step that is smaller than a rounding of bf16 would be lost."""
    module = sonicmoe_cpp.MoE(E, 2, D, N, dtype=torch.bfloat16)
    module.add_lora(4, 8)
    assert {p.dtype for p in module.lora.parameters()} == {torch.float32}
    module(torch.randn(8, D).bfloat16())[0].float().sum().backward()
    assert module.lora.up_b.grad.dtype == torch.float32
    wide = sonicmoe_cpp.MoE(E, 2, D, N, dtype=torch.float64)
    wide.add_lora(4, 8)
    assert wide.lora.up_a.dtype == torch.float64
    given = sonicmoe_cpp.MoE(E, 2, D, N, dtype=torch.bfloat16)
    given.add_lora(4, 8, dtype=torch.bfloat16)
    assert given.lora.up_a.dtype == torch.bfloat16


def trained_module(seed=3, share_outer=False, **options):
    torch.manual_seed(seed)
    module = sonicmoe_cpp.MoE(E, 2, D, N, **options)
    module.add_lora(4, 8, share_outer=share_outer)
    torch.nn.init.normal_(module.lora.up_b)
    torch.nn.init.normal_(module.lora.down_b)
    return module, torch.randn(8, D)


def test_module_with_factors_is_pickled_and_copied():
    module, x = trained_module()
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(module)):
        assert torch.equal(other(x)[0], module(x)[0])


@pytest.mark.filterwarnings("ignore:.*on the meta device")
def test_offloaded_factors_are_brought_back():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    module, x = trained_module()
    want = module(x)[0].detach()
    accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    assert module.lora.up_a.is_meta
    with torch.no_grad():
        assert torch.equal(module(x)[0], want)
    assert module.lora.up_a.is_meta


def test_factors_are_sharded_with_their_layer():
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        module, x = trained_module()
        want = module(x)[0]
        fully_shard(module.lora, mesh=mesh)
        with pytest.raises(TypeError, match=r"lora\.up_a is sharded apart from its layer"):
            module(x)
        module, _ = trained_module()
        fully_shard(module, mesh=mesh)
        torch.testing.assert_close(module(x)[0], want)
        half = sonicmoe_cpp.MoE(E, 2, D, N, dtype=torch.bfloat16)
        half.add_lora(4, 8)
        fully_shard(half.router, mesh=mesh)
        fully_shard(half, mesh=mesh)(x.bfloat16())[0].float().sum().backward()
        assert half.lora.up_b.grad.full_tensor().abs().sum() > 0
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("share_outer", [False, True])
@pytest.mark.parametrize("routing", ["topk", "token_rounding", "expert_choice"])
def test_module_is_as_with_merged_weights(routing, share_outer):
    options = {"routing": routing, "tile": 8, "bias": True, "dtype": torch.float64}
    module, _ = trained_module(share_outer=share_outer, **options)
    merged, lora = copy.deepcopy(module), module.lora
    merged.lora = None
    with torch.no_grad():
        merged.w_up += lora.scale * lora.up_b @ lora.up_a
        merged.w_down += lora.scale * lora.down_b @ lora.down_a
    results = []
    for each in (module, merged):
        x = torch.randn(50, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        out = each(x.requires_grad_())[0]
        out.square().sum().backward()
        results.append((out.detach(), x.grad, each.router.weight.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_module_keeps_the_factors_it_has():
    module = sonicmoe_cpp.MoE(E, 2, D, N)
    with pytest.raises(ValueError, match="rank is 0"):
        module.add_lora(0, 8)
    with pytest.raises(TypeError, match="rank is bool, must be an int"):
        module.add_lora(True, 8)
    with pytest.raises(ValueError, match="alpha is nan, must be finite"):
        module.add_lora(4, math.nan)
    assert module.w_up.requires_grad and module.lora is None
    module.add_lora(4, 8)
    with pytest.raises(ValueError, match="MoE has low-rank factors already"):
        module.add_lora(2, 8)
    assert module.lora.up_a.shape[1] == 4
