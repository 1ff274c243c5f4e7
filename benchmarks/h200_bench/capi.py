"""The C interface by ctypes on torch tensors, without torch operators in between."""

from __future__ import annotations

import contextlib
import ctypes
import os
from ctypes import POINTER, byref, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p

import torch

BF16, I32, I64, F32 = 1, 4, 5, 0
DTYPES = {torch.float32: F32, torch.bfloat16: BF16, torch.int32: I32, torch.int64: I64}
FORM_IDS, FORM_PAIRS = 0, 1
FORWARD, BACKWARD, INFERENCE = 1, 2, 0
ROUNDING = {"nearest": 0, "up": 1, "down": 2, "score": 3, "stochastic": 4, "balanced": 5}


class Struct(ctypes.Structure):
    """A struct of the C interface: sets `size`; fields that are not given are zero."""

    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(self), **fields)


class Tensor(Struct):
    _fields_ = (
        ("size", c_uint32),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
        ("shape", c_int64 * 3),
        ("stride", c_int64 * 3),
    )


def view(t: torch.Tensor) -> Tensor:
    return Tensor(
        dtype=DTYPES[t.dtype],
        rank=t.dim(),
        data=t.data_ptr(),
        shape=(c_int64 * 3)(*t.shape),
        stride=(c_int64 * 3)(*t.stride()),
    )


class Exec(Struct):
    _fields_ = (
        ("size", c_uint32),
        ("backend", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
        ("device", c_void_p),
        ("stream", c_void_p),
    )


class Problem(Struct):
    _fields_ = (
        ("size", c_uint32),
        ("form", c_int32),
        ("dtype", c_int32),
        ("activation", c_int32),
        *((name, c_int64) for name in ("tokens", "hidden", "width", "experts", "top_k")),
        ("capacity", c_int64),
        ("alpha", c_double),
        ("limit", c_double),
    )


class Sizes(Struct):
    _fields_ = (
        ("size", c_uint32),
        ("reserved", c_uint32),
        ("h_bytes", c_int64),
        ("saved_bytes", c_int64),
        ("scratch_bytes", c_int64),
    )


class Views(Struct):
    """A struct of tensor views, by keyword; None is an absent tensor."""

    def __init__(self, **tensors):
        self.kept = {name: view(t) for name, t in tensors.items() if t is not None}
        super().__init__(**{name: ctypes.pointer(t) for name, t in self.kept.items()})


def views_struct(name: str, fields: str):
    members = [("size", c_uint32), ("reserved", c_uint32)]
    members += [(field, POINTER(Tensor)) for field in fields.split()]
    return type(name, (Views,), {"_fields_": members})


Routing = views_struct("Routing", "ids weights token expert row_begin row_count")
Weights = views_struct("Weights", "gate up down b_gate b_up b_down")
Pairs = views_struct("Pairs", "token expert weight offsets")


def layer_fields(second: str, tensor: str) -> tuple:
    """The first fields of the arguments of both passes."""
    views = (("x", Tensor), ("routing", Routing), ("weights", Weights), (tensor, Tensor))
    fields = [("size", c_uint32), (second, c_int32)]
    fields += [(name, POINTER(kind)) for name, kind in views]
    for name in ("h", "saved", "scratch"):
        fields += [(name, c_void_p), (f"{name}_bytes", c_int64)]
    return tuple(fields)


class ForwardArgs(Struct):
    _fields_ = layer_fields("reserved", "out")


class BackwardArgs(Struct):
    _fields_ = (
        *layer_fields("grad_mode", "dout"),
        ("dx", POINTER(Tensor)),
        ("dweights", POINTER(Tensor)),
        ("grads", POINTER(Weights)),
    )


class RouteOptions(Struct):
    _fields_ = (
        ("size", c_uint32),
        ("score", c_int32),
        ("top_k", c_int64),
        ("scale", c_double),
        ("bias", POINTER(Tensor)),
        ("n_group", c_int64),
        ("topk_group", c_int64),
        ("renormalize", c_int32),
        ("reserved", c_int32),
    )


class RoundOptions(Struct):
    _fields_ = (
        ("size", c_uint32),
        ("mode", c_int32),
        ("route", POINTER(RouteOptions)),
        ("tile", c_int64),
        ("seed", c_uint64),
    )


@contextlib.contextmanager
def asked_for(engine: str | None):
    """Sets the variable by which a user asks for an engine; smoe_device_open reads it."""
    before = os.environ.pop("SONICMOE_ENGINE", None)
    if engine is not None:
        os.environ["SONICMOE_ENGINE"] = engine
    try:
        yield
    finally:
        os.environ.pop("SONICMOE_ENGINE", None)
        if before is not None:
            os.environ["SONICMOE_ENGINE"] = before


class Library:
    """One libsonicmoe.so with one device; a process may open several, also of one file. The engine
    is the one that the library chooses for the device unless its name is given."""

    def __init__(self, path: str, device: torch.device, engine: str | None = None):
        self.lib = ctypes.CDLL(path)
        self.lib.smoe_last_error.restype = ctypes.c_char_p
        self.exec = Exec()
        if device.type == "cuda":
            handle = c_void_p()
            with asked_for(engine):
                self.call("smoe_device_open", c_int32(device.index or 0), byref(handle))
            stream = torch.cuda.current_stream(device).cuda_stream
            self.exec = Exec(backend=1, device=handle, stream=stream)

    def call(self, name: str, *arguments):
        if getattr(self.lib, name)(*arguments) != 0:
            raise RuntimeError(f"{name}: {self.lib.smoe_last_error().decode()}")

    def bound_call(self, name: str, *arguments):
        """The call as a function without arguments, with as little ctypes overhead as possible."""
        function = getattr(self.lib, name)
        references = tuple(byref(a) if isinstance(a, Struct) else a for a in arguments)

        def run():
            if function(*references) != 0:
                raise RuntimeError(f"{name}: {self.lib.smoe_last_error().decode()}")

        run.kept = arguments  # byref does not keep the structs that a pointer refers to alive
        return run

    def sizes(self, problem: Problem, which: int) -> Sizes:
        sizes = Sizes()
        self.call("smoe_moe_sizes", byref(problem), which, byref(self.exec), byref(sizes))
        return sizes


def in_turn(*calls):
    def run():
        for call in calls:
            call()

    return run
