"""Compares the results of two builds of the library on a CUDA device, bit for bit.

    python benchmarks/same_bits.py OLD.so NEW.so

Use it for a change that must not change results. Both libraries compute the same layers in one
process, then top-k routing and every mode of token rounding. The layers have every activation that
both libraries have, both 16-bit dtypes, all forms of routing, K-major, MN-major and interleaved
weights; some have biases, and some accumulate gradients. With ids and pairs one expert has many
rows and one has none; grouped rows are divided evenly. All bytes of every output buffer, with H and
the metadata kept for backward, are compared. Exits with 1 on a difference.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from dataclasses import dataclass

import torch
from h200_bench import capi
from h200_bench.layer import Data, Ours, Rounded, Shape

capi.DTYPES[torch.float16] = 2
FORM_GROUPED = 2
SHAPES = ((512, 256, 192, 8, 2), (1000, 520, 264, 16, 4), (4096, 1024, 512, 8, 4))
ORDERS = ("k", "mn", "interleaved")
POISON = 0x7B


@dataclass(frozen=True)
class Case:
    shape: tuple  # T, d, n, E, K
    activation: int
    gated: bool
    dtype: torch.dtype
    form: int
    order: str
    bias: bool
    accumulate: bool

    def __str__(self):
        return (
            f"{self.shape} activation {self.activation} {self.dtype} form {self.form} "
            f"{self.order} bias {self.bias} accumulate {self.accumulate}"
        )


def is_gated(library, number):
    """1, 0, or -1 for an unknown number. Builds before 22 November 2026 cannot be asked."""
    if hasattr(library.lib, "smoe_activation_is_gated"):
        return library.lib.smoe_activation_is_gated(number)
    return 1 if number < 5 else 0 if number < 10 else -1


def activations(libraries):
    """(number, gated) of every activation that all libraries have."""
    for number in itertools.count():
        answers = {is_gated(library, number) for library in libraries}
        if -1 in answers:
            return
        (gated,) = answers
        yield number, gated == 1


def cases(libraries):
    """Every activation, dtype, order and shape; the other axes cycle with the case number. The
    form would repeat with the 3 shapes, so it skips one value after each 3 and each 9 cases: every
    shape and order gets every form."""
    numbers = itertools.count()
    for (activation, gated), dtype, order in itertools.product(
        activations(libraries), (torch.bfloat16, torch.float16), ORDERS
    ):
        if order == "interleaved" and not gated:
            continue
        for shape in SHAPES:
            i = next(numbers)
            form = (i + i // 3 + i // 9) % 3
            yield Case(shape, activation, gated, dtype, form, order, i % 2 == 0, i % 5 == 0)


class Layer:
    """The inputs of a case, which are the same for both libraries."""

    def __init__(self, case: Case):
        self.case = case
        T, d, n, E, K = case.shape
        torch.manual_seed(7)
        device = torch.device("cuda")

        def normal(*size, std=1.0):
            return torch.empty(*size, dtype=case.dtype, device=device).normal_(std=std)

        self.device = device
        self.x, self.dout = normal(T, d), normal(T, d)
        self.gate, self.up = self.up_weights(lambda: normal(E, 2 * n, d, std=d**-0.5))
        down = normal(E, d, n, std=n**-0.5)
        self.down = down.transpose(1, 2).contiguous().transpose(1, 2) if case.order != "k" else down
        self.biases = {}
        if case.bias:
            self.biases = {"b_up": normal(E, n), "b_down": normal(E, d)}
            if case.gated:
                self.biases["b_gate"] = normal(E, n)
        logits = torch.randn(T, E, device=device)
        logits[:, 0] += 2.0  # a hot expert
        logits[:, E - 1] -= 50.0  # an expert without rows
        scores, ids = logits.topk(K)
        weights = scores.softmax(-1).contiguous()
        if case.form == FORM_GROUPED:
            rows = torch.full((E,), T // E, dtype=torch.int32, device=device)
            begin = torch.arange(E, dtype=torch.int32, device=device) * (T // E)
            self.routing = {"row_begin": begin, "row_count": rows, "weights": weights[:, 0].clone()}
        elif case.form == capi.FORM_PAIRS:
            token = torch.arange(T, device=device, dtype=torch.int32).repeat_interleave(K)
            self.routing = {
                "token": token,
                "expert": ids.flatten().int(),
                "weights": weights.flatten(),
            }
        else:
            self.routing = {"ids": ids, "weights": weights}
        self.problem = capi.Problem(
            form=case.form,
            dtype=capi.DTYPES[case.dtype],
            activation=case.activation,
            tokens=T,
            hidden=d,
            width=n,
            experts=E,
            top_k=K if case.form == capi.FORM_IDS else 0,
            capacity=T * K if case.form == capi.FORM_PAIRS else 0,
        )

    def __str__(self):
        return str(self.case)

    def up_weights(self, make):
        """Gate (None without a gate) and up in the case's order."""
        n = self.case.shape[2]
        both = make()
        if self.case.order == "mn":
            both = both.transpose(1, 2).contiguous().transpose(1, 2)
        if self.case.order == "interleaved":
            both = both.transpose(1, 2).contiguous().transpose(1, 2)
            return both[:, 0::2], both[:, 1::2]
        if not self.case.gated:
            return None, both[:, :n]
        return both[:, :n], both[:, n:]

    def gradients(self):
        """Buffers of all gradients; fp32 if they are accumulated."""
        dtype = torch.float32 if self.case.accumulate else self.case.dtype

        def like(tensor):
            return torch.full_like(tensor, 0.5, dtype=dtype)

        n, d, E = self.case.shape[2], self.case.shape[1], self.case.shape[3]
        gate, up = self.up_weights(
            lambda: torch.full((E, 2 * n, d), 0.5, dtype=dtype, device=self.device)
        )
        found = {"gate": gate, "up": up, "down": like(self.down)}
        return found | {name: like(bias) for name, bias in self.biases.items()}

    def run(self, library: capi.Library):
        """Computes the layer. Returns all outputs by name."""
        forward, backward = (library.sizes(self.problem, which) for which in (1, 2))

        def buffer(size):
            return torch.full((max(size, 256),), POISON, dtype=torch.uint8, device=self.device)

        h, saved = buffer(forward.h_bytes), buffer(forward.saved_bytes)
        scratch = buffer(max(forward.scratch_bytes, backward.scratch_bytes))
        out, dx = torch.full_like(self.x, 3.0), torch.full_like(self.x, 3.0)
        grads = self.gradients()
        dweights = torch.full_like(self.routing["weights"], 3.0)
        pointer = ctypes.pointer
        state = {
            "x": pointer(capi.view(self.x)),
            "routing": pointer(capi.Routing(**self.routing)),
            "weights": pointer(
                capi.Weights(gate=self.gate, up=self.up, down=self.down, **self.biases)
            ),
            "h": h.data_ptr(),
            "h_bytes": forward.h_bytes,
            "saved": saved.data_ptr(),
            "saved_bytes": forward.saved_bytes,
            "scratch": scratch.data_ptr(),
            "scratch_bytes": scratch.numel(),
        }
        library.bound_call(
            "smoe_moe_forward",
            self.problem,
            capi.ForwardArgs(out=pointer(capi.view(out)), **state),
            library.exec,
        )()
        library.bound_call(
            "smoe_moe_backward",
            self.problem,
            capi.BackwardArgs(
                grad_mode=1 if self.case.accumulate else 0,
                dout=pointer(capi.view(self.dout)),
                dx=pointer(capi.view(dx)),
                dweights=pointer(capi.view(dweights)),
                grads=pointer(capi.Weights(**grads)),
                **state,
            ),
            library.exec,
        )()
        torch.cuda.synchronize()
        return {"out": out, "h": h, "saved": saved, "dx": dx, "dweights": dweights} | {
            f"d{name}": grad for name, grad in grads.items() if grad is not None
        }


class Routing:
    """Top-k or token rounding of one shape, and its backward."""

    def __init__(self, mode: str | None):
        self.mode = mode
        self.data = Data(Shape(4096, 64, 64, 128, 8), torch.device("cuda"))

    def __str__(self):
        return f"routing {self.mode or 'top-k'}"

    def run(self, library: capi.Library):
        data = self.data
        data.sample(3)
        data.poison()
        if self.mode is None:
            call = Ours(library, data)
            call.route()
            data.dweights.copy_(data.weights)
            call.route_backward()
            names = ("ids", "weights", "dlogits")
            results = {name: getattr(data, name).clone() for name in names}
        else:
            call = Rounded(library, data, self.mode)
            call.round()
            call.dweight.copy_(call.weight)
            call.round_backward()
            names = ("token", "expert", "weight", "offsets")
            results = {name: getattr(call, name).clone() for name in names}
            results["dlogits"] = data.dlogits.clone()
        torch.cuda.synchronize()
        return results


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("libraries", nargs=2, metavar="LIBRARY")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    libraries = [capi.Library(path, device) for path in arguments.libraries]
    count, tensors, differing = 0, 0, 0
    routings = (Routing(mode) for mode in (None, *capi.ROUNDING))
    for layer in itertools.chain((Layer(case) for case in cases(libraries)), routings):
        old, new = (layer.run(library) for library in libraries)
        count += 1
        for name, value in old.items():
            tensors += 1
            if not same(value, new[name]):
                differing += 1
                print(f"{name} differs: {layer}")
    print(f"{count} layers and routings, {tensors} tensors compared, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
