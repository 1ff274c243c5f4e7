"""Gives the operators fake implementations (the shapes of their results) and derivatives, and calls
them."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import _checks, _library
from ._names import ACTIVATION, FORM, GATED, PRECISION, ROUNDING
from ._names import UNGATED as UNGATED

ops = torch.ops.sonicmoe_cpp
# If the message of an operator's error begins with a key, the error is raised as the key's class
# (boxing.h, views.h).
ERRORS = {
    "ValueError: ": ValueError,
    "NotImplementedError: ": NotImplementedError,
    "OutOfMemoryError: ": torch.OutOfMemoryError,
}
GATED_NUMBERS = frozenset(ACTIVATION[name] for name in GATED)


def _arguments(name: str) -> list:
    """The arguments of an operator, as its schema lists them."""
    return [] if _library.PROBLEM else list(getattr(ops, name).default._schema.arguments)


# The arguments that every operator of the layer takes: tensors first, then options. The last
# argument of the moe_* operators, fp8_weights, is left out here. It is None unless the call is in
# fp8.
_LAYER = _arguments("moe_inference")[:-1]
LAYER = [argument.name for argument in _LAYER]
LAYER_TENSORS = [a.name for a in _LAYER if "Tensor" in str(a.type)]
OPTIONS = LAYER[len(LAYER_TENSORS) :]
# The arguments that have a derivative, their positions, and their bits in `needs`.
DIFFERENTIABLE = [name for name in LAYER_TENSORS if name not in ("index", "second")]
_POSITIONS = tuple(LAYER.index(name) for name in DIFFERENTIABLE)
NEEDS = {name: 1 << LAYER.index(name) for name in DIFFERENTIABLE}
# The gradients that moe_backward_accumulate adds to main gradients, and those that it returns.
ACCUMULATED = [name for name in DIFFERENTIABLE if name.startswith("w_")]
_FRESH = [name for name in DIFFERENTIABLE if name not in ACCUMULATED]


def score_dtype(t: Tensor) -> torch.dtype:
    """The dtype of scores: fp64 for fp64 tensors, else fp32."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


# ---- the layer -----------------------------------------------------------------------------------


def saved_bytes(tokens, rows, experts):
    """Bytes of metadata kept for backward, as in layer.h."""
    return 20 * rows + 16 * tokens + 1024 * experts


def _aligned(count):
    return (count + 255) // 256 * 256


def fp8_weights_bytes(experts, gates, width, hidden):
    """Bytes of quantised weights: codes in two orientations, and scales (core/fp8_layout.h)."""
    matrix = experts * width * hidden
    scales = matrix // 128**2 * 4
    return sum(2 * _aligned(n * matrix) + _aligned(n * scales) for n in (gates, 1))


def kept_h_bytes(rows, depth):
    """Bytes of an H that is kept in fp8: codes and scales (core/fp8_layout.h)."""
    return _aligned(rows * depth) + _aligned(depth // 128 * ((rows + 3) // 4 * 4) * 4)


def _gates(a) -> int:
    return 2 if a.activation in GATED_NUMBERS else 1


def _fake_quantize_weights(a):
    experts, hidden, width = a.w_down.shape
    size = fp8_weights_bytes(experts, _gates(a), width, hidden)
    return a.w_down.new_empty((size,), dtype=torch.uint8)


def fake_inference(a):
    return a.x.new_empty(a.x.shape)


def fake_forward(a):
    rows = a.x.shape[0] if a.form == FORM["grouped"] else a.index.numel()
    depth = _gates(a) * a.w_down.shape[2]
    if a.precision == PRECISION["fp8"]:
        h = a.x.new_empty((kept_h_bytes(rows, depth),), dtype=torch.uint8)
    else:
        h = a.x.new_empty((rows, depth))
    size = saved_bytes(a.x.shape[0], rows, a.w_down.shape[0])
    return a.x.new_empty(a.x.shape), h, a.x.new_empty((size,), dtype=torch.uint8)


def fake_gradient(a, name: str, bit: int = 0) -> Tensor:
    value = getattr(a, name)
    if value is None or not a.needs & (bit or NEEDS[name]):
        # An empty CPU tensor in place of a gradient that is not wanted, as nothing() of views.h.
        return torch.empty((0,), dtype=a.x.dtype, device="cpu")
    if name == "x":
        return value.new_empty(value.shape)
    return torch.empty_like(value)


def _fake_backward(a):
    return tuple(fake_gradient(a, name) for name in DIFFERENTIABLE)


def _fake_backward_accumulate(a):
    def fresh(name):
        gradient = fake_gradient(a, name)
        if not name.startswith("b_") or gradient.numel() == 0:
            return gradient
        return gradient.new_empty(gradient.shape, dtype=score_dtype(a.x))

    return tuple(fresh(name) for name in _FRESH)


@functools.cache
def _needs(wanted: tuple) -> int:
    """`needs` of the operators; wanted[i] says whether DIFFERENTIABLE[i] needs its gradient."""
    return sum(bit for bit, want in zip(NEEDS.values(), wanted, strict=True) if want)


def gradients(
    dout, layer: tuple, wanted: tuple, h, saved, main_gradients: tuple, by: str = "moe", place=()
) -> list:
    """The gradients of DIFFERENTIABLE, None for a gradient that is not wanted. Calls the operator
    {by}_backward, or {by}_backward_accumulate if there are main gradients; `place` is a tuple of
    the operator's last arguments."""
    needs = _needs(wanted)
    arguments = (dout, *layer, h, saved, needs)
    if main_gradients[1] is None:
        found = call(f"{by}_backward", *arguments, *place)
        return [g if want else None for g, want in zip(found, wanted, strict=True)]
    found = call(f"{by}_backward_accumulate", *arguments, *main_gradients, *place)
    fresh = dict(zip(_FRESH, found, strict=True))
    for bias in ("b_up", "b_down"):
        fresh[bias] = fresh[bias].to(fresh["x"].dtype)
    return [fresh.get(n) if want else None for n, want in zip(DIFFERENTIABLE, wanted, strict=True)]


def _setup_layer(ctx, inputs, output):
    # Main gradients are not saved by save_for_backward: autograd refuses saved tensors that have
    # changed, and another backward may add to main gradients before this one runs.
    *ctx.main_gradients, fp8_weights = inputs[len(LAYER) :]
    ctx.options = inputs[len(LAYER_TENSORS) : len(LAYER)]
    _, h, saved = output
    ctx.save_for_backward(*inputs[: len(LAYER_TENSORS)], h, saved, fp8_weights)


def _layer_backward(ctx, dout):
    *tensors, h, saved, fp8_weights = ctx.saved_tensors
    wanted = tuple([ctx.needs_input_grad[at] for at in _POSITIONS])
    layer = (*tensors, *ctx.options)
    found = gradients(dout, layer, wanted, h, saved, ctx.main_gradients, place=(fp8_weights,))
    of_inputs = [None] * ctx.inputs
    for at, gradient in zip(_POSITIONS, found, strict=True):
        of_inputs[at] = gradient
    return tuple(of_inputs)


# ---- routing -------------------------------------------------------------------------------------


def round_capacity(a):
    """C of token_round; the number of tokens may be symbolic."""
    (tokens, experts), k, tile = a.logits.shape, a.k, a.tile
    if a.mode == ROUNDING["down"]:
        return tokens * k
    if a.mode == ROUNDING["nearest"]:
        return tokens * k + experts * tile // 2
    return torch.sym_min(tokens * experts, tokens * k + experts * tile)


def _fake_pairs(logits: Tensor, capacity):
    return (
        logits.new_empty((capacity,), dtype=score_dtype(logits)),
        logits.new_empty((capacity,), dtype=torch.int32),
        logits.new_empty((capacity,), dtype=torch.int32),
        logits.new_empty((logits.shape[1] + 1,), dtype=torch.int64),
    )


def _fake_route(a):
    shape = (a.logits.shape[0], a.k)
    return (
        a.logits.new_empty(shape, dtype=score_dtype(a.logits)),
        a.logits.new_empty(shape, dtype=torch.int64),
    )


def _fake_token_round(a):
    return _fake_pairs(a.logits, round_capacity(a))


def _fake_expert_choice(a):
    return _fake_pairs(a.logits, a.logits.shape[1] * torch.sym_min(a.capacity, a.logits.shape[0]))


def _fake_router_losses(a):
    return (
        a.logits.new_empty((2,), dtype=score_dtype(a.logits)),
        a.logits.new_empty((a.logits.shape[1],), dtype=torch.int64),
    )


def _fake_router_gradient(a):
    return a.logits.new_empty(a.logits.shape)


def _setup_route(ctx, inputs, output):
    logits, bias, *ctx.options = inputs
    _, ids = output
    ctx.save_for_backward(logits, bias, ids)


def _route_backward(ctx, dweights):
    logits, bias, ids = ctx.saved_tensors
    dlogits = call("route_backward", dweights.contiguous(), ids, logits, bias, *ctx.options)
    return (dlogits, *[None] * (1 + len(ctx.options)))


def _setup_token_round(ctx, inputs, output):
    logits, bias, *options, seed, tile, mode = inputs
    ctx.options, ctx.rule = options, (tile, mode)
    ctx.save_for_backward(*output, logits, bias, seed)


def _token_round_backward(ctx, dweight):
    *pairs, logits, bias, seed = ctx.saved_tensors
    rest = (logits, bias, *ctx.options, seed, *ctx.rule)
    dlogits = call("token_round_backward", dweight.contiguous(), *pairs, *rest)
    return (dlogits, *[None] * (4 + len(ctx.options)))


def _setup_expert_choice(ctx, inputs, output):
    ctx.save_for_backward(*output, inputs[0])


def _expert_choice_backward(ctx, dweight):
    *pairs, logits = ctx.saved_tensors
    return call("expert_choice_backward", dweight.contiguous(), *pairs, logits), None


def _setup_router_losses(ctx, inputs, output):
    _, logits, bias, *ctx.options = inputs
    _, counts = output
    ctx.save_for_backward(counts, logits, bias)


def _router_losses_backward(ctx, dvalues):
    counts, logits, bias = ctx.saved_tensors
    rest = (counts, logits, bias, *ctx.options)
    dlogits = call("router_losses_backward", dvalues.contiguous(), *rest)
    return (None, dlogits, *[None] * (1 + len(ctx.options)))


# ---- registration --------------------------------------------------------------------------------


def _fake_grouped_gemm(a):
    rows = a.a.shape[0] if a.gather is None else a.gather.shape[0]
    return a.a.new_empty((rows, a.b.shape[1]))


def _fake_grouped_gemm_k(a):
    return a.a.new_empty((a.offsets.shape[0] - 1, a.a.shape[1], a.b.shape[1]))


def _begin(ctx, inputs) -> None:
    # Otherwise autograd makes a zero gradient for every unused output, also for H.
    ctx.set_materialize_grads(False)
    ctx.inputs = len(inputs)


def of_first_output(setup, backward):
    """setup and backward of an operator of which only the first output is differentiable."""

    def setup_once(ctx, inputs, output):
        _begin(ctx, inputs)
        ctx.mark_non_differentiable(*output[1:])
        setup(ctx, inputs, output)

    def differentiate(ctx, gradient, *others):
        if gradient is None:
            return (None,) * ctx.inputs
        return backward(ctx, gradient)

    return setup_once, differentiate


def once(name: str):
    """The derivative of a backward: raises an error, because there is no second derivative."""

    def setup(ctx, inputs, output):
        pass

    def refuse(ctx, *_gradients):
        raise NotImplementedError(f"sonicmoe_cpp.{name} has no second derivative")

    return setup, refuse


# The shapes of an operator's results, as a function of its arguments by name.
FAKES = {
    "moe_inference": fake_inference,
    "moe_forward": fake_forward,
    "moe_backward": _fake_backward,
    "moe_backward_accumulate": _fake_backward_accumulate,
    "quantize_weights": _fake_quantize_weights,
    "grouped_gemm": _fake_grouped_gemm,
    "grouped_gemm_k": _fake_grouped_gemm_k,
    "route": _fake_route,
    "route_backward": _fake_router_gradient,
    "token_round": _fake_token_round,
    "token_round_backward": _fake_router_gradient,
    "expert_choice": _fake_expert_choice,
    "expert_choice_backward": _fake_router_gradient,
    "router_losses": _fake_router_losses,
    "router_losses_backward": _fake_router_gradient,
}
DERIVATIVES = {
    "moe_forward": of_first_output(_setup_layer, _layer_backward),
    "route": of_first_output(_setup_route, _route_backward),
    "token_round": of_first_output(_setup_token_round, _token_round_backward),
    "expert_choice": of_first_output(_setup_expert_choice, _expert_choice_backward),
    "router_losses": of_first_output(_setup_router_losses, _router_losses_backward),
} | {
    name: once(name)
    for name in (
        "moe_backward",
        "exchange_backward",
        "route_backward",
        "token_round_backward",
        "expert_choice_backward",
        "router_losses_backward",
    )
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
    names = [argument.name for argument in _arguments(name)]

    def run(*arguments, **keywords):
        given = dict(zip(names, arguments, strict=False)) | keywords
        _expect_one_device(given)
        return function(SimpleNamespace(**given))

    return run


def register(fakes: dict, derivatives: dict) -> None:
    """Registers fake implementations and derivatives with torch; needs the loaded library."""
    DERIVATIVES.update(derivatives)
    for name, fake in fakes.items():
        torch.library.register_fake(f"sonicmoe_cpp::{name}", by_name(name, fake))
    for name, (setup, backward) in derivatives.items():
        torch.library.register_autograd(f"sonicmoe_cpp::{name}", backward, setup_context=setup)


# ---- calling -------------------------------------------------------------------------------------


@functools.cache
def _kernel(name: str):
    """The operator without the steps that record derivatives. A call that the library does not
    support raises NotImplementedError. A call that gets no memory for its results raises
    torch.OutOfMemoryError."""
    operator = getattr(ops, name).default

    def run(*arguments):
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*arguments)
        except (RuntimeError, ValueError) as error:
            for argument, value in zip(_arguments(name), arguments, strict=False):
                _checks.plain(argument.name, value)
            sentence = str(error)
            for beginning, kind in ERRORS.items():
                if sentence.startswith(beginning):
                    raise kind(sentence.removeprefix(beginning)) from None
            raise

    return run


def function(name: str, forward, backward):
    """Makes a callable that runs an autograd.Function with this forward and backward. The Function
    that register_autograd makes takes several times as much host time, so only graphs use it."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), parts)
    # Skips the Python part of Function.apply, which only functorch's transforms need.
    return super(torch.autograd.Function, function).apply


@functools.cache
def _recorded(name: str):
    """The operator with its derivative."""
    setup, backward = DERIVATIVES[name]
    kernel = _kernel(name)

    def forward(ctx, *arguments):
        output = kernel(*arguments)
        setup(ctx, arguments, output)
        return output

    return function(name, forward, backward)


def _leaf_of(node):
    """The node of the parameter that a weight is, or of which it is a view or a cast."""
    while node is not None and node.next_functions:
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return node


def _asked(ctx, tensors: tuple, wanted: tuple, main_gradients: tuple) -> tuple:
    """(wanted, main_gradients) as the running backward asks. backward(inputs=[x]) adds nothing to
    the main gradients of weights that are not among the inputs. autograd.grad never adds to main
    gradients, as it never adds to .grad: it returns the gradients."""
    if main_gradients[1] is None:
        return wanted, main_gradients
    nodes = iter([node for node, _ in ctx.next_functions])  # of those that are not None
    nodes = [None if t is None else next(nodes) for t in tensors]
    asked = list(wanted)
    try:
        for at, name in enumerate(DIFFERENTIABLE):
            leaf = _leaf_of(nodes[at]) if wanted[at] and name in ACCUMULATED else None
            if leaf is not None:
                asked[at] = torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch's answer for a leaf whose gradient autograd.grad returns
        return wanted, (None, None, None)
    return tuple(asked), main_gradients


@functools.cache
def _recorded_layer():
    """moe_forward with its derivative, as a function of DIFFERENTIABLE and of one tuple with the
    rest: (index, second), options, main gradients, quantised weights. Returns `out` alone. The
    tuple saves host time: each argument and output of a Function costs some."""
    kernel = _kernel("moe_forward")

    def forward(ctx, x, *others):
        *others, (routing, options, main_gradients, fp8_weights) = others
        tensors = (x, *routing, *others)
        out, h, saved = kernel(*tensors, *options, *main_gradients, fp8_weights)
        ctx.set_materialize_grads(False)
        ctx.rest = options, main_gradients
        ctx.save_for_backward(*tensors, h, saved, fp8_weights)
        return out

    def backward(ctx, dout):
        wanted = ctx.needs_input_grad[:-1]
        if dout is None:
            return (*[None] * len(wanted), None)
        *tensors, h, saved, fp8_weights = ctx.saved_tensors
        options, main_gradients = ctx.rest
        of_graph = (tensors[0], *tensors[3:])
        wanted, main_gradients = _asked(ctx, of_graph, wanted, main_gradients)
        layer, place = (*tensors, *options), (fp8_weights,)
        return *gradients(dout, layer, wanted, h, saved, main_gradients, place=place), None

    return function("moe_forward", forward, backward)


@functools.cache
def _recorded_route():
    """Like _recorded("route") for calls without a bias: a function of the logits and of one tuple
    with the rest of the arguments."""
    kernel = _kernel("route")

    def forward(ctx, logits, rule):
        weights, ids = kernel(logits, None, *rule)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids)
        ctx.rule = rule
        ctx.save_for_backward(logits, ids)
        return weights, ids

    def backward(ctx, dweights, _ids):
        if dweights is None:
            return None, None
        logits, ids = ctx.saved_tensors
        arguments = (dweights.contiguous(), ids, logits, None, *ctx.rule)
        return call("route_backward", *arguments), None

    return function("route", forward, backward)


@torch._disable_dynamo  # which would trace it with tensors that have no tangent
def _is_transformed(value) -> bool:
    """Whether forward-mode AD or a transform of torch.func differentiates with respect to `value`,
    or vmap hides from autograd that it requires a gradient."""
    if not isinstance(value, Tensor):
        return False
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
        return True
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        if torch._C._functorch.is_gradtrackingtensor(value):
            return True
        value = torch._C._functorch.get_unwrapped(value)
        if value.requires_grad:
            return True
    return False


# The functions below run in every call. They use no generators and few functions, because each
# adds to the host time of a call.


def may_autocast() -> bool:
    """Whether autocast may be enabled for some device; always true in a graph."""
    return torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()


def records(*arguments) -> bool:
    """Whether autograd must record a call with these arguments."""
    if torch.is_grad_enabled():
        for a in arguments:
            if isinstance(a, Tensor) and a.requires_grad:
                return True
    return False


def refuse_transforms(name: str, *arguments) -> None:
    """Raises NotImplementedError if the call would be differentiated in another way than by
    autograd's backward. Without this check these derivatives would silently be 0."""
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return
    # A graph does not show to what the tensors belong. Outside of fullgraph=True the error makes
    # torch.compile call the function itself, which comes here again.
    if torch.compiler.is_compiling() or any(map(_is_transformed, arguments)):
        raise NotImplementedError(
            f"sonicmoe_cpp.{name} is called under torch.func (grad, jvp, vmap, ...) or "
            "forward-mode AD, for which it has no rules: use torch.autograd"
        )


def run(name: str, *arguments):
    """Calls an operator without its derivative."""
    if torch.compiler.is_compiling():
        return getattr(ops, name)(*arguments)
    return _kernel(name)(*arguments)


def call(name: str, *arguments):
    """Calls an operator. Records its derivative if autograd needs it."""
    refuse_transforms(name, *arguments)
    if torch.compiler.is_compiling():
        return getattr(ops, name)(*arguments)
    return (_recorded if records(*arguments) else _kernel)(name)(*arguments)


def route(logits: Tensor, bias: Tensor | None, *rule) -> tuple[Tensor, Tensor]:
    """Calls the operator route; returns (weights, ids)."""
    if bias is not None or torch.compiler.is_compiling() or not records(logits):
        return call("route", logits, bias, *rule)
    refuse_transforms("route", logits)
    return _recorded_route()(logits, rule)


def layer(
    tensors: tuple, options: tuple, main_gradients: tuple, fp8_weights: Tensor | None = None
) -> Tensor:
    """The output of the layer. If autograd records the call, it keeps the tensors that backward
    needs. `tensors` are LAYER_TENSORS, `options` OPTIONS."""
    refuse_transforms("moe_forward", *tensors)
    if not records(*tensors):
        return run("moe_inference", *tensors, *options, fp8_weights)
    if torch.compiler.is_compiling():
        return ops.moe_forward(*tensors, *options, *main_gradients, fp8_weights)[0]
    x, index, second, *others = tensors
    return _recorded_layer()(x, *others, ((index, second), options, main_gradients, fp8_weights))


if _library.PROBLEM is None:
    register(FAKES, DERIVATIVES)
