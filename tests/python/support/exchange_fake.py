"""Replaces the exchange's operators by all-to-all on CPUs, with the same arguments and results. So
the code around the operators (choice, sizes, autograd, graphs, faults) is tested without a GPU."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from sonicmoe_cpp import _autograd, _ops
from sonicmoe_cpp._call import (
    FRESH,
    LAYER_TENSORS,
    NEEDS,
    OPTIONS,
    Call,
    Factors,
    Fp8,
    MainGradients,
    Options,
    Tensors,
)
from sonicmoe_cpp.distributed import _memory, buffers, peer
from sonicmoe_cpp.distributed._group import Group
from sonicmoe_cpp.distributed.own_experts import ALL_NEEDS
from sonicmoe_cpp.distributed.transport import AGAIN, AllToAll, Forward, Routes

TENSORS, LAYER = len(LAYER_TENSORS), len(LAYER_TENSORS) + len(OPTIONS)
ALL, FACTORS = sum(NEEDS.values()), len(Factors._fields)
KEPT = 3  # elements of the tensor that stands for the kept rows of x
OVERFLOW = (
    "rank 1 got more rows for its experts than its capacity ({rows} rows came). The outputs of "
    "this step are not valid; exchange_reset on all ranks makes the exchange usable again."
)
MISSING = (
    "rank 1 did not send its routing within the time limit of 5000 ms"
    + OVERFLOW[OVERFLOW.index(". The") :]
)


class Opened(NamedTuple):
    group: Group
    shape: buffers.Shape
    limit_ms: int


def call_of(arguments, main_gradients=(), factors=(), codes=None) -> Call:
    options = Options(*arguments[TENSORS:LAYER])
    factors = Factors(*factors) if any(f is not None for f in factors[:4]) else None
    fp8 = Fp8(0, codes) if options.precision else None
    tensors, main_gradients = Tensors(*arguments[:TENSORS]), MainGradients(*main_gradients)
    return Call(tensors, options, main_gradients, factors, fp8)


class Running(NamedTuple):
    """A step in parts: what its last operators need."""

    arguments: tuple
    outputs: list  # tensors that the begin has returned
    found: list  # their values, which the finish writes to them


class Fake:
    """The exchanges of a process. `calls` counts operators by name."""

    def __init__(self):
        self.running: dict[int, Running] = {}
        self.opened: list[Opened] = []
        self.calls: dict[str, int] = {}
        self.kept: dict[int, Forward] = {}
        self.fault: str | None = None
        self.group: Group | None = None  # of the exchange that is being opened

    def run(self, name: str, *arguments):
        if not name.startswith("exchange_"):
            return _run(name, *arguments)
        expected = len(getattr(_ops.ops, name).default._schema.arguments)
        assert len(arguments) == expected, (name, len(arguments), expected)
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(self, name.removeprefix("exchange_"))(*arguments)

    def bytes(self, like, ranks, *shape) -> int:
        return 1000

    def open(
        self, like, ranks, tokens, slots, hidden, addresses, size, rank, limit, rows_by
    ) -> int:
        assert addresses.shape == (ranks,) and addresses.dtype == torch.int64
        assert not any(address % _memory.ALIGNMENT for address in addresses.tolist())
        self.opened.append(Opened(self.group, buffers.Shape(tokens, slots, hidden), limit))
        return len(self.opened) - 1

    def check(self, like, number) -> None:
        if self.fault is not None:
            raise RuntimeError(self.fault)

    def reset(self, like, number) -> None:
        self.fault = None
        self.running.pop(number, None)

    def of(self, call: Call, number: int, keep_rows: bool = False) -> AllToAll:
        self.check(None, number)
        opened, (x, index, *_) = self.opened[number], call.tensors
        assert opened.shape.holds(buffers.Shape(x.shape[0], index.numel(), x.shape[1]))
        return AllToAll(opened.group, opened.limit_ms / 1e3, keep_rows)

    def inference(self, *arguments):
        *arguments, number, _, codes = arguments
        call = call_of(arguments, factors=arguments[LAYER:], codes=codes)
        return self.of(call, number).forward(call, 0, 0).out

    def forward(self, *arguments):
        *arguments, number, rows, keep_rows, codes = arguments
        call = call_of(arguments, arguments[LAYER:-FACTORS], arguments[-FACTORS:], codes)
        given = self.of(call, number, keep_rows).forward(call, 0, ALL)
        h, row_weights = given.kept[0], given.kept[3]
        came = row_weights.shape[0]
        if rows != peer.ROUTED and came > rows:
            self.fault = OVERFLOW.format(rows=came)
        key = next(_keys)
        self.kept[key] = given
        kept_x = h.new_empty(KEPT if keep_rows else 0)
        # The graph keeps a tensor, as with the real operator.
        return given.out, h, torch.tensor([key], dtype=torch.int64).view(torch.uint8), kept_x

    def backward(self, *arguments):
        *arguments, number, kept_x, _ = arguments
        return self.gradients(arguments[:-FACTORS], arguments[-FACTORS:], number, kept_x)

    def gradients(self, arguments, factors, number: int, kept_x):
        dout, *arguments = arguments
        _, saved, needs, *main_gradients = arguments[LAYER:]
        call = call_of(arguments, main_gradients, factors)
        given = self.kept[int(saved.clone(memory_format=torch.contiguous_format).view(torch.int64))]
        again = Routes.of(given.host, (None,) * 4).needs & AGAIN
        assert (kept_x is None) == bool(again) and (kept_x is None or kept_x.numel() == KEPT)
        found = self.of(call, number).backward(dout, call, given, needs)
        gradients = [found.get(name) for name in ALL_NEEDS]
        return [torch.empty(0) if g is None else g for g in gradients]

    def backward_accumulate(self, *arguments):
        *arguments, number, kept_x, _ = arguments
        found = self.gradients(arguments, (), number, kept_x)
        named = dict(zip(ALL_NEEDS, found, strict=True))
        return [named[name] for name in FRESH]

    # Steps in parts: results are NaN until the finish.

    def begin_forward(self, x, *rest):
        *_, number, _ = rest
        assert number not in self.running
        self.running[number] = Running((x, *rest), [torch.full_like(x, torch.nan)], [])
        return self.running[number].outputs[0]

    def compute_inference(self, like, number: int, rows: int) -> None:
        step = self.running[number]
        *arguments, _, codes = step.arguments
        step.found.append(self.inference(*arguments, number, rows, codes))

    def compute_forward(self, like, number: int, rows: int, keep_rows: bool):
        step = self.running[number]
        *arguments, _, codes = step.arguments
        layer, factors = arguments[:LAYER], arguments[LAYER:]
        rest = (None, None, None, *factors, number, rows, keep_rows, codes)
        out, *kept = self.forward(*layer, *rest)
        step.found.append(out)
        return kept

    def begin(self, found: list, number: int):
        assert number not in self.running
        outputs = [torch.full_like(g, torch.nan) for g in found]
        self.running[number] = Running((), outputs, found)
        return outputs

    def begin_backward(self, *arguments):
        return self.begin(self.backward(*arguments), arguments[-3])

    def begin_backward_accumulate(self, *arguments):
        return self.begin(self.backward_accumulate(*arguments), arguments[-3])

    def compute_backward(self, like, number: int) -> None:
        assert number in self.running

    def finish(self, like, number: int) -> None:
        _, outputs, found = self.running.pop(number)
        for output, values in zip(outputs, found, strict=True):
            output.copy_(values)


class FakeMemory:
    """Stands in for the ways to map peer memory. The tests make its steps fail by `problem`."""

    name = "fake"
    problem = None

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def allocate(size: int, device) -> torch.Tensor:
        if FakeMemory.problem == "memory":
            raise torch.OutOfMemoryError("no memory")
        return torch.empty(size, dtype=torch.uint8)

    @staticmethod
    def addresses(memory: torch.Tensor, group: dist.ProcessGroup):
        if FakeMemory.problem == "mapping":
            raise RuntimeError("no peer access")
        return [memory.data_ptr()] * group.size(), None


_keys = itertools.count(1)
_run = _ops.run
_call = _autograd.call


def install() -> Fake:
    """From this call on, peer memory serves CPU tensors in this process."""
    fake = Fake()
    open_by = buffers.PeerBuffers._open_by

    def opens(self, *arguments):
        fake.group = self.group
        return open_by(self, *arguments)

    def call(name, *arguments):
        return (
            fake.run(name, *arguments) if name.startswith("exchange_") else _call(name, *arguments)
        )

    _ops.run, _autograd.call = fake.run, call
    torch.cuda.synchronize = lambda device=None: None  # reset_exchange() calls it
    buffers.PeerBuffers._open_by = opens
    peer.served = lambda x: x.device.type == "cpu" and x.dtype != torch.float64
    _memory.WAYS = (FakeMemory,)
    _memory.gpu_number = lambda index: 7 + dist.get_rank()
    _memory.reaches = lambda device, numbers: True
    return fake
