"""torch.library.opcheck of every operator: schema, fakes (also with symbolic sizes), autograd; and
whether operators leak memory."""

import ctypes
import re
from pathlib import Path

import pytest
import sonicmoe_cpp
import torch
from reference import Layer
from sonicmoe_cpp._call import DIFFERENTIABLE, LAYER, NEEDS, MainGradients
from sonicmoe_cpp._names import ACTIVATION, FORM, LAYOUT, ROUNDING, SCORE
from torch.library import opcheck

ops = torch.ops.sonicmoe_cpp
ROUTE = (2, SCORE["softmax_after_topk"], False, 1.0, 0, 0)


def layer_arguments(dtype=torch.float32, form="ids", **options):
    layer = Layer(12, 16, 8, 4, 2, dtype=dtype, bias=True, **options)
    weights = layer.weights
    index, second = layer.ids, None
    if form == "pairs":
        index = torch.arange(12, dtype=torch.int32).repeat_interleave(2)
        second, weights = layer.ids.flatten().int(), weights.detach().flatten().requires_grad_()
    elif form == "grouped":
        index, second = torch.tensor([0, 3, 3, 8]), torch.tensor([3, 0, 5, 4])
        weights = None
    tensors = (layer.x, index, second, weights, None, layer.w_up, layer.w_down)
    biases = (layer.b_up, layer.b_down)
    layout = LAYOUT[layer.options["gate_layout"]]
    return (*tensors, *biases, FORM[form], ACTIVATION["swiglu"], 0.0, 0.0, layout, 0)


def detached(values):
    return tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in values)


def route_arguments(bias=None):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(12, 4, generator=g).requires_grad_(), bias, *ROUTE)


@pytest.mark.parametrize("form", ["ids", "pairs", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer(dtype, form):
    arguments = layer_arguments(dtype, form)
    opcheck(ops.moe_inference, detached(arguments))
    opcheck(ops.moe_forward, (*arguments, None, None, None))


ALL = " ".join(DIFFERENTIABLE)


def bits(names: str) -> int:
    return sum(NEEDS[name] for name in names.split())


@pytest.mark.parametrize("needs", [ALL, "x w_down", "weights w_up b_up", ""])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layer_backward(dtype, layout, needs):
    arguments = detached(layer_arguments(dtype, gate_layout=layout))
    out, h, saved = ops.moe_forward(*arguments, None, None, None)
    backward = (torch.randn_like(out), *arguments, h, saved, bits(needs))
    opcheck(ops.moe_backward, backward)
    main = (None, torch.zeros_like(arguments[5]), torch.zeros_like(arguments[6]))
    opcheck(ops.moe_backward_accumulate, (*backward, *main))


def test_separate_and_transposed_weights():
    arguments = list(detached(layer_arguments()))
    gate, up = (half.transpose(1, 2).contiguous() for half in arguments[5].chunk(2, dim=1))
    arguments[4:6] = gate.transpose(1, 2), up.transpose(1, 2)
    out, h, saved = ops.moe_forward(*arguments, None, None, None)
    opcheck(ops.moe_backward, (torch.randn_like(out), *arguments, h, saved, bits(ALL)))


def test_route():
    arguments = route_arguments()
    opcheck(ops.route, arguments)
    weights, ids = ops.route(*detached(arguments))
    opcheck(ops.route_backward, (torch.randn_like(weights), ids, *detached(arguments)))
    opcheck(ops.router_losses, (ids, *arguments))
    _, counts = ops.router_losses(ids, *detached(arguments))
    opcheck(ops.router_losses_backward, (torch.randn(2), counts, *detached(arguments)))


@pytest.mark.parametrize("mode", ["nearest", "up", "down", "score", "stochastic", "balanced"])
def test_token_round(mode):
    arguments = (*route_arguments(), torch.tensor(3), 4, ROUNDING[mode])
    opcheck(ops.token_round, arguments)
    pairs = ops.token_round(*detached(arguments))
    backward = (torch.randn_like(pairs[0]), *pairs, *detached(arguments))
    opcheck(ops.token_round_backward, backward)


@pytest.mark.parametrize("capacity", [1, 5, 12, 40])
def test_expert_choice(capacity):
    logits = route_arguments()[0]
    opcheck(ops.expert_choice, (logits, capacity))
    pairs = ops.expert_choice(logits.detach(), capacity)
    opcheck(ops.expert_choice_backward, (torch.randn_like(pairs[0]), *pairs, logits.detach()))


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemm(dtype, gathers):
    """Groups of 3, 0 and 5 rows; the ninth row belongs to no group."""
    g = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 8])
    gather = torch.randint(12, (9,), generator=g, dtype=torch.int32) if gathers else None
    a = torch.randn(12 if gathers else 9, 16, generator=g).to(dtype)
    weight, b = (torch.randn(*size, generator=g).to(dtype) for size in ((3, 24, 16), (9, 8)))
    for operator, other in ((ops.grouped_gemm, weight), (ops.grouped_gemm_k, b)):
        # Rows of no group are not written, so the results of two runs are not compared here.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        opcheck(operator, (a, other, offsets, gather), test_utils=checks)
    rows = a[gather.long()] if gathers else a
    out, outer = (
        f(a, o, offsets, gather) for f, o in ((ops.grouped_gemm, weight), (ops.grouped_gemm_k, b))
    )
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for e, (begin, end) in enumerate([(0, 3), (3, 3), (3, 8)]):
        torch.testing.assert_close(out[begin:end], rows[begin:end] @ weight[e].t(), **close)
        torch.testing.assert_close(outer[e], rows[begin:end].t() @ b[begin:end], **close)


class MallInfo(ctypes.Structure):
    FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in FIELDS.split())


def allocated() -> int:
    """Bytes that malloc has handed out and that are not freed."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def test_calls_leave_no_memory_behind():
    module = sonicmoe_cpp.MoE(4, 2, 16, 8, routing="token_rounding", tile=4)
    x = torch.randn(12, 16)
    h = torch.empty(24, 16)

    def step():
        out, aux = module(x)
        (out.sum() + aux.loss).backward()
        module.zero_grad()
        ids, _ = sonicmoe_cpp.route(aux.logits.detach(), 2)
        sonicmoe_cpp.moe(x, ids, torch.ones(12, 2), module.w_up.detach(), module.w_down.detach())
        sonicmoe_cpp.h_views(h, module.w_up)

    for _ in range(100):
        step()
    before = allocated()
    for _ in range(1000):  # other threads of the process allocate a few thousand bytes, once
        step()
    assert allocated() - before < 1000 * 8


def test_calls_have_the_names_and_order_of_the_operators():
    arguments = [a.name for a in ops.moe_forward.default._schema.arguments]
    assert arguments == [*LAYER, *MainGradients._fields, "fp8_weights"]
    for name in ("moe_backward", "lora_backward", "exchange_backward"):
        schema = getattr(ops, name).default._schema
        assert [a.name for a in schema.arguments[1 : 1 + len(LAYER)]] == list(LAYER)


def test_no_operator_takes_a_string():
    """torch's C ABI leaks a string that is an argument, so no operator of the library takes one.
    Those of expert parallelism are written in Python and may."""
    every = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    found = {rest[0].split(".")[0] for library, *rest in every if library == "sonicmoe_cpp"}
    found = {name for name in found if not name.startswith("expert_parallel_")}
    assert {"moe_forward", "route_backward", "use_engine"} <= found
    for name in found:
        for overload in getattr(ops, name).overloads():
            schema = getattr(getattr(ops, name), overload)._schema
            assert not any("str" in str(argument.type) for argument in schema.arguments), schema


def test_numbers_are_those_of_the_c_interface():
    header = Path(__file__).parents[3] / "include/sonicmoe/c_api.h"
    numbers = dict(re.findall(r"SMOE_(\w+) = (\d+)", header.read_text()))
    for prefix, table in (
        ("FORM_", FORM),
        ("", ACTIVATION),
        ("SCORE_", SCORE),
        ("ROUND_", ROUNDING),
    ):
        assert table == {name: int(numbers[prefix + name.upper()]) for name in table}
