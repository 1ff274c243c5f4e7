"""Flops of the operators, for torch.utils.flop_counter.FlopCounterMode.

Only matrix products are counted, with two flops for each multiplication and its addition. The
number of routed rows is on the device, so all C rows that a call can have are counted (T*K for
top-k ids; token rounding usually fills fewer). Backward computes activations again, which are
no products and are not counted.

Expert parallelism over peer memory, and every compiled call of it, is one operator. Its arguments
do not say how many rows this rank's experts receive. So a rank counts the rows of its own tokens,
and the sum over all ranks is right. An eager all-to-all calls the operators of the layer with the
received rows, which are counted.
"""

import importlib.util
import math
import sys
from types import SimpleNamespace

import torch

from . import _packed_ops
from ._call import LAYER_TENSORS, LORA_NEEDS, NEEDS
from ._fakes import by_name
from ._names import FORM

ops = torch.ops.sonicmoe_cpp
COUNTER = "torch.utils.flop_counter"


def _one_product(a) -> int:
    """Flops of all rows times one matrix (d, n). `a` has shapes instead of tensors."""
    rows = a.x[0] if a.form == FORM["grouped"] else math.prod(a.index)
    _, hidden, width = a.w_down
    return 2 * rows * hidden * width


def _ups(a) -> int:
    """The number of matrices (d, n) in the up projection: gate and up, or up alone."""
    return 2 if a.w_gate is not None else a.w_up[1] // a.w_down[2]


def _forward(a) -> int:
    return _one_product(a) * (_ups(a) + 1)


def _backward(a) -> int:
    def wanted(*names):
        return any(a.needs & NEEDS[name] for name in names)

    products = 0
    if wanted("x", "weights", "w_gate", "w_up", "b_up"):
        products += 1  # the gradient of the activations
    products += wanted("w_down")
    products += _ups(a) * (wanted("x") + wanted("w_gate", "w_up"))
    return _one_product(a) * products


def _low_rank(a) -> tuple[int, ...]:
    """Flops of all rows times A and times B of the up projection, then of the down projection."""
    rows = a.x[0] if a.form == FORM["grouped"] else math.prod(a.index)
    factors = (a.up_a, a.up_b, a.down_a, a.down_b)
    return tuple(0 if f is None else 2 * rows * math.prod(f[1:]) for f in factors)


def _lora_forward(a) -> int:
    return _forward(a) + sum(_low_rank(a))


def _lora_backward(a) -> int:
    up_a, up_b, down_a, down_b = _low_rank(a)
    wanted = {name: bool(a.needs & bit) for name, bit in LORA_NEEDS.items()}
    flops = _one_product(a) * (1 + _ups(a) * wanted["x"])
    flops += (down_a + down_b) * (1 + wanted["down_b"]) + down_a * wanted["down_a"]
    flops += up_a * (wanted["x"] + wanted["up_a"])
    return flops + up_b * ((wanted["x"] or wanted["up_a"]) + wanted["up_b"])


def _unpacked(a):
    """The arguments of an operator with packed weights as those of an operator of the layer."""
    shapes = {"w_gate": None, "w_up": a.up_form[4:7], "w_down": a.down_form[4:7]}
    return SimpleNamespace(**vars(a), **shapes)


def _packed_forward(a) -> int:
    return _lora_forward(_unpacked(a))


def _packed_backward(a) -> int:
    backward = _lora_backward if _packed_ops.with_factors(a) else _backward
    layer = _unpacked(a)
    layer.needs = _packed_ops.needs_of(a)[1]
    return backward(layer)


def _grouped_gemm(a) -> int:
    rows = a.a[0] if a.gather is None else a.gather[0]
    return 2 * rows * math.prod(a.b[1:])


def _grouped_gemm_k(a) -> int:
    return 2 * math.prod(a.b) * a.a[1]


def _exchange_backward(a) -> int:
    return (_lora_backward if _packed_ops.with_factors(a) else _backward)(a)


def _compiled_forward(a) -> int:
    return _forward(SimpleNamespace(**vars(a), form=FORM["ids"]))  # of pairs, too


def _compiled_backward(a) -> int:
    layer = dict(zip(LAYER_TENSORS, a.tensors, strict=True))
    return _backward(SimpleNamespace(**layer, needs=a.needs, form=FORM["ids"]))


FORMULAS = {
    "moe_inference": _forward,
    "moe_forward": _forward,
    "moe_backward": _backward,
    "moe_backward_accumulate": _backward,
    "lora_inference": _lora_forward,
    "lora_forward": _lora_forward,
    "lora_backward": _lora_backward,
    "packed_inference": _packed_forward,
    "packed_forward": _packed_forward,
    "packed_backward": _packed_backward,
    "exchange_inference": _lora_forward,
    "exchange_forward": _lora_forward,
    "exchange_backward": _exchange_backward,
    "exchange_backward_accumulate": _backward,
    # Of a step in parts, its begin counts the whole step.
    "exchange_begin_forward": _lora_forward,
    "exchange_begin_backward": _exchange_backward,
    "exchange_begin_backward_accumulate": _backward,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_k": _grouped_gemm_k,
}
# The operators of distributed/_compiled.py, which exist from its import on.
COMPILED = {
    "expert_parallel_inference": _compiled_forward,
    "expert_parallel_forward": _compiled_forward,
    "expert_parallel_backward": _compiled_backward,
}


def _register(formulas: dict) -> None:
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in formulas.items():
        named = by_name(name, formula)

        def flops(*shapes, out_shape=None, named=named, **keywords):
            return named(*shapes, **keywords)

        register_flop_formula(getattr(ops, name))(flops)


class _Importer:
    """Registers the formulas when torch.utils.flop_counter is imported. Importing it here would
    import triton, where it is installed."""

    def find_spec(self, name, path=None, target=None):
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            _register(FORMULAS)

        spec.loader.exec_module = execute_and_register
        return spec


def register_compiled() -> None:
    """As register(), for the formulas of COMPILED."""
    FORMULAS.update(COMPILED)
    if COUNTER in sys.modules:
        _register(COMPILED)


def register() -> None:
    """Registers the formulas with FlopCounterMode: now, or when its module is imported."""
    if COUNTER in sys.modules:
        _register(FORMULAS)
    else:
        sys.meta_path.insert(0, _Importer())
