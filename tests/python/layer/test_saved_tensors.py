"""Changed saved tensors (changed_tensors.py): equal gradients or a refusal, never a read of other
memory."""

import pytest
import sonicmoe_cpp as smoe
import torch
from changed_tensors import (
    OTHER,
    REFUSED,
    SAME,
    as_wide,
    differentiated,
    expanded,
    flat,
    freed,
    half_freed,
    on_meta,
    other_bytes,
    truncated,
)
from devices import DEVICES
from sonicmoe_cpp.lora import LowRank

E, K, D, N, T = 4, 2, 128, 128, 24

# ---- calls: each returns an output and the tensors that it is differentiated in ------------------


def leaves(device):
    torch.manual_seed(0)
    kind = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    return [torch.randn(*s, **kind) for s in ((T, D), (E, 2 * N, D), (E, D, N), (E, 2 * N), (E, D))]


def logits_of(device):
    return torch.randn(T, E, device=device, requires_grad=True)


def by_ids(device, **options):
    x, w_up, w_down, b_up, b_down = leaves(device)
    ids, weights = smoe.route(logits_of(device).detach(), K)
    weights.requires_grad_()
    biases = {} if options else {"b_up": b_up, "b_down": b_down}
    out = smoe.moe(x, ids, weights, w_up, w_down, **biases, **options)
    return out, (x, w_up, w_down, weights, *biases.values())


def by_pairs(device):
    x, w_up, w_down, *_ = leaves(device)
    logits = logits_of(device)
    pairs = smoe.token_round(logits, K, tile=8)
    return smoe.moe_pairs(x, pairs, w_up, w_down), (x, w_up, w_down, logits)


def by_choice(device):
    x, w_up, w_down, *_ = leaves(device)
    logits = logits_of(device)
    pairs = smoe.expert_choice(logits, 9)
    return smoe.moe_pairs(x, pairs, (w_up[:, :N], w_up[:, N:]), w_down), (x, w_up, w_down, logits)


def grouped(device):
    x, w_up, w_down, *_ = leaves(device)
    offsets = torch.tensor([0, 1, 9, 9, T], device=device)
    weights = torch.rand(T, device=device, requires_grad=True)
    out = smoe.moe_grouped(x, offsets, w_up, w_down, row_weights=weights)
    return out, (x, w_up, w_down, weights)


def routed(device):
    logits = logits_of(device)
    bias = torch.randn(E, device=device)
    return smoe.route(logits, K, score="sigmoid", bias=bias)[1], (logits,)


def losses(device):
    logits = logits_of(device)
    ids, _ = smoe.route(logits, K)
    balance, z, _ = smoe.router_losses(logits, ids)
    return balance + z, (logits,)


def factors(device, **options):
    x, w_up, w_down, *_ = (t.detach() for t in leaves(device))
    ids, weights = smoe.route(logits_of(device).detach(), K)
    sizes = (E, 4, D), (E, 2 * N, 4), (E, 4, N), (E, D, 4)
    parts = [torch.randn(size, device=device).to(x.dtype).requires_grad_() for size in sizes]
    for t in (x, weights):
        t.requires_grad_()
    up, down = LowRank(*parts[:2], 0.5), LowRank(*parts[2:], 2.0)
    out = smoe.lora_moe(x, ids, weights, w_up, w_down, up=up, down=down, **options)
    return out, (x, weights, *parts)


def factors_in_fp8(device):
    return factors(device, precision="fp8")


def in_fp8(device):
    _, w_up, w_down, *_ = leaves(device)
    quantised = smoe.quantize_weights(w_up, w_down)
    return by_ids(device, precision="fp8", fp8_weights=quantised)


def keeping_bf16(device):
    return by_ids(device, precision="fp8", keep_h="bf16")


IN_FP8 = (factors_in_fp8, in_fp8, keeping_bf16)
CALLS = (by_ids, by_pairs, by_choice, grouped, routed, losses, factors, *IN_FP8)


def skip_without_fp8(device, call):
    if device == "cuda" and call in IN_FP8:
        reason = smoe.unsupported_reason(device)
        if reason or torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("fp8 on CUDA needs the Hopper engine")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_equal_values_with_other_strides(device, call):
    skip_without_fp8(device, call)
    want, *_ = differentiated(call, device, lambda t: t)
    for change in SAME:
        try:
            got, *_ = differentiated(call, device, change)
        except NotImplementedError:  # strides that CUDA does not read
            assert device == "cuda"
            continue
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), change.__name__


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_each_saved_tensor_changed(device, call):
    """Where a tensor's values and sizes decide nothing about addresses, gradients may be computed
    from another tensor; else it is refused. A tensor on another device is always refused."""
    skip_without_fp8(device, call)
    _, count, _ = differentiated(call, device, lambda t: t)
    for change in OTHER:
        if change is other_bytes and device == "cuda":
            continue  # metadata is in device memory, which the host does not read
        for only in range(count):
            try:
                found, _, changed = differentiated(call, device, change, only)
            except REFUSED:
                continue
            assert change is not on_meta or not changed, only
            assert all(g is None or g.device.type == device for g in found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", [by_ids, factors], ids=lambda f: f.__name__)
def test_routing_with_fewer_slots(device, call):
    """The kept metadata names slots that would be outside of the routing weights."""

    def one_slot(t):
        return t[:, :1].contiguous() if t.shape == (T, K) else t

    with pytest.raises(ValueError, match=r"h has \d+ bytes, must have the \d+ that forward"):
        differentiated(call, device, one_slot)


# ---- tuples --------------------------------------------------------------------------------------


def quantised_call(codes):
    x, w_up, w_down, *_ = leaves("cpu")
    quantised = smoe.quantize_weights(w_up, w_down)
    quantised = quantised._replace(codes=codes(quantised.codes))
    ids, weights = smoe.route(logits_of("cpu").detach(), K)
    return smoe.moe(x, ids, weights, w_up, w_down, precision="fp8", fp8_weights=quantised)


def test_codes_with_other_strides():
    want = quantised_call(lambda t: t)
    for change in SAME:
        assert torch.equal(quantised_call(change), want), change.__name__


@pytest.mark.parametrize("change", OTHER, ids=lambda f: f.__name__)
def test_codes_changed(change):
    if change in (flat, other_bytes):
        return  # the same bytes, or codes of other weights
    with pytest.raises(REFUSED):
        quantised_call(change)


def test_codes_that_are_no_tensor():
    for value in (None, 3, [1, 2]):
        with pytest.raises(TypeError, match=r"fp8_weights\.codes is .* torch\.Tensor"):
            quantised_call(lambda _, v=value: v)


def test_pairs_changed():
    x, w_up, w_down, *_ = leaves("cpu")
    pairs = smoe.token_round(logits_of("cpu").detach(), K, tile=8)
    want = smoe.moe_pairs(x, pairs, w_up, w_down)
    for name in ("token", "expert", "weight"):
        value = getattr(pairs, name)
        for change in SAME:
            changed = pairs._replace(**{name: change(value)})
            assert torch.equal(smoe.moe_pairs(x, changed, w_up, w_down), want)
        for change in (truncated, freed, half_freed, on_meta):
            with pytest.raises(REFUSED):
                smoe.moe_pairs(x, pairs._replace(**{name: change(value)}), w_up, w_down)


def test_main_gradients_changed():
    """A buffer to which backward adds is never copied: it is used as it is, or refused."""
    x, w_up, w_down, *_ = leaves("cpu")
    ids, weights = smoe.route(logits_of("cpu").detach(), K)

    def buffers(change):
        g = change(torch.zeros(w_up.shape)), torch.zeros(w_down.shape)
        out = smoe.moe(x, ids, weights, w_up, w_down, grad_accum=g)
        out.float().square().sum().backward()
        return g

    want = buffers(lambda t: t)
    for change in SAME:
        for a, b in zip(buffers(change), want, strict=True):
            assert torch.equal(a, b), change.__name__
    for change in (expanded, truncated, freed, half_freed, on_meta, as_wide):
        with pytest.raises(REFUSED):
            buffers(change)
