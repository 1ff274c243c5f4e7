"""The operators of the layer with packed weights, and the memory into which they unpack.

The operators packed_* unpack both weights and call the operators of the layer on them, so their
results have the layer's bits. The unpacked weights are not tensors of autograd: a forward keeps the
packed tensors, and its backward unpacks them again. In graphs of torch.compile each of these
operators is one node, so a graph keeps no unpacked weights either.

Memory: a device has one buffer for w_up and one for w_down, which all layers share.
- Forward unpacks into it. Backward does so only if the buffer holds other weights by then; after a
  recomputation of the layer (checkpointing) it holds the right ones.
- A call takes the buffer out of the table while it uses it, so that a call of another thread makes
  a buffer of its own. Work on another CUDA stream would not wait for the kernels that read the
  buffer, so a call on another stream makes a new buffer too.
- While a CUDA graph is captured the buffers are not used: a replay would write to memory that may
  have been freed, and would not unpack again. The memory is the graph's then.
- In graphs of torch.compile they are not used either, and backward always unpacks: with
  mode="reduce-overhead" torch refuses memory of a graph's pool that outlives the call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import _autograd, _fakes, _library, _ops
from ._call import FACTORS, LORA_NEEDS, NEEDS, OPTIONS, Call, Factors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The tensors of packed weights, and the numbers that describe them: the place of the format in
# _names.PACKED, that of the dtype in DTYPES, the shape (E, out, in).
PARTS = ("codes", "scales", "nested_map", "nested_scales", "nested_offset")
FORM = ("format", "block", "dtype", "transposed", "experts", "out", "in")
OPERANDS = ("up", "down")
_NO_FACTORS = Factors(None, None, None, None, 1.0, 1.0)
# The arguments that have a derivative.
DIFFERENTIABLE = ("x", "weights", "b_up", "b_down", *FACTORS)
_LAYER_TENSORS = {"x": "Tensor", "index": "Tensor", "second": "Tensor?", "weights": "Tensor?"}
_LAYER_TENSORS |= {"b_up": "Tensor?", "b_down": "Tensor?"}
_PACKED = {
    f"{operand}_{part}": "Tensor" if part in ("codes", "scales") else "Tensor?"
    for operand in OPERANDS
    for part in PARTS
}
_FORWARD = (
    _LAYER_TENSORS
    | _PACKED
    | dict.fromkeys(FACTORS, "Tensor?")
    | {name: "float" if name in ("alpha", "limit") else "int" for name in OPTIONS}
    | {"up_scale": "float", "down_scale": "float", "up_form": "int[]", "down_form": "int[]"}
    | {"shares": "bool"}  # whether the call uses the buffers
)
# Bit i of `needs` of packed_backward asks for the gradient of argument i of packed_forward.
PACKED_NEEDS = {name: 1 << list(_FORWARD).index(name) for name in DIFFERENTIABLE}
_BACKWARD = {"dout": "Tensor"} | _FORWARD | {"h": "Tensor", "saved": "Tensor", "needs": "int"}


class _Kept(NamedTuple):
    memory: Tensor  # (bytes,) uint8
    stream: int
    content: tuple | None  # what was unpacked into it; None: unknown


_kept: dict[tuple[torch.device, str], _Kept] = {}


def release_buffers() -> None:
    """Frees the memory into which calls with packed weights unpack. The next call allocates it
    again."""
    _kept.clear()


def _content(tensors: tuple, form: tuple) -> tuple | None:
    """A key of the unpacked values, or None if a change of the packed tensors cannot be seen."""
    if any(t.is_inference() for t in tensors):
        return None
    memory = ((StorageWeakRef(t.untyped_storage()), t.data_ptr(), t._version) for t in tensors)
    return tuple(form), *memory


def stored_shape(form) -> tuple[int, int, int]:
    """The shape of the tensor of which the codes are: (E, out, in) or (E, in, out)."""
    experts, rows, columns = form[4:7]
    return (experts, columns, rows) if form[3] else (experts, rows, columns)


class _Unpacked:
    """The unpacked weights of an operand, while a call uses them: tensor() unpacks, keep() puts the
    memory back for the next call."""

    def __init__(self, a, operand: str):
        """`a` has the arguments of an operator packed_*."""
        self.parts = tuple(getattr(a, f"{operand}_{part}") for part in PARTS)
        self.given = tuple(t for t in self.parts if t is not None)
        self.form = tuple(getattr(a, f"{operand}_form"))
        device = self.given[0].device
        self.key = device, operand
        cuda = device.type == "cuda"
        self.stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
        self.shares = a.shares and not (cuda and torch.cuda.is_current_stream_capturing())

    def tensor(self, may_hold: bool) -> Tensor:
        """The weight (E, out, in). `may_hold`: it need not be unpacked again if the memory still
        holds it."""
        dtype = DTYPES[self.form[2]]
        shape = stored_shape(self.form)
        size = shape[0] * shape[1] * shape[2] * dtype.itemsize
        before = _kept.pop(self.key, None) if self.shares else None
        content = _content(self.given, self.form)
        fits = before is not None and before.stream == self.stream
        if fits and before.memory.numel() >= size:
            memory = before.memory
        else:
            before = None  # is freed first
            # An inference tensor could not be used by a later call with autograd.
            with torch.inference_mode(False):
                memory = torch.empty((size,), dtype=torch.uint8, device=self.key[0])
        out = memory[:size].view(dtype).view(shape)
        holds = before is not None and content is not None and before.content == content
        if not (may_hold and holds):
            _ops.run("unpack_weights", out, *self.parts, *self.form[:2])
        self.kept = _Kept(memory, self.stream, content)
        return out.transpose(1, 2) if self.form[3] else out

    def keep(self) -> None:
        if self.shares:
            _kept[self.key] = self.kept


def _call(by: str, a, before: tuple, after: tuple, may_hold: bool):
    """Runs an operator of the layer, or that with factors, on the unpacked weights. before and
    after are the first and last arguments of a backward."""
    operands = [_Unpacked(a, operand) for operand in OPERANDS]
    up, down = (o.tensor(may_hold).to(a.x.dtype) for o in operands)
    layer = (a.x, a.index, a.second, a.weights, None, up, down, a.b_up, a.b_down)
    layer += tuple(getattr(a, option) for option in OPTIONS)
    factors = tuple(getattr(a, name) for name in FACTORS)
    if with_factors(a):
        family, rest = "lora", (*factors, a.up_scale, a.down_scale, None)
    elif by == "forward":
        family, rest = "moe", (None, None, None, None)
    else:
        family, rest = "moe", (None,)
    result = _ops.run(f"{family}_{by}", *before, *layer, *after, *rest)
    for operand in operands:
        operand.keep()
    return result


def with_factors(a) -> bool:
    return a.up_a is not None or a.down_a is not None


def _inference(a):
    return _call("inference", a, (), (), may_hold=False)


def _forward(a):
    return _call("forward", a, (), (), may_hold=False)


def needs_of(a) -> tuple[dict[str, int], int]:
    """The bits of `needs` of the operator that packed_backward calls, and its `needs`."""
    bits = LORA_NEEDS if with_factors(a) else NEEDS
    wanted = [name for name, bit in PACKED_NEEDS.items() if a.needs & bit]
    return bits, sum(bits.get(name, 0) for name in wanted)


def _backward(a):
    bits, needs = needs_of(a)
    found = _call("backward", a, (a.dout,), (a.h, a.saved, needs), may_hold=True)
    named = dict(zip(bits, found, strict=True))
    nothing = torch.empty((0,), dtype=a.x.dtype, device="cpu")
    return tuple(named.get(name, nothing) for name in DIFFERENTIABLE)


def _fake_forward(a):
    a.w_down = SimpleNamespace(shape=tuple(a.down_form[4:7]))
    return _fakes.lora_forward(a)


def _fake_backward(a):
    return tuple(_fakes.gradient(a, name, bit) for name, bit in PACKED_NEEDS.items())


def parts_of(packed) -> tuple[tuple, tuple]:
    """(tensors, numbers) of packed weights, as the operators take them."""
    return tuple(getattr(packed, part) for part in PARTS), packed.form()


def layer(call: Call, packed: tuple) -> Tensor:
    """As _autograd.layer() or lora(), with packed weights (w_up, w_down). Those of the call are not
    read."""
    x, index, second, weights, _, _, _, b_up, b_down = call.tensors
    (up, up_form), (down, down_form) = map(parts_of, packed)
    *factors, up_scale, down_scale = call.factors or _NO_FACTORS
    shares = not torch.compiler.is_compiling()
    numbers = (*call.options, up_scale, down_scale, up_form, down_form, shares)
    tensors = (x, index, second, weights, b_up, b_down, *up, *down, *factors)
    return _autograd.output_of("packed", (*tensors, *numbers))


def unpack(packed, out: Tensor) -> None:
    """Unpacks into a contiguous tensor of the shape of which the codes are."""
    parts, form = parts_of(packed)
    _ops.run("unpack_weights", out, *parts, *form[:2])


def _define(name: str, arguments: dict, results: str, function) -> None:
    schema = ", ".join(f"{kind} {argument}" for argument, kind in arguments.items())
    torch.library.define(f"sonicmoe_cpp::{name}", f"({schema}) -> {results}")

    def run(*given):
        return function(SimpleNamespace(**dict(zip(arguments, given, strict=True))))

    torch.library.impl(f"sonicmoe_cpp::{name}", "CompositeExplicitAutograd")(run)


if _library.PROBLEM is None:
    _define("packed_inference", _FORWARD, "Tensor", _inference)
    _define("packed_forward", _FORWARD, "(Tensor out, Tensor h, Tensor saved)", _forward)
    gradients = ", ".join(["Tensor"] * len(DIFFERENTIABLE))
    _define("packed_backward", _BACKWARD, f"({gradients})", _backward)
    _fakes.register(
        {
            "unpack_weights": lambda a: None,
            "packed_inference": _fakes.inference,
            "packed_forward": _fake_forward,
            "packed_backward": _fake_backward,
        }
    )
    by = "packed_backward"
    backward = _autograd.plain_backward(by)
    derivative = _autograd.of_operator("packed_forward", DIFFERENTIABLE, by, backward)
    _autograd.add({"packed_forward": derivative}, (by,))
