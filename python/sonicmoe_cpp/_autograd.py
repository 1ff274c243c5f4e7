"""The derivatives of the operators, and calls that autograd may record.

A Derivative says by names how a call is differentiated. From this one description come both forms:
register() gives it to torch for graphs (torch.compile, export), and recorded() makes an
autograd.Function for eager calls. The Function that torch makes of a registered derivative takes
several times as much host time, so only graphs use it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import _library, _ops
from ._call import ACCUMULATED, DIFFERENTIABLE, FRESH, LORA_NEEDS, Call, MainGradients
from ._fakes import FAKES
from ._ops import ops, records, refuse_transforms


class Derivative(NamedTuple):
    """How a call is differentiated with respect to its first output."""

    inputs: tuple  # names of the arguments
    outputs: tuple  # names of the outputs; an eager call may have more, which are tensors
    gradients: tuple  # names of the arguments that have a gradient
    # What `backward` takes after the gradient of the first output: names of arguments and outputs,
    # and "needs", in which bit i asks for the gradient of argument i. Further outputs come last.
    takes: tuple
    backward: Callable  # returns the `gradients`; what it returns for others is ignored
    saved: frozenset  # the names whose values autograd saves: tensors
    # Main gradients are not saved: autograd refuses saved tensors that have changed, and another
    # backward may add to main gradients before this one runs.
    main_gradients: tuple = ()
    returned: int | None = 1  # outputs that an eager call returns; None: all
    always: bool = False  # backward runs without a gradient of the first output, too: with zeros
    once: bool = (
        False  # backward is no operator, so autograd must be told that it has no derivative
    )


def _picker(names: tuple, wanted: tuple) -> Callable:
    """A function that returns the values of `wanted` from the values of `names`, quickly."""
    at = [names.index(name) for name in wanted]
    first = at[0] if at else 0
    if at == list(range(first, first + len(at))):
        return operator.itemgetter(slice(first, first + len(at)))
    return operator.itemgetter(*at)


class _Places:
    """Where a derivative's names are, among the values that its functions have."""

    def __init__(self, d: Derivative):
        known = (*d.inputs, *d.outputs)
        needed = [name for name in d.takes if name in known and name not in d.main_gradients]
        saved = tuple(name for name in needed if name in d.saved)
        rest = (*[name for name in needed if name not in d.saved], *d.main_gradients)
        self.outputs_end = len(known)
        self.saved = _picker(known, saved)
        self.rest = _picker(known, rest)
        # backward's values: the gradient, the bits, `rest`, `saved`, and further outputs.
        values = ("", "" if "needs" in known else "needs", *rest, *saved)
        self.values_end = len(values)
        self.arguments = _picker(values, ("", *d.takes))
        bits = [1 << d.inputs.index(name) for name in d.gradients]
        self.needs = functools.cache(
            lambda wanted: sum(bit for bit, want in zip(bits, wanted, strict=True) if want)
        )
        # The values of `gradients`, for the derivatives whose backward adds to main gradients.
        self.differentiated = _picker(values, d.gradients) if d.main_gradients else None


def _differentiate(d: Derivative, places: _Places, wanted: tuple, values: tuple) -> list:
    """The gradients, None for those that are not wanted."""
    further = values[places.values_end :]
    found = d.backward(*places.arguments(values), *further)
    return [g if want else None for g, want in zip(found, wanted, strict=True)]


# ---- in graphs -----------------------------------------------------------------------------------


def register(name: str, d: Derivative) -> None:
    """Registers the derivative of an operator with torch, for graphs."""
    places = _Places(d)
    positions = [d.inputs.index(gradient) for gradient in d.gradients]

    def setup(ctx, inputs, output):
        values = (*inputs, *output)
        ctx.mark_non_differentiable(*output[1:])
        # Otherwise autograd makes a zero gradient for every unused output, also for H.
        ctx.set_materialize_grads(d.always)
        ctx.rest = places.rest(values)
        ctx.save_for_backward(*places.saved(values))

    def backward(ctx, gradient, *_):
        of_inputs = [None] * len(d.inputs)
        if gradient is None:
            return tuple(of_inputs)
        wanted = tuple([ctx.needs_input_grad[at] for at in positions])
        values = (gradient, places.needs(wanted), *ctx.rest, *ctx.saved_tensors)
        found = _differentiate(d, places, wanted, values)
        for at, gradient in zip(positions, found, strict=True):
            of_inputs[at] = gradient
        return tuple(of_inputs)

    torch.library.register_autograd(f"sonicmoe_cpp::{name}", backward, setup_context=setup)


# ---- in eager calls ------------------------------------------------------------------------------


def _function(name: str, forward, backward) -> Callable:
    """A callable that runs an autograd.Function with this forward and backward."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), parts)
    # Skips the Python part of Function.apply, which only functorch's transforms need.
    return super(torch.autograd.Function, function).apply


def _leaf_of(node):
    """The node of the parameter that a weight is, or of which it is a view or a cast."""
    while node is not None and node.next_functions:
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return node


def _asked(ctx, tensors: tuple, wanted: tuple) -> tuple | None:
    """`wanted` as the running backward asks: backward(inputs=[x]) adds nothing to the main
    gradients of weights that are not among the inputs. None for autograd.grad, which never adds to
    main gradients, as it never adds to .grad: it returns the gradients."""
    nodes = iter([node for node, _ in ctx.next_functions])  # of those that are not None
    nodes = [None if t is None else next(nodes) for t in tensors]
    asked = list(wanted)
    try:
        for at, name in enumerate(DIFFERENTIABLE):
            leaf = _leaf_of(nodes[at]) if wanted[at] and name in ACCUMULATED else None
            if leaf is not None:
                asked[at] = torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch's answer for a leaf whose gradient autograd.grad returns
        return None
    return tuple(asked)


def recorded(
    name: str, d: Derivative, kernel: Callable, around: Callable = lambda backward: backward
) -> Callable:
    """`kernel`, which returns the outputs, with its derivative. `around` may replace the backward
    of the Function by one that calls it."""
    places = _Places(d)
    # The Function takes the arguments that have a gradient, and then all of them as one tuple: each
    # argument and output of a Function costs host time.
    of_gradients = _picker(d.inputs, d.gradients)
    # Names of this function are faster to read than attributes.
    always, returns_all, end = d.always, d.returned is None, places.outputs_end
    saved_of, rest_of = places.saved, places.rest

    def forward(ctx, *arguments):
        inputs = arguments[-1]
        outputs = kernel(*inputs)
        values = inputs + outputs
        if not always:
            ctx.set_materialize_grads(False)
        ctx.rest = rest_of(values)
        if returns_all:
            ctx.save_for_backward(*saved_of(values))
            ctx.mark_non_differentiable(*outputs[1:])
            return outputs
        ctx.save_for_backward(*saved_of(values), *values[end:])
        return outputs[0]

    def backward(ctx, gradient, *_):
        wanted = ctx.needs_input_grad[:-1]
        if gradient is None:
            return (*[None] * len(wanted), None)
        rest = ctx.rest
        values = (gradient, places.needs(wanted), *rest, *ctx.saved_tensors)
        if d.main_gradients and rest[-1] is not None:
            asked = _asked(ctx, places.differentiated(values), wanted)
            if asked is None:
                rest = (*rest[: -len(d.main_gradients)], *[None] * len(d.main_gradients))
            else:
                wanted = asked
            values = (gradient, places.needs(wanted), *rest, *ctx.saved_tensors)
        return *_differentiate(d, places, wanted, values), None

    apply = _function(name, forward, around(backward))

    def run(*inputs):
        return apply(*of_gradients(inputs), inputs)

    return run


def _refuses(name: str) -> Callable:
    """The derivative of a backward: raises an error, because there is no second derivative."""

    def backward(ctx, *_gradients):
        raise NotImplementedError(f"sonicmoe_cpp.{name} has no second derivative")

    return backward


# ---- the table -----------------------------------------------------------------------------------


def layer_gradients(
    by: str, arguments: tuple, needs: int, main_gradients: tuple, last: tuple = ()
) -> list:
    """The gradients of DIFFERENTIABLE. Calls the operator {by}_backward, or
    {by}_backward_accumulate if there are main gradients. `arguments` are dout, LAYER, h and saved;
    `last` are the operator's last arguments. Gradients that are not in `needs` are empty or None,
    and so are those that were added to main gradients."""
    found = launch_gradients(by, arguments, needs, main_gradients, last)
    return gathered(found, main_gradients)


def launch_gradients(
    by: str, arguments: tuple, needs: int, main_gradients: tuple, last: tuple = ()
) -> list:
    """The results of the operator of layer_gradients(), which gathered() names. An operator that
    only begins a step has not written them yet."""
    if main_gradients[-1] is None:
        return call(f"{by}_backward", *arguments, needs, *last)
    return call(f"{by}_backward_accumulate", *arguments, needs, *main_gradients, *last)


def gathered(found: list, main_gradients: tuple) -> list:
    """The gradients of layer_gradients()."""
    if main_gradients[-1] is None:
        return found
    fresh = dict(zip(FRESH, found, strict=True))
    for bias in ("b_up", "b_down"):
        fresh[bias] = fresh[bias].to(fresh["x"].dtype)
    return [fresh.get(name) for name in DIFFERENTIABLE]


def _moe_backward(*values):
    *arguments, needs, g_gate, g_up, g_down, fp8_weights = values
    main_gradients = (g_gate, g_up, g_down)
    return layer_gradients("moe", arguments, needs, main_gradients, (fp8_weights,))


def _routing_backward(name: str) -> Callable:
    def backward(gradient, *rest):
        return (call(name, gradient.contiguous(), *rest),)

    return backward


def of_operator(name: str, gradients: tuple, by: str, backward: Callable, **more) -> Derivative:
    """The derivative of an operator. `backward` takes the arguments of the operator `by`."""
    schema = getattr(ops, name).default._schema
    tensors = [a.name for a in (*schema.arguments, *schema.returns) if "Tensor" in str(a.type)]
    return Derivative(
        inputs=tuple(a.name for a in schema.arguments),
        outputs=tuple(a.name for a in schema.returns),
        gradients=gradients,
        takes=tuple(a.name for a in _ops.arguments_of(by)[1:]),
        backward=backward,
        saved=frozenset(tensors),
        **more,
    )


def plain_backward(name: str) -> Callable:
    """The backward that is an operator, with its arguments as they are."""
    return lambda *arguments: call(name, *arguments)


DERIVATIVES: dict[str, Derivative] = {}


def add(derivatives: dict[str, Derivative], backwards: tuple) -> None:
    """Adds rows to the table, and the operators that have no second derivative."""
    DERIVATIVES.update(derivatives)
    for name, derivative in derivatives.items():
        register(name, derivative)
    for name in backwards:
        torch.library.register_autograd(f"sonicmoe_cpp::{name}", _refuses(name))


def _add_all() -> None:
    def routing(name):
        by = f"{name}_backward"
        return of_operator(name, ("logits",), by, _routing_backward(by), returned=None)

    rows = {
        "moe_forward": of_operator(
            "moe_forward",
            DIFFERENTIABLE,
            "moe_backward_accumulate",
            _moe_backward,
            main_gradients=MainGradients._fields,
        ),
        "lora_forward": of_operator(
            "lora_forward", tuple(LORA_NEEDS), "lora_backward", plain_backward("lora_backward")
        ),
        **{n: routing(n) for n in ("route", "token_round", "expert_choice", "router_losses")},
    }
    backwards = [name for name in FAKES if name.endswith("_backward")]
    add(rows, (*backwards, "exchange_backward", "exchange_begin_backward"))


# ---- calls ---------------------------------------------------------------------------------------


@functools.cache
def _recorded(name: str) -> Callable:
    kernel = _ops.kernel(name)
    if name in DERIVATIVES:
        return recorded(name, DERIVATIVES[name], kernel)
    return _function(name, lambda ctx, *arguments: kernel(*arguments), _refuses(name))


def call(name: str, *arguments):
    """Calls an operator. Records its derivative if autograd needs it; then an eager call of the
    layer returns the output alone."""
    refuse_transforms(name, arguments)
    if torch.compiler.is_compiling():
        return getattr(ops, name)(*arguments)
    return (_recorded if records(arguments) else _ops.kernel)(name)(*arguments)


def layer(call: Call, fp8_weights: Tensor | None = None) -> Tensor:
    """The output of the layer. If autograd records the call, it keeps the tensors that backward
    needs."""
    tensors, options, main_gradients = call[:3]
    refuse_transforms("moe_forward", tensors)
    if not records(tensors):
        return _ops.run("moe_inference", *tensors, *options, fp8_weights)
    arguments = (*tensors, *options, *main_gradients, fp8_weights)
    if torch.compiler.is_compiling():
        return ops.moe_forward(*arguments)[0]
    return _recorded("moe_forward")(*arguments)


def output_of(family: str, arguments: tuple) -> Tensor:
    """The output of {family}_inference, or of {family}_forward if autograd records the call."""
    name = f"{family}_forward"
    refuse_transforms(name, arguments)
    if not records(arguments):
        return _ops.run(f"{family}_inference", *arguments)
    if torch.compiler.is_compiling():
        return getattr(ops, name)(*arguments)[0]
    return _recorded(name)(*arguments)


def lora(call: Call, fp8_weights: Tensor | None) -> Tensor:
    """As layer(), with low-rank factors."""
    return output_of("lora", (*call.tensors, *call.options, *call.factors, fp8_weights))


if _library.PROBLEM is None:
    _add_all()
