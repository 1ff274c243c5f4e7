"""Kinds of public bug reports of other MoE layers, tried on this one: docs/notes/2026-11-reports.md
has the links."""

import gc
import os
import signal
import threading

import pytest
import sonicmoe_cpp as smoe
import torch
import torch.nn.functional as F
from reference import error
from sonicmoe_cpp import packed
from torch import nn

E, K, D, N = 4, 2, 128, 128


def layer(**options):
    torch.manual_seed(0)
    return smoe.MoE(E, K, D, N, **options)


def test_neither_x_nor_the_output_gradient_is_overwritten():
    moe, x, dout = layer(), torch.randn(9, D, requires_grad=True), torch.randn(9, D)
    before = x.detach().clone(), dout.clone()
    moe(x)[0].backward(dout)
    assert torch.equal(x, before[0]) and torch.equal(dout, before[1])


@pytest.mark.parametrize("precision", [None, "fp8"])
def test_a_graph_is_walked_twice(precision):
    dtype = torch.float32 if precision is None else torch.bfloat16
    moe = layer(precision=precision, dtype=dtype)
    x = torch.randn(9, D, dtype=dtype, requires_grad=True)
    loss, leaves = moe(x)[0].float().square().sum(), [x, *moe.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class TwoLayers(nn.Module):
    def __init__(self, shared: bool):
        super().__init__()
        self.first, self.second = layer(), layer()
        if shared:
            self.second.w_up, self.second.w_down = self.first.w_up, self.first.w_down

    def forward(self, x, **options):
        return self.second(self.first(x, **options)[0], **options)[0]


def test_weights_shared_by_two_layers_get_both_gradients():
    shared, apart, x = TwoLayers(True), TwoLayers(False), torch.randn(9, D)
    seen = []
    shared.first.w_up.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for model in (shared, apart):
        model(x).square().sum().backward()
    both = apart.first.w_up.grad + apart.second.w_up.grad
    assert error(shared.first.w_up.grad, both) < 1e-6 and len(seen) == 1
    main = tuple(torch.zeros_like(w) for w in (shared.first.w_up, shared.first.w_down))
    shared(x, grad_accum=main).square().sum().backward()
    assert error(main[0], both) < 1e-6


def test_a_token_may_choose_an_expert_twice():
    moe, x = layer(), torch.randn(9, D, requires_grad=True)
    ids, weights = torch.ones(9, 2, dtype=torch.int64), torch.rand(9, 2, requires_grad=True)
    results = []
    for chosen, share in ((ids, weights), (ids[:, :1], weights.sum(1, keepdim=True))):
        out = smoe.moe(x, chosen, share, moe.w_up, moe.w_down)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, weights, moe.w_up])])
    assert all(error(a, b) < 1e-5 for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_ids_of_a_replay_of_few_bits_are_refused_by_name(dtype):
    moe, ids = layer(), torch.zeros(9, 2).to(dtype)
    with pytest.raises(TypeError, match=f"topk_ids has dtype {str(dtype)[6:]}, must be int32"):
        smoe.moe(torch.randn(9, D), ids, torch.rand(9, 2), moe.w_up, moe.w_down)


def test_the_selection_bias_stays_fp32():
    moe = layer(selection_bias=True, score="sigmoid").bfloat16()
    moe.selection_bias.copy_(6.8 + torch.arange(E) * 5e-3)
    moe.update_selection_bias(torch.tensor([1.0, 2, 3, 4]), 1e-3)
    assert moe.selection_bias.dtype == torch.float32
    assert moe.selection_bias.unique().numel() == E
    coarse = {name: value.bfloat16() for name, value in moe.state_dict().items()}
    moe.load_state_dict(coarse)
    assert moe.selection_bias.dtype == torch.float32
    moe.load_state_dict(coarse, assign=True)
    with pytest.raises(TypeError, match="bias has dtype bfloat16, must be float32"):
        moe(torch.randn(9, D, dtype=torch.bfloat16))


def bf16_and_ids():
    x = torch.randn(9, D, dtype=torch.bfloat16, requires_grad=True)
    return x, *smoe.route(torch.randn(9, E), K)


def test_inference_mode_before_training():
    """A module that has run, codes and packed weights that were made in inference mode."""
    x, ids, weights = bf16_and_ids()
    moe = layer(precision="fp8", dtype=torch.bfloat16)
    with torch.inference_mode():
        moe(x)
        codes = smoe.quantize_weights(moe.w_up, moe.w_down)
        of_four_bits = [packed.pack_mxfp4(moe.w_up), packed.pack_nf4(moe.w_down)]
    moe(x)[0].float().sum().backward()
    assert moe.w_up.grad.isfinite().all()
    options = {"precision": "fp8", "fp8_weights": codes}
    for experts, chosen in (((moe.w_up, moe.w_down), options), (of_four_bits, {})):
        x.grad = None
        smoe.moe(x, ids, weights, *experts, **chosen).float().sum().backward()
        assert x.grad.float().abs().sum() > 0


def test_a_bias_of_the_output_is_weighted_by_the_score():
    moe, x = layer(bias=True), torch.randn(9, D)
    nn.init.normal_(moe.b_down)
    ids, weights = smoe.route(moe.router(x), K)
    out = smoe.moe(x, ids, weights, moe.w_up, moe.w_down, b_up=moe.b_up, b_down=moe.b_down)
    gate, up = torch.einsum("td,tknd->tkn", x, moe.w_up[ids]).chunk(2, -1)
    each = torch.einsum("tkn,tkdn->tkd", F.silu(gate) * up, moe.w_down[ids]) + moe.b_down[ids]
    want = (weights.unsqueeze(-1) * each).sum(1)
    leaves = [moe.b_down, moe.router.weight]
    found, expected = (
        torch.autograd.grad(o.square().sum(), leaves, retain_graph=True) for o in (out, want)
    )
    assert error(out, want) < 1e-5
    assert all(error(a, b) < 1e-4 for a, b in zip(found, expected, strict=True))


def test_forwards_keep_nothing():
    moe, x = layer(lb_coef=0.1), torch.randn(9, D)

    def tensors():
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())

    moe(x)
    before = tensors()
    for _ in range(20):
        moe(x)
    assert tensors() <= before  # fewer, if garbage of other tests is collected


def test_a_forked_process_computes():
    moe, x = layer(), torch.randn(256, D)
    want = moe(x)[0]
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang of threads that the fork has lost ends with this signal
        out = moe(x)[0]
        out.sum().backward()
        os._exit(0 if torch.equal(out, want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_share_a_model_with_factors():
    """PEFT's own way, which changes a parameter during forward, gives other logits here."""
    pytest.importorskip("peft")
    import hf_models
    from sonicmoe_cpp.integrations import hf

    hf.register()
    model = hf.add_lora(hf_models.build("qwen3_moe"), 2, 4.0).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_(std=0.2)
    ids, wrong = torch.arange(1, 40)[None], []
    with torch.no_grad():
        want = model(ids).logits

    def compute():
        try:
            with torch.no_grad():
                for _ in range(25):
                    if not torch.equal(model(ids).logits, want):
                        wrong.append("other logits")
        except Exception as problem:
            wrong.append(repr(problem))

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
