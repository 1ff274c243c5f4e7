"""The operators of the layer with packed weights, and the memory into which they unpack.

The operators packed_* unpack both weights and call the operators of the layer on them, so their
results have the layer's bits. The unpacked weights are not tensors of autograd: a forward keeps the
packed tensors, and its backward unpacks them again. In graphs of torch.compile each of these
operators is one node, so a graph keeps no unpacked weights either.

Memory: a device has one buffer for w_up and one for w_down, which all layers share. If both take
more than limit_buffers() allows, a call on a GPU has one buffer instead, into which the library
unpacks a few experts at a time.
- Forward unpacks into it. Backward does so only if the buffer holds other weights by then; after a
  recomputation of the layer (checkpointing) it holds the right ones. A few experts at a time are
  always unpacked again.
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
from ._names import PRECISION

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
    # Whether the call uses the buffers, and how many bytes it may unpack at a time; 0: any number.
    | {"shares": "bool", "most_bytes": "int"}
)
# Bit i of `needs` of packed_backward asks for the gradient of argument i of packed_forward.
PACKED_NEEDS = {name: 1 << list(_FORWARD).index(name) for name in DIFFERENTIABLE}
_BACKWARD = {"dout": "Tensor"} | _FORWARD | {"h": "Tensor", "saved": "Tensor", "needs": "int"}


class _Kept(NamedTuple):
    memory: Tensor  # (bytes,) uint8
    stream: int
    content: tuple | None  # what was unpacked into it; None: unknown


_kept: dict[tuple[torch.device, str], _Kept] = {}
_limit = 0  # of limit_buffers(); 0: none


def release_buffers() -> None:
    """Frees the memory into which calls with packed weights unpack. The next call allocates it
    again."""
    _kept.clear()


def limit_buffers(most: int | None) -> None:
    """Lets later calls on a GPU unpack at most so many bytes at a time, but at least one expert. A
    layer whose two weights take more is computed a few experts at a time, with the same bits, and
    its backward unpacks again; the portable engine then unpacks NF4 and MXFP4 to bf16 inside its
    products. None: no limit, as at first. Calls with precision="fp8" and calls on the CPU ignore
    it. Frees the memory of earlier calls."""
    global _limit
    if most is not None and (not isinstance(most, int) or most < 1):
        raise ValueError(f"most is {most!r}, must be a number of bytes from 1 on, or None")
    _limit = most or 0
    release_buffers()


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


class _Memory:
    """Memory of a device that calls reuse: take() gives it to a call, keep() puts it back."""

    def __init__(self, device: torch.device, name: str, shares: bool):
        self.key = device, name
        cuda = device.type == "cuda"
        self.stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
        self.shares = shares and not (cuda and torch.cuda.is_current_stream_capturing())

    def take(self, size: int) -> tuple[Tensor, tuple | None]:
        """At least `size` bytes, and what they hold."""
        before = _kept.pop(self.key, None) if self.shares else None
        if before is not None and before.stream == self.stream and before.memory.numel() >= size:
            return before.memory, before.content
        del before  # is freed first
        # An inference tensor could not be used by a later call with autograd.
        with torch.inference_mode(False):
            return torch.empty((size,), dtype=torch.uint8, device=self.key[0]), None

    def keep(self, memory: Tensor, content: tuple | None) -> None:
        if self.shares:
            _kept[self.key] = _Kept(memory, self.stream, content)


class _Operand:
    """A packed weight of a call."""

    def __init__(self, a, name: str):
        """`a` has the arguments of an operator packed_*."""
        self.name = name
        self.parts = tuple(getattr(a, f"{name}_{part}") for part in PARTS)
        self.form = tuple(getattr(a, f"{name}_form"))
        self.device = self.parts[0].device
        self.dtype = DTYPES[self.form[2]]
        self.experts = self.form[4]
        self.shape = stored_shape(self.form)
        self.expert_bytes = self.shape[1] * self.shape[2] * self.dtype.itemsize

    def view(self, memory: Tensor, experts: int) -> Tensor:
        """The unpacked weights of the first experts in `memory`, as the layer takes them."""
        out = memory[: experts * self.expert_bytes].view(self.dtype)
        out = out.view(experts, *self.shape[1:])
        return out.transpose(1, 2) if self.form[3] else out

    def unpack(self, memory: Tensor) -> None:
        out = memory[: self.experts * self.expert_bytes].view(self.dtype).view(self.shape)
        _ops.run("unpack_weights", out, *self.parts, *self.form[:2])


class _Unpacked:
    """The unpacked weights of an operand, while a call uses them: tensor() unpacks, keep() puts the
    memory back for the next call."""

    def __init__(self, a, operand: _Operand):
        self.operand = operand
        self.memory = _Memory(operand.device, operand.name, a.shares)

    def tensor(self, may_hold: bool) -> Tensor:
        """The weight (E, out, in). `may_hold`: it need not be unpacked again if the memory still
        holds it."""
        o = self.operand
        given = tuple(t for t in o.parts if t is not None)
        memory, before = self.memory.take(o.experts * o.expert_bytes)
        content = _content(given, o.form)
        if not (may_hold and content is not None and before == content):
            o.unpack(memory)
        self.kept = memory, content
        return o.view(memory, o.experts)

    def keep(self) -> None:
        self.memory.keep(*self.kept)


def _in_parts(a, operands: list[_Operand]) -> bool:
    """Whether a call unpacks a few experts at a time."""
    if not a.most_bytes or operands[0].device.type != "cuda" or a.precision != PRECISION["tensors"]:
        return False
    if any(o.dtype != a.x.dtype for o in operands):
        return False
    return sum(o.experts * o.expert_bytes for o in operands) > a.most_bytes


def _call_in_parts(by: str, a, operands: list[_Operand], before: tuple, after: tuple):
    """Runs an operator that unpacks a few experts at a time, those of both weights into the same
    memory."""
    experts = [max(1, min(o.experts, a.most_bytes // o.expert_bytes)) for o in operands]
    size = max(o.expert_bytes * e for o, e in zip(operands, experts, strict=True))
    shared = _Memory(operands[0].device, "parts", a.shares)
    memory, _ = shared.take(size)
    up, down = (o.view(memory, e) for o, e in zip(operands, experts, strict=True))
    layer = (a.x, a.index, a.second, a.weights, None, up, down, a.b_up, a.b_down)
    layer += tuple(getattr(a, option) for option in OPTIONS)
    factors = tuple(getattr(a, name) for name in FACTORS)
    packed = [value for o in operands for value in (*o.parts, *o.form[:2])]
    scales = a.up_scale, a.down_scale
    result = _ops.run(
        f"unpacking_{by}", *before, *layer, *after, *factors, *scales, *packed, operands[0].experts
    )
    shared.keep(memory, None)
    return result


def _call(by: str, a, operands: list[_Operand], before: tuple, after: tuple, may_hold: bool):
    """Runs an operator of the layer, or that with factors, on the unpacked weights. before and
    after are the first and last arguments of a backward."""
    unpacked = [_Unpacked(a, operand) for operand in operands]
    up, down = (u.tensor(may_hold).to(a.x.dtype) for u in unpacked)
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
    for u in unpacked:
        u.keep()
    return result


def with_factors(a) -> bool:
    return a.up_a is not None or a.down_a is not None


def _operands(a) -> list[_Operand]:
    return [_Operand(a, name) for name in OPERANDS]


def _run(by: str, a):
    operands = _operands(a)
    if _in_parts(a, operands):
        return _call_in_parts(by, a, operands, (), ())
    return _call(by, a, operands, (), (), may_hold=False)


def _inference(a):
    return _run("inference", a)


def _forward(a):
    return _run("forward", a)


def needs_of(a) -> tuple[dict[str, int], int]:
    """The bits of `needs` of the operator that packed_backward calls, and its `needs`."""
    bits = LORA_NEEDS if with_factors(a) else NEEDS
    wanted = [name for name, bit in PACKED_NEEDS.items() if a.needs & bit]
    return bits, sum(bits.get(name, 0) for name in wanted)


def _backward(a):
    operands = _operands(a)
    if _in_parts(a, operands):
        bits = NEEDS | LORA_NEEDS
        needs = sum(bits[name] for name, bit in PACKED_NEEDS.items() if a.needs & bit)
        return _call_in_parts("backward", a, operands, (a.dout,), (a.h, a.saved, needs))
    bits, needs = needs_of(a)
    found = _call("backward", a, operands, (a.dout,), (a.h, a.saved, needs), may_hold=True)
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
    numbers = (*call.options, up_scale, down_scale, up_form, down_form, shares, _limit)
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
