"""torch.library.opcheck of every operator: schema, fakes (also with symbolic sizes), autograd."""

import pytest
import sonicmoe_cpp  # noqa: F401  (registers the operators)
import torch
from reference import Layer
from torch.library import opcheck

ops = torch.ops.sonicmoe_cpp
ROUTE = (2, "softmax_after_topk", False, 1.0, 0, 0)


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
    return (*tensors, *biases, form, "swiglu", 0.0, 0.0, layer.options["gate_layout"])


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


@pytest.mark.parametrize("needs", [127, 1 | 16, 2 | 8 | 32, 0])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_layer_backward(layout, needs):
    arguments = detached(layer_arguments(gate_layout=layout))
    out, h, saved = ops.moe_forward(*arguments, None, None, None)
    backward = (torch.randn_like(out), *arguments, h, saved, needs)
    opcheck(ops.moe_backward, backward)
    main = (None, torch.zeros_like(arguments[5]), torch.zeros_like(arguments[6]))
    opcheck(ops.moe_backward_accumulate, (*backward, *main))


def test_separate_and_transposed_weights():
    arguments = list(detached(layer_arguments()))
    gate, up = (half.transpose(1, 2).contiguous() for half in arguments[5].chunk(2, dim=1))
    arguments[4:6] = gate.transpose(1, 2), up.transpose(1, 2)
    out, h, saved = ops.moe_forward(*arguments, None, None, None)
    opcheck(ops.moe_backward, (torch.randn_like(out), *arguments, h, saved, 127))


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
    arguments = (*route_arguments(), torch.tensor(3), 4, mode)
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
    """Groups of 3, 0 and 5 rows; the ninth row belongs to none and is left out."""
    g = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 8])
    gather = torch.randint(12, (9,), generator=g, dtype=torch.int32) if gathers else None
    a = torch.randn(12 if gathers else 9, 16, generator=g).to(dtype)
    weight, b = (torch.randn(*size, generator=g).to(dtype) for size in ((3, 24, 16), (9, 8)))
    for operator, other in ((ops.grouped_gemm, weight), (ops.grouped_gemm_k, b)):
        # Rows of no group are not written, so that runs are not compared here.
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
