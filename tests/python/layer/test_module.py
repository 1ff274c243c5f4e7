"""The module: parameters, losses, routing in training and evaluation, shapes."""

import pytest
import reference
import sonicmoe_cpp
import torch
import torch.nn.functional as F
from sonicmoe_cpp._names import POINTWISE
from sonicmoe_cpp.routing import SCORES


def test_state_dict_has_plain_names():
    module = sonicmoe_cpp.MoE(4, 2, 16, 8, bias=True)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    assert shapes == {
        "router.weight": (4, 16),
        "w_up": (4, 16, 16),
        "w_down": (4, 16, 8),
        "b_up": (4, 16),
        "b_down": (4, 16),
    }
    bare = sonicmoe_cpp.MoE(4, 2, 16, 8, activation="relu2", dtype=torch.bfloat16)
    assert sorted(bare.state_dict()) == ["router.weight", "w_down", "w_up"]
    assert bare.w_up.shape == (4, 8, 16) and bare.w_up.dtype == torch.bfloat16
    sonicmoe_cpp.MoE(4, 2, 16, 8, bias=True).load_state_dict(module.state_dict())
    assert "num_experts=4" in repr(module) and "activation=swiglu" in repr(module)


@pytest.mark.parametrize("routing", ["topk", "token_rounding"])
def test_main_gradients(routing):
    module = sonicmoe_cpp.MoE(4, 2, 16, 8, bias=True, routing=routing, tile=8)
    x = torch.randn(40, 16)
    module(x)[0].square().sum().backward()
    plain = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    buffers = torch.ones_like(module.w_up), torch.ones_like(module.w_down)
    module(x, grad_accum=buffers)[0].square().sum().backward()
    assert module.w_up.grad is None and module.w_down.grad is None
    for buffer, name in zip(buffers, ("w_up", "w_down"), strict=True):
        torch.testing.assert_close(buffer - 1, plain[name], rtol=1e-5, atol=1e-5)
    for name in ("router.weight", "b_up", "b_down"):
        assert torch.equal(module.get_parameter(name).grad, plain[name])
    if routing == "topk":
        module.add_lora(4, 8.0)
        with pytest.raises(ValueError, match="but add_lora has frozen the experts"):
            module(x, grad_accum=buffers)


def test_meta_device_and_reset():
    module = sonicmoe_cpp.MoE(4, 2, 16, 8, bias=True, device="meta")
    out, aux = module(torch.empty(2, 5, 16, device="meta"))
    assert out.shape == (2, 5, 16) and aux.logits.shape == (10, 4)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert module.w_up.detach().std() == pytest.approx(16**-0.5, rel=0.2)
    assert module.w_down.detach().std() == pytest.approx(8**-0.5, rel=0.2)
    assert (module.b_up == 0).all()


@pytest.mark.parametrize("score", SCORES)
def test_against_plain_torch(score):
    torch.manual_seed(0)
    options = {"score": score, "renormalize": score in POINTWISE, "scale": 1.5}
    module = sonicmoe_cpp.MoE(6, 2, 16, 8, bias=True, lb_coef=0.1, z_coef=0.01, **options)
    x = torch.randn(3, 11, 16)
    rows = x.reshape(-1, 16)
    logits = rows @ module.router.weight.t()
    p = {"sigmoid": logits.sigmoid(), "sqrt_softplus": F.softplus(logits).sqrt()}
    p = p.get(score, logits.softmax(-1))
    best, ids = logits.topk(2)
    chosen = p.gather(1, ids)
    weights = {
        "softmax_after_topk": best.softmax(-1),
        "softmax_before_topk": chosen,
    }.get(score, chosen / chosen.sum(-1, keepdim=True)) * 1.5
    biases = {"b_up": module.b_up, "b_down": module.b_down}
    want = reference.moe(rows, ids, weights, module.w_up, module.w_down, **biases).view_as(x)
    counts = torch.bincount(ids.flatten(), minlength=6)
    balance = 6 * (counts / counts.sum() * (p / p.sum(-1, keepdim=True)).mean(0)).sum()
    z = logits.logsumexp(-1).square().mean()
    loss = 0.1 * balance + 0.01 * z

    out, aux = module(x)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.load_balancing, balance)
    torch.testing.assert_close(aux.z, z)
    torch.testing.assert_close(aux.loss, loss)
    assert torch.equal(aux.tokens_per_expert, counts)
    torch.testing.assert_close(aux.logits, logits)
    parameters = list(module.parameters())
    got = torch.autograd.grad(out.square().sum() + aux.loss, parameters)
    for g, w in zip(got, torch.autograd.grad(want.square().sum() + loss, parameters), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


def test_rounding_is_for_training():
    torch.manual_seed(0)
    options = {"routing": "token_rounding", "tile": 16, "rounding": "up"}
    module = sonicmoe_cpp.MoE(4, 2, 16, 8, **options)
    plain = sonicmoe_cpp.MoE(4, 2, 16, 8)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(90, 16)
    want, _ = plain(x)
    assert not torch.equal(module(x)[0], want)
    assert torch.equal(module.eval()(x)[0], want)
    pairs = sonicmoe_cpp.token_round(x @ module.router.weight.t(), 2, tile=16, mode="up")
    counts = pairs.offsets.diff()
    assert ((counts % 16 == 0) | (counts == 90)).all()
    torch.testing.assert_close(
        module.train()(x)[0], sonicmoe_cpp.moe_pairs(x, pairs, module.w_up, module.w_down)
    )


def test_few_tokens_warn_once_and_use_top_k():
    module = sonicmoe_cpp.MoE(8, 2, 16, 8, routing="token_rounding", tile=40)
    plain = sonicmoe_cpp.MoE(8, 2, 16, 8)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(79, 16)
    with pytest.warns(UserWarning, match=r"T\*K >= E\*tile/2 = 160"):
        out, _ = module(x)
    assert torch.equal(out, plain(x)[0])
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x)
        module(torch.randn(80, 16))


def test_no_tokens():
    module = sonicmoe_cpp.MoE(4, 2, 16, 8, routing="token_rounding", bias=True, lb_coef=1.0)
    out, aux = module(torch.empty(2, 0, 16))
    assert out.shape == (2, 0, 16) and aux.loss == 0 and aux.z == 0
    (out.sum() + aux.loss).backward()
    assert all((p.grad == 0).all() for p in module.parameters())


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_a_step_of_training_lowers_the_loss(activation):
    torch.manual_seed(0)
    options = {"activation": activation, "routing": "token_rounding", "tile": 8}
    module = sonicmoe_cpp.MoE(8, 2, 16, 8, lb_coef=0.01, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    x, target = torch.randn(128, 16), torch.randn(128, 16)
    losses = []
    for _ in range(20):
        out, aux = module(x)
        loss = F.mse_loss(out, target) + aux.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_selection_bias_only_selects():
    module = sonicmoe_cpp.MoE(6, 2, 16, 8, score="sigmoid")
    x = torch.randn(20, 16)
    bias = torch.tensor([100.0, 0, 0, 0, 0, 50.0])
    _, aux = module(x, selection_bias=bias)
    assert aux.tokens_per_expert.tolist() == [20, 0, 0, 0, 0, 20]


def test_trimmed_pairs():
    pairs = sonicmoe_cpp.token_round(torch.randn(50, 4), 2, tile=8)
    used = int(pairs.offsets[-1])
    assert (pairs.token[used:] == -1).all() and (pairs.expert[used:] == 4).all()
    assert (pairs.weight[used:] == 0).all()
    short = pairs.trimmed()
    assert short.token.numel() == short.weight.numel() == used
    key = short.expert.long() * 50 + short.token
    assert (key.diff() > 0).all()
