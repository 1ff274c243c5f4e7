"""The shapes of the operators' results, as fake implementations that torch traces with. The
formulas are those of the library; tests/python/layer/test_ops.py and test_fp8.py compare them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from . import _library, _ops
from ._call import DIFFERENTIABLE, FRESH, LORA_NEEDS, NEEDS, score_dtype
from ._names import ACTIVATION, FORM, GATED, PRECISION, ROUNDING

GATED_NUMBERS = frozenset(ACTIVATION[name] for name in GATED)


# ---- the layer -----------------------------------------------------------------------------------


def saved_bytes(tokens, rows, experts):
    """Bytes of metadata kept for backward, as in layer.h."""
    return 20 * rows + 16 * tokens + 1024 * experts


def _aligned(count):
    return (count + 255) // 256 * 256


def _blocks(size):
    return (size + 127) // 128


def fp8_weights_bytes(experts, gates, width, hidden):
    """Bytes of quantised weights: codes in two orientations, and scales (core/fp8_layout.h)."""
    blocks = experts * _blocks(width) * _blocks(hidden)
    matrix, scales = blocks * 128**2, blocks * 4
    return sum(2 * _aligned(n * matrix) + _aligned(n * scales) for n in (gates, 1))


def kept_h_bytes(rows, gates, width):
    """Bytes of an H that is kept in fp8: codes and scales (core/fp8_layout.h)."""
    scales = gates * _blocks(width) * ((rows + 3) // 4 * 4)
    return _aligned(rows * gates * width) + _aligned(scales * 4)


def _gates(a) -> int:
    return 2 if a.activation in GATED_NUMBERS else 1


def _rows(a):
    """The row capacity of a call."""
    return a.x.shape[0] if a.form == FORM["grouped"] else a.index.numel()


def _quantize_weights(a):
    experts, hidden, width = a.w_down.shape
    size = fp8_weights_bytes(experts, _gates(a), width, hidden)
    return a.w_down.new_empty((size,), dtype=torch.uint8)


def inference(a):
    return a.x.new_empty(a.x.shape)


def _forward(a):
    rows, gates, width = _rows(a), _gates(a), a.w_down.shape[2]
    if a.precision == PRECISION["fp8"]:
        h = a.x.new_empty((kept_h_bytes(rows, gates, width),), dtype=torch.uint8)
    else:
        h = a.x.new_empty((rows, gates * width))
    size = saved_bytes(a.x.shape[0], rows, a.w_down.shape[0])
    return a.x.new_empty(a.x.shape), h, a.x.new_empty((size,), dtype=torch.uint8)


def gradient(a, name: str, bit: int) -> Tensor:
    value = getattr(a, name)
    if value is None or not a.needs & bit:
        # An empty CPU tensor in place of a gradient that is not wanted, as nothing() of views.h.
        return torch.empty((0,), dtype=a.x.dtype, device="cpu")
    if name == "x":
        return value.new_empty(value.shape)
    return torch.empty_like(value)


def _backward(a):
    return tuple(gradient(a, name, NEEDS[name]) for name in DIFFERENTIABLE)


def _backward_accumulate(a):
    def fresh(name):
        like = gradient(a, name, NEEDS[name])
        if not name.startswith("b_") or like.numel() == 0:
            return like
        return like.new_empty(like.shape, dtype=score_dtype(a.x))

    return tuple(map(fresh, FRESH))


def lora_forward(a):
    out, h, saved = _forward(a)
    p = 0 if a.up_a is None else _rows(a) * a.up_a.shape[1] * a.x.element_size()
    return out, h, saved.new_empty((saved.shape[0] + p,))


def _lora_backward(a):
    return tuple(gradient(a, name, bit) for name, bit in LORA_NEEDS.items())


def _grouped_gemm(a):
    rows = a.a.shape[0] if a.gather is None else a.gather.shape[0]
    return a.a.new_empty((rows, a.b.shape[1]))


def _grouped_gemm_k(a):
    return a.a.new_empty((a.offsets.shape[0] - 1, a.a.shape[1], a.b.shape[1]))


# ---- routing -------------------------------------------------------------------------------------


def round_capacity(a):
    """C of token_round; the number of tokens may be symbolic."""
    (tokens, experts), k, tile = a.logits.shape, a.k, a.tile
    if a.mode == ROUNDING["down"]:
        return tokens * k
    if a.mode == ROUNDING["nearest"]:
        return tokens * k + experts * tile // 2
    return torch.sym_min(tokens * experts, tokens * k + experts * tile)


def _pairs(logits: Tensor, capacity):
    return (
        logits.new_empty((capacity,), dtype=score_dtype(logits)),
        logits.new_empty((capacity,), dtype=torch.int32),
        logits.new_empty((capacity,), dtype=torch.int32),
        logits.new_empty((logits.shape[1] + 1,), dtype=torch.int64),
    )


def _route(a):
    shape = (a.logits.shape[0], a.k)
    return (
        a.logits.new_empty(shape, dtype=score_dtype(a.logits)),
        a.logits.new_empty(shape, dtype=torch.int64),
    )


def _token_round(a):
    return _pairs(a.logits, round_capacity(a))


def _expert_choice(a):
    return _pairs(a.logits, a.logits.shape[1] * torch.sym_min(a.capacity, a.logits.shape[0]))


def _router_losses(a):
    return (
        a.logits.new_empty((2,), dtype=score_dtype(a.logits)),
        a.logits.new_empty((a.logits.shape[1],), dtype=torch.int64),
    )


def _router_gradient(a):
    return a.logits.new_empty(a.logits.shape)


# ---- registration --------------------------------------------------------------------------------

# Functions of the operators' arguments by name. Operators of the exchange have none: no graph
# contains them.
FAKES = {
    "moe_inference": inference,
    "moe_forward": _forward,
    "moe_backward": _backward,
    "moe_backward_accumulate": _backward_accumulate,
    "lora_inference": inference,
    "lora_forward": lora_forward,
    "lora_backward": _lora_backward,
    "quantize_weights": _quantize_weights,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_k": _grouped_gemm_k,
    "route": _route,
    "route_backward": _router_gradient,
    "token_round": _token_round,
    "token_round_backward": _router_gradient,
    "expert_choice": _expert_choice,
    "expert_choice_backward": _router_gradient,
    "router_losses": _router_losses,
    "router_losses_backward": _router_gradient,
}


def _expect_one_device(given: dict) -> None:
    """Refuses tensors on different devices, as boxing.h. One tensor on the meta device, such as one
    of a hook, would make torch call the fake implementation. A seed is always in host memory."""
    devices = {n: t.device for n, t in given.items() if isinstance(t, Tensor)}
    if devices.get("seed", torch.device("meta")).type != "meta":
        del devices["seed"]
    for name, device in devices.items():
        if device != (of_first := next(iter(devices.values()))):
            raise ValueError(f"{name} is on {device}, must be on the others' device {of_first}")


def by_name(name: str, function):
    """Makes a function that takes the operator's arguments and calls `function` with one object,
    which has the arguments as attributes."""
    names = [argument.name for argument in _ops.arguments_of(name)]

    def run(*arguments, **keywords):
        given = dict(zip(names, arguments, strict=False)) | keywords
        _expect_one_device(given)
        return function(SimpleNamespace(**given))

    return run


def register(fakes: dict) -> None:
    for name, fake in fakes.items():
        torch.library.register_fake(f"sonicmoe_cpp::{name}", by_name(name, fake))


if _library.PROBLEM is None:
    register(FAKES)
