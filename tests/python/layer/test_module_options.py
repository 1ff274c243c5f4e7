"""Further options of the module: visible NaN, padding, shared experts, the router's dtype, balance
by a selection bias, expert choice, and PyTorch's tools on the module."""

import io
import math
import re
import subprocess
import sys
import warnings

import pytest
import sonicmoe_cpp
import torch
import torch.nn.functional as F
from devices import DEVICES, Waits
from torch.utils.flop_counter import FlopCounterMode, flop_registry

E, K, D, N, T = 6, 2, 16, 8, 40
OPTIONS = {
    "topk": {},
    "sigmoid": {"score": "sigmoid", "renormalize": True},
    "sqrt_softplus": {"score": "sqrt_softplus", "renormalize": True},
    "token_rounding": {"routing": "token_rounding", "tile": 8},
    "expert_choice": {"routing": "expert_choice"},
    "shared": {"shared_experts": 2},
}
each = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
on_each = pytest.mark.parametrize("device", DEVICES)


def make(device="cpu", dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    options = {"lb_coef": 0.1, "z_coef": 0.1, "dtype": dtype} | options
    return sonicmoe_cpp.MoE(E, K, D, N, **options).to(device), torch.randn(T, D).to(device, dtype)


def step(module, x):
    x = x.detach().requires_grad_()
    module.zero_grad(set_to_none=True)
    out, aux = module(x)
    (out.float().square().mean() + aux.loss).backward()
    return out.detach(), aux, x.grad, [p.grad for p in module.parameters()]


# ---- NaN -----------------------------------------------------------------------------------------


@on_each
@each
@pytest.mark.parametrize("compiled", [False, True])
def test_a_nan_of_x_shows_in_its_token_and_in_the_losses(device, options, compiled):
    module, x = make(device, **options)
    alone = {"topk", "sigmoid", "sqrt_softplus", "shared"} & {
        n for n, o in OPTIONS.items() if o == options
    }
    call = module
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(module, fullgraph=True, backend="aot_eager")
    clean, *_ = module(x)
    x[3, 5] = math.nan
    out, aux = call(x)
    others = torch.arange(T, device=device) != 3
    assert out[3].isnan().all()
    assert all(value.isnan() for value in (aux.loss, aux.load_balancing, aux.z))
    assert out[others].isfinite().all()
    if alone:  # a token's output does not depend on other tokens
        assert torch.equal(out[others], clean[others])
    (out.float().square().mean() + aux.loss).backward()
    assert module.router.weight.grad.isnan().any()
    if alone:
        assert all(p.grad.isnan().any() for p in module.parameters())


@each
def test_a_nan_of_the_router_shows_everywhere(options):
    module, x = make(**options)
    with torch.no_grad():
        module.router.weight[2, 1] = math.nan
    out, aux, dx, grads = step(module, x)
    assert out.isnan().all() and aux.loss.isnan() and dx.isnan().all()
    assert all(grad.isnan().any() for grad in grads)
    assert module.router.weight.grad.isnan().all()


def test_a_nan_shows_beside_low_rank_factors():
    module, x = make(dtype=torch.float32)
    module.add_lora(2, 4.0)
    x[3, 5] = math.nan
    out, aux = module(x)
    assert out[3].isnan().all() and out[:3].isfinite().all() and aux.loss.isnan()


def test_a_nan_of_the_selection_bias_shows_everywhere():
    module, x = make(score="sigmoid", selection_bias=True)
    module.selection_bias[2] = math.nan
    out, aux = module(x)
    assert out.isnan().all() and aux.loss.isnan()


@pytest.mark.slow
def test_a_nan_survives_inductor():
    torch._dynamo.reset()
    module, x = make()
    x[3, 5] = math.nan
    out, aux = torch.compile(module, fullgraph=True)(x)
    assert out.isnan().all(1).nonzero().tolist() == [[3]] and aux.loss.isnan()


@each
def test_infinite_logits_are_no_nan(options):
    module, x = make(dtype=torch.float32, z_coef=0.0, **options)
    with torch.no_grad():
        module.router.weight.fill_(0.0)
        module.router.weight[2, 0] = math.inf
        x[:, 0] = x[:, 0].abs() + 1
    assert module(x)[0].isfinite().all()


@on_each
@each
def test_nothing_waits_for_the_device(device, options):
    module, x = make(device, **options)
    mask = torch.zeros(T, dtype=torch.bool, device=device)
    with Waits() as waits:
        out, aux = module(x, padding_mask=mask)
        (out.float().sum() + aux.loss).backward()
    assert not waits.calls


# ---- padding -------------------------------------------------------------------------------------


@on_each
@pytest.mark.parametrize("name", ["topk", "sigmoid", "sqrt_softplus", "shared"])
def test_padding_counts_for_nothing(device, name):
    module, x = make(device, dtype=torch.bfloat16, **OPTIONS[name])
    mask = torch.zeros(T, dtype=torch.bool, device=device)
    mask[[0, 7, 8, 39]] = True
    want, short = module(x[~mask])
    out, aux = module(x.view(4, T // 4, D), padding_mask=mask.view(4, T // 4))
    out = out.view(T, D)
    assert (out[mask] == 0).all() and torch.equal(out[~mask], want)
    assert torch.equal(aux.tokens_per_expert, short.tokens_per_expert)
    for got, expected in zip(aux[:3], short[:3], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    parameters = list(module.parameters())
    got = torch.autograd.grad(aux.loss, parameters, allow_unused=True)
    expected = torch.autograd.grad(short.loss, parameters, allow_unused=True)
    torch.testing.assert_close(got[0], expected[0], rtol=2e-2, atol=1e-4)
    x[mask] = math.nan
    with torch.no_grad():
        again, losses = module(x, padding_mask=mask)
    assert torch.equal(again, out) and losses.loss == aux.loss


@pytest.mark.parametrize("name", ["token_rounding", "expert_choice"])
def test_padding_is_not_computed(name):
    module, x = make(dtype=torch.float32, **OPTIONS[name])
    mask = torch.arange(T) >= 12
    out, aux = module(x, padding_mask=mask)
    assert (out[mask] == 0).all() and out[~mask].any()
    assert aux.tokens_per_expert.sum() <= 12 * E and aux.loss.isfinite()
    everything, losses = module(x, padding_mask=torch.ones_like(mask))
    assert (everything == 0).all() and losses.loss == 0
    assert (losses.tokens_per_expert == 0).all()
    x[mask] = math.nan
    again, losses = module(x, padding_mask=mask)
    assert torch.equal(again, out) and losses.loss == aux.loss
    again.sum().backward()
    assert module.w_up.grad.isfinite().all() and module.w_down.grad.isfinite().all()


def test_bad_padding_is_refused():
    module, x = make()
    with pytest.raises(ValueError, match=r"padding_mask has shape \(3,\), must be x's shape"):
        module(x, padding_mask=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(TypeError, match="padding_mask has dtype float32, must be bool"):
        module(x, padding_mask=torch.zeros(T))


# ---- shared experts, router, balance, expert choice ----------------------------------------------


@pytest.mark.parametrize(("activation", "layout"), [("swiglu", "interleaved"), ("relu2", None)])
def test_shared_experts_take_every_token(activation, layout):
    options = {"activation": activation, "gate_layout": layout or "concatenated"}
    module, x = make(dtype=torch.float32, shared_experts=3, **options)
    plain = sonicmoe_cpp.MoE(E, K, D, N, **options)
    plain.load_state_dict({n: v for n, v in module.state_dict().items() if "shared" not in n})
    up = F.linear(x, module.shared_up[0])
    a = F.silu(up[:, 0::2]) * up[:, 1::2] if layout else F.relu(up).square()
    want = plain(x)[0] + F.linear(a, module.shared_down[0])
    assert module.shared_down.shape == (1, D, 3 * N)
    torch.testing.assert_close(module(x)[0], want, rtol=1e-5, atol=1e-5)
    module.add_lora(2, 4.0)
    assert not module.shared_up.requires_grad and module(x)[0].isfinite().all()


@on_each
def test_a_router_of_its_own_dtype(device):
    module, x = make(device, dtype=torch.bfloat16, router_dtype=torch.float32)
    assert module.router.weight.dtype == torch.float32 and module.w_up.dtype == torch.bfloat16
    want = F.linear(x.float(), module.router.weight)
    for enabled in (False, True):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            out, aux = module(x)
        assert out.dtype == torch.bfloat16 and torch.equal(aux.logits, want)
    assert module.to(torch.bfloat16)(x)[1].logits.dtype == torch.float32
    (out.float().sum() + aux.loss).backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_a_selection_bias_balances_the_experts(score):
    module, x = make(dtype=torch.float32, score=score, selection_bias=True, lb_coef=0.0)
    with torch.no_grad():
        module.router.weight[:2] *= 0.1
        module.router.weight[2:] += 0.5 * x.mean(0)

    def spread():
        counts = module(x)[1].tokens_per_expert.float()
        return (counts.max() / counts.mean()).item()

    before = spread()
    for _ in range(300):
        module.update_selection_bias(module(x)[1].tokens_per_expert, rate=0.01)
    assert spread() < min(1.3, before)
    assert "selection_bias" in module.state_dict()
    bias = module.selection_bias.clone()
    module.update_selection_bias(torch.tensor([0, 0, 1, 1, 2, 2]), rate=0.5)
    assert (module.selection_bias - bias).tolist() == pytest.approx([0.5, 0.5, 0, 0, -0.5, -0.5])
    assert module.bfloat16().selection_bias.dtype == torch.float32
    module(x.bfloat16())
    with pytest.raises(ValueError, match=r"no selection_bias: MoE\(\.\.\., selection_bias=True\)"):
        make()[0].update_selection_bias(torch.zeros(E))
    with pytest.raises(ValueError, match='selection_bias is True, needs score="sigmoid"'):
        make(selection_bias=True)


@on_each
def test_expert_choice(device):
    module, x = make(device, dtype=torch.bfloat16, routing="expert_choice")
    out, aux = module(x)
    each = math.ceil(T * K / E)
    assert aux.tokens_per_expert.tolist() == [each] * E
    assert aux.load_balancing.item() == pytest.approx(1)
    pairs = sonicmoe_cpp.expert_choice(module.router(x), each)
    assert torch.equal(out, sonicmoe_cpp.moe_pairs(x, pairs, module.w_up, module.w_down))
    assert torch.equal(module.eval()(x)[0], out)
    assert module(x[:0])[0].shape == (0, D)
    for refused in ({"score": "sigmoid"}, {"n_group": 2, "topk_group": 1}, {"scale": 2.0}):
        name = next(iter(refused))
        with pytest.raises(ValueError, match=f'{name} is .*, but routing is "expert_choice"'):
            make(routing="expert_choice", **refused)
    with pytest.raises(ValueError, match='selection_bias is given, but routing is "expert_choice"'):
        module(x, selection_bias=torch.zeros(E, device=device))


@on_each
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("height", [0.0, -5.0, -20.0, -100.0, 20.0])
@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_the_balance_loss_divides_scores_by_their_sum(score, height, padded, device):
    torch.manual_seed(0)
    logits = torch.randn(T, E, dtype=torch.float64)
    ids = torch.arange(T * K).reshape(T, K).remainder(E)  # balanced, not what route() chooses
    padding = torch.arange(T) % 5 == 0 if padded else None
    high = (logits + height).sigmoid()
    if score == "sqrt_softplus":
        high = F.softplus(logits + height, threshold=40.0).sqrt()
    p = high / high.sum(-1, keepdim=True)  # DeepSeek-V3, equations 17 to 20
    real = slice(None) if padding is None else ~padding
    counts = ids[real].flatten().bincount(minlength=E)
    want = (E * counts / counts.sum() * p[real].mean(0)).sum()
    if padding is not None:
        ids, padding = ids.masked_fill(padding[:, None], -1), padding.to(device)
    given = (logits + height).float().to(device), ids.to(device)
    got, *_ = sonicmoe_cpp.router_losses(*given, score=score, padding=padding)
    assert got.item() == pytest.approx(want.item(), rel=1e-5)


@on_each
@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus", "softmax_before_topk"])
def test_sequence_wise_balance(score, device):
    """The mean of the sequences' own losses; sequences that are all padding do not count."""
    options = {"score": score, "balance": "sequence", "lb_coef": 1.0, "z_coef": 0.1}
    module, x = make(device, **options, router_dtype=torch.float32)
    x = x.view(2, 2, T // 4, D)
    for padding in (None, torch.arange(T, device=device).view(2, 2, -1) < T // 4 + 3):
        mask = torch.zeros(x.shape[:-1], dtype=torch.bool, device=device)
        mask = mask if padding is None else padding
        aux = module(x, padding_mask=padding)[1]
        each = []
        for rows, hidden in zip(x.flatten(0, 1), mask.flatten(0, 1), strict=True):
            module.balance = "batch"
            if not hidden.all():
                each.append(module(rows[~hidden])[1])
            module.balance = "sequence"
        assert len(each) == (4 if padding is None else 3)
        want = torch.stack([one.load_balancing for one in each]).mean()
        torch.testing.assert_close(aux.load_balancing, want)
        assert torch.equal(aux.tokens_per_expert, sum(one.tokens_per_expert for one in each))
        if padding is None:  # the function gives the same
            ids, _ = sonicmoe_cpp.route(aux.logits, K, score=score)
            found = sonicmoe_cpp.router_losses(aux.logits, ids, score=score, sequences=4)
            losses = aux.load_balancing, aux.z, aux.tokens_per_expert
            assert all(map(torch.equal, found, losses))
            with pytest.raises(ValueError, match="sequences is 3, must be a positive divisor of T"):
                sonicmoe_cpp.router_losses(aux.logits, ids, score=score, sequences=3)
        weight = module.router.weight
        got, want = (torch.autograd.grad(loss, weight)[0] for loss in (aux.load_balancing, want))
        torch.testing.assert_close(got, want)
    empty = module(x[:0])[1]
    assert empty.loss == 0 and module(x[0, 0])[1].load_balancing.shape == ()
    with pytest.raises(ValueError, match='balance is "sequence", but routing is "expert_choice"'):
        make(routing="expert_choice", balance="sequence")


def test_the_load_balancing_loss_of_transformers_is_k_times_ours():
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(T, E)
    ids, _ = sonicmoe_cpp.route(logits, K)
    load_balancing, z, counts = sonicmoe_cpp.router_losses(logits, ids)
    theirs = load_balancing_loss_func((logits,), E, K)
    torch.testing.assert_close(theirs, K * load_balancing)
    padding = torch.arange(T) % 5 == 0
    ids, _ = sonicmoe_cpp.route(logits.masked_fill(padding[:, None], -math.inf), K)
    ours = sonicmoe_cpp.router_losses(logits, ids, padding=padding)
    theirs = load_balancing_loss_func((logits,), E, K, attention_mask=(~padding)[None])
    torch.testing.assert_close(theirs, K * ours[0])
    assert ours[2].sum() == K * (~padding).sum() and counts.sum() == K * T and z > 0
    with pytest.raises(TypeError, match="ids is list, must be"):
        sonicmoe_cpp.router_losses(logits, [1])


def test_losses_do_not_count_ids_that_are_no_experts():
    logits = torch.randn(4, E)
    ids = torch.tensor([[0, 1], [-5, 2], [2, E], [E + 7, -(2**40)]])
    none = torch.zeros(4, dtype=torch.bool)
    want = torch.tensor([1, 1, 2] + [0] * (E - 3))
    losses = [sonicmoe_cpp.router_losses(logits, ids, padding=p) for p in (None, none)]
    assert all(torch.equal(counts, want) for *_, counts in losses)
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("routing", ["topk", "expert_choice"])
def test_all_together_in_one_graph(routing):
    torch._dynamo.reset()
    options = {"router_dtype": torch.float32, "shared_experts": 1}
    if routing == "topk":
        options |= {"score": "sigmoid", "selection_bias": True, "balance": "sequence"}
    module, _ = make(routing=routing, **options)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (24, 40, 57):
        x = torch.randn(2, tokens, D, dtype=torch.bfloat16)
        mask = torch.rand(2, tokens) < 0.3
        results = []
        with torch._dynamo.config.patch(error_on_recompile=True):
            for function in (compiled, module):
                out, aux = function(x, padding_mask=mask)
                loss = out.float().square().sum() + aux.loss
                results.append((loss, *torch.autograd.grad(loss, list(module.parameters()))))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


# ---- what tools see ------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_the_flop_counter_sees_the_products(activation):
    module, x = make(activation=activation)
    products = 3 if activation == "swiglu" else 2
    one, router = 2 * T * K * D * N, 2 * T * D * E
    with FlopCounterMode(display=False) as count:
        out, aux = module(x)
    assert count.get_total_flops() == products * one + router
    with FlopCounterMode(display=False) as count:
        (out.float().sum() + aux.loss).backward()  # x needs no gradient
    w_up = products - 1
    assert count.get_total_flops() == (1 + 1 + w_up) * one + router
    x.requires_grad_()
    with FlopCounterMode(display=False) as count:
        module(x)[0].float().sum().backward()
    assert count.get_total_flops() == 3 * products * one + 3 * router
    module.add_lora(8, 1.0)
    with torch.no_grad(), FlopCounterMode(display=False) as count:
        module(x.detach())
    low_rank = 2 * T * K * 8 * (D + w_up * N + N + D)
    assert count.get_total_flops() == products * one + router + low_rank


@pytest.mark.parametrize("name", ["inference", "forward", "backward", "backward_accumulate"])
def test_the_flop_counter_knows_the_operators_of_peer_memory(name):
    """They take the arguments of the layer alone, then the exchange."""
    names = f"moe_{name}", f"exchange_{name}"
    alone, over_ranks = (getattr(torch.ops.sonicmoe_cpp, each) for each in names)
    values = {"x": (T, D), "dout": (T, D), "index": (T, K), "weights": (T, K), "form": 0}
    values |= {"w_up": (E, 2 * N, D), "w_down": (E, D, N), "needs": (1 << 9) - 1}
    found = []
    for operator in (alone, over_ranks):
        given = [values.get(argument.name) for argument in operator.default._schema.arguments]
        found.append(flop_registry[operator](*given, out_val=None))
    assert found[0] == found[1] == 2 * T * K * D * N * (6 if "backward" in name else 3)


# Run in a process of its own, which imports the counter before or after the operators.
COUNT_COMPILED = """
import sys, torch, torch.distributed as dist
if sys.argv[1] == "before":
    import torch.utils.flop_counter
from sonicmoe_cpp.distributed import ExpertParallelMoE
from torch.utils.flop_counter import FlopCounterMode

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
T, D, N, E, K = 40, 24, 16, 6, 2
module, x = ExpertParallelMoE(E, K, D, N), torch.randn(T, D, requires_grad=True)
compiled = torch.compile(module, backend="aot_eager")
found = []
for call in (module, compiled):
    with torch.no_grad(), FlopCounterMode(display=False) as count:
        call(x.detach())
    found.append(count.get_total_flops())
    with FlopCounterMode(display=False) as count:
        call(x)[0].sum().backward()
    found.append(count.get_total_flops())
one = 2 * T * D * (3 * K * N + E)  # the products of experts and router
assert found == [one, 3 * one] * 2, (found, one)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_flop_counter_sees_compiled_expert_parallelism(moment):
    command = [sys.executable, "-c", COUNT_COMPILED, moment]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("routing", ["topk", "token_rounding"])
def test_export_save_and_load(routing):
    module, _ = make(dtype=torch.float32, routing=routing, tile=8)
    module.eval()
    x = torch.randn(2, 20, D)
    sizes = {"x": {1: torch.export.Dim("tokens", min=2, max=64)}}
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, (x,), dynamic_shapes=sizes), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for tokens in (20, 33):
        x = torch.randn(2, tokens, D)
        out, aux = loaded(x)
        want, losses = module(x)
        assert isinstance(aux, sonicmoe_cpp.MoEAux) and torch.equal(out, want)
        assert torch.equal(aux.loss, losses.loss)


@pytest.mark.slow
def test_ahead_of_time_inductor(tmp_path):
    module, _ = make(dtype=torch.float32)
    x = torch.randn(2, 20, D)
    with torch.no_grad():
        exported = torch.export.export(module.eval(), (x,))
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "moe.pt2")
        )
        out, aux = torch._inductor.aoti_load_package(package)(x)
        want, losses = module(x)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(aux.loss, losses.loss)


@pytest.fixture
def one_rank(tmp_path):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fsdp2_gets_no_views(one_rank):
    from torch.distributed.fsdp import fully_shard

    module, _ = make(dtype=torch.float32)
    fully_shard(module, mesh=one_rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, aux = module(torch.randn(2, 5, D))
    assert not any(t._is_view() for t in (out, aux.loss, aux.load_balancing, aux.z))
    (out.sum() + aux.loss).backward()


def test_fsdp2_with_a_router_of_its_own_dtype(one_rank):
    from torch.distributed.fsdp import fully_shard

    module, x = make(router_dtype=torch.float32, score="sigmoid", selection_bias=True)
    want, _ = module(x)
    fully_shard(module.router, mesh=one_rank)
    fully_shard(module, mesh=one_rank)
    out, aux = module(x)
    assert torch.equal(out, want) and aux.logits.dtype == torch.float32
    (out.float().sum() + aux.loss).backward()
    assert module.router.weight.grad.dtype == torch.float32


def test_distributed_tensors_are_refused(one_rank):
    from torch.distributed.tensor import Replicate, distribute_tensor

    module, x = make(dtype=torch.float32)
    ids, weights = sonicmoe_cpp.route(module.router(x), K)
    names = ("x", "topk_ids", "topk_weights", "w_up", "w_down")
    tensors = dict(zip(names, (x, ids, weights, module.w_up, module.w_down), strict=True))
    for at, name in {
        "x": "x",
        "w_up": "w_up",
        "w_down": "w_down",
        "topk_weights": "weights",
    }.items():
        other = distribute_tensor(tensors[at].detach(), one_rank, [Replicate()])
        with pytest.raises(TypeError, match=f"{name} is a DTensor, must be a plain torch.Tensor"):
            sonicmoe_cpp.moe(**(tensors | {at: other}))
    for name in ("w_up", "w_down", "router.weight"):
        module, _ = make(dtype=torch.float32)
        owner = module.router if "." in name else module
        value = getattr(owner, name.split(".")[-1])
        other = torch.nn.Parameter(distribute_tensor(value, one_rank, [Replicate()]))
        setattr(owner, name.split(".")[-1], other)
        with pytest.raises(TypeError, match=re.escape(f"{name} is a DTensor, must be")):
            module(x)
