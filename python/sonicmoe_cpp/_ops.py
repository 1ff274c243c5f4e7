"""Calls the operators, without their derivatives (_autograd.py has these)."""

from __future__ import annotations

import functools

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import _checks, _library

ops = torch.ops.sonicmoe_cpp
# If the message of an operator's error begins with a key, the error is raised as the key's class
# (boxing.h, views.h).
ERRORS = {
    "ValueError: ": ValueError,
    "NotImplementedError: ": NotImplementedError,
    "OutOfMemoryError: ": torch.OutOfMemoryError,
}


def arguments_of(name: str) -> list:
    """The arguments of an operator, as its schema lists them."""
    return [] if _library.PROBLEM else list(getattr(ops, name).default._schema.arguments)


@functools.cache
def kernel(name: str):
    """The operator without the steps that record derivatives. A call that the library does not
    support raises NotImplementedError. A call that gets no memory for its results raises
    torch.OutOfMemoryError."""
    operator = getattr(ops, name).default

    def run(*arguments):
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*arguments)
        except (RuntimeError, ValueError) as error:
            for argument, value in zip(arguments_of(name), arguments, strict=False):
                _checks.plain(argument.name, value)
            sentence = str(error)
            for beginning, kind in ERRORS.items():
                if sentence.startswith(beginning):
                    raise kind(sentence.removeprefix(beginning)) from None
            raise

    return run


def run(name: str, *arguments):
    """Calls an operator without its derivative."""
    if torch.compiler.is_compiling():
        return getattr(ops, name)(*arguments)
    return kernel(name)(*arguments)


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


def records(arguments: tuple) -> bool:
    """Whether autograd must record a call with these arguments."""
    if torch.is_grad_enabled():
        for a in arguments:
            if a is not None and isinstance(a, Tensor) and a.requires_grad:
                return True
    return False


def refuse_transforms(name: str, arguments: tuple) -> None:
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
