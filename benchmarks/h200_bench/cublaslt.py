"""Batched products by the cuBLAS kernels that use mma.sync.

On Hopper cuBLAS chooses kernels with wgmma. But cublasLtMatmul also takes an algorithm from the
caller. To find the kernels with mma.sync, each algorithm, tile and number of stages that
cublasLtMatmulAlgoCheck allows is run once on a small product, under a profiler that gives the
kernel's name. Names of kernels with mma.sync.m16n8k16 contain 16816 or 16x8x16.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

from . import kernels, timing

# Values of cublasLt.h and library_types.h.
COMPUTE_32F, R_32F, R_16BF = 68, 0, 14
TRANS_A, TRANS_B, OP_T = 3, 4, 1
BATCH_COUNT, BATCH_STRIDE = 5, 6
CAP_TILES, CAP_CUSTOM_MAX, CAP_STAGES = 6, 7, 13
CONFIG_TILE, CONFIG_SWIZZLE, CONFIG_CUSTOM, CONFIG_STAGES = 1, 4, 5, 6
TILES = {19: "64x256", 20: "128x128", 21: "256x64", 23: "128x256", 24: "256x128", 31: "192x128",
         32: "128x192"}  # fmt: skip
# 0: not given; 8 to 12 and 34: stages of depth 32; 14 to 18 and 35: stages of depth 64.
STAGES = {0, *range(8, 13), *range(14, 19), 34, 35}
MOST_CUSTOM = 8
FASTEST = 6  # kernels that are timed on every product
WORKSPACE_BYTES = 32 << 20
MMA_SYNC = re.compile(r"16816|16x8x16")
OTHER = re.compile(r"sm90|nvjet|gmma")


class Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True)
class Choice:
    """An algorithm's number and settings, for any shape."""

    number: int
    tile: int
    stages: int
    custom: int


class Lt:
    """A handle of cublasLt, of the library that torch has loaded."""

    def __init__(self):
        self.lib = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")

    def algorithm(self, number):
        found = Algorithm()
        types = (R_16BF,) * 4
        name = "cublasLtMatmulAlgoInit"
        self.call(name, self.handle, COMPUTE_32F, R_32F, *types, c_int(number), byref(found))
        return found

    def configured(self, choice, swizzle):
        found = self.algorithm(choice.number)
        settings = {CONFIG_TILE: choice.tile, CONFIG_STAGES: choice.stages,
                    CONFIG_CUSTOM: choice.custom, CONFIG_SWIZZLE: swizzle}  # fmt: skip
        for attribute, value in settings.items():
            value, size = c_uint32(value), c_size_t(4)
            name = "cublasLtMatmulAlgoConfigSetAttribute"
            self.call(name, byref(found), c_int(attribute), byref(value), size)
        return found

    def capability(self, algorithm, attribute, most):
        values, written = (c_uint32 * most)(), c_size_t()
        self.call("cublasLtMatmulAlgoCapGetAttribute", byref(algorithm), c_int(attribute), values,
                  c_size_t(4 * most), byref(written))  # fmt: skip
        return list(values)[: written.value // 4]

    def choices(self):
        """Every algorithm with each of its tiles, stages and custom options that are in TILES, in
        STAGES and below MOST_CUSTOM."""
        numbers, count = (c_int * 256)(), c_int()
        types = (R_16BF,) * 4
        name = "cublasLtMatmulAlgoGetIds"
        self.call(name, self.handle, COMPUTE_32F, R_32F, *types, 256, numbers, byref(count))
        for number in numbers[: count.value]:
            algorithm = self.algorithm(number)
            tiles = set(self.capability(algorithm, CAP_TILES, 1024)) & TILES.keys()
            stages = set(self.capability(algorithm, CAP_STAGES, 256)) & STAGES or {0}
            custom = self.capability(algorithm, CAP_CUSTOM_MAX, 1)[0]
            options = range(min(custom, MOST_CUSTOM) + 1)
            for rest in itertools.product(sorted(tiles), sorted(stages), options):
                yield Choice(number, *rest)


class Batched:
    """out[e] = left[e] right[e] of bf16 tensors (E, M, K), (E, K, N), (E, M, N).

    cuBLAS uses column-major order, so it computes the transposes: out^T = right^T left^T.
    """

    def __init__(self, lt, left, right, out):
        self.lt, self.tensors = lt, (right, left, out)
        self.transposed = tuple(t.stride(2) != 1 for t in (right, left))
        self.description = c_void_p()
        lt.call("cublasLtMatmulDescCreate", byref(self.description), COMPUTE_32F, R_32F)
        for attribute, transposed in zip((TRANS_A, TRANS_B), self.transposed, strict=True):
            value = c_int32(OP_T if transposed else 0)
            name = "cublasLtMatmulDescSetAttribute"
            lt.call(name, self.description, c_int(attribute), byref(value), c_size_t(4))
        self.layouts = [self.layout(t) for t in self.tensors]

    def layout(self, tensor):
        batch, rows, columns = tensor.shape
        across, along = tensor.stride()[1:]
        by_rows = along == 1
        sides = (columns, rows, across) if by_rows else (rows, columns, along)
        found = c_void_p()
        rows, columns, leading = sides
        self.lt.call("cublasLtMatrixLayoutCreate", byref(found), R_16BF, c_uint64(rows),
                     c_uint64(columns), c_int64(leading))  # fmt: skip
        values = ((BATCH_COUNT, c_int32(batch)), (BATCH_STRIDE, c_int64(tensor.stride(0))))
        for attribute, value in values:
            size = c_size_t(ctypes.sizeof(value))
            name = "cublasLtMatrixLayoutSetAttribute"
            self.lt.call(name, found, c_int(attribute), byref(value), size)
        return found

    def allows(self, algorithm):
        a, b, d = self.layouts
        result = Heuristic()
        status = self.lt.lib.cublasLtMatmulAlgoCheck(
            self.lt.handle, self.description, a, b, d, d, byref(algorithm), byref(result)
        )
        return status == 0 and result.state == 0 and result.workspace <= WORKSPACE_BYTES

    def run_with(self, algorithm):
        """The product by this algorithm as a function without arguments."""
        (a, b, d), (x, y, z) = self.layouts, (c_void_p(t.data_ptr()) for t in self.tensors)
        one, zero = c_float(1.0), c_float(0.0)
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        workspace = c_void_p(self.lt.workspace.data_ptr())
        factors = (byref(one), x, a, y, b, byref(zero), z, d, z, d)
        size = c_size_t(WORKSPACE_BYTES)
        rest = (byref(algorithm), workspace, size, stream)
        arguments = (self.lt.handle, self.description, *factors, *rest)

        def run():
            self.lt.call("cublasLtMatmul", *arguments)

        run.kept = (one, zero, algorithm, self)
        return run


@cache
def handle():
    return Lt()


def runs(lt, batched, choices, swizzles):
    """Yields (choice, call) for every choice that cuBLAS allows for this product and that runs."""
    for choice, swizzle in itertools.product(choices, swizzles):
        try:
            algorithm = lt.configured(choice, swizzle)
            if batched.allows(algorithm):
                run = batched.run_with(algorithm)
                run()
                yield choice, run
        except RuntimeError:  # a setting that this algorithm does not have
            continue


def example(transposed, experts, size):
    """A product of square matrices; `transposed` says which of (right, left) is column-major."""
    tensors = [torch.randn(experts, size, size, device="cuda").bfloat16() for _ in range(3)]
    right, left = (
        t.transpose(1, 2) if by_columns else t
        for t, by_columns in zip(tensors, transposed, strict=False)
    )
    return Batched(handle(), left, right, tensors[2])


@cache
def mma_sync_choices(transposed):
    """{choice: kernel's name} of the FASTEST mma.sync kernels for these orders of the operands."""
    lt = handle()
    small = example(transposed, 4, 512)
    found = list(runs(lt, small, lt.choices(), (0,)))
    names = [[name for name, _ in part] for part in kernels.traced([(1, run) for _, run in found])]
    by_name = {}
    for (choice, _), launched in zip(found, names, strict=True):
        if len(launched) == 1 and is_mma_sync(launched[0]):
            by_name.setdefault(launched[0], choice)
    print(f"cuBLAS: {len(found)} algorithms, {len(by_name)} kernels of mma.sync", flush=True)
    large = list(runs(lt, example(transposed, 8, 2048), by_name.values(), (0,)))
    times = {choice: timing.elapsed(3, run) for choice, run in large}
    name_of = {choice: name for name, choice in by_name.items()}
    return {choice: name_of[choice] for choice in sorted(times, key=times.get)[:FASTEST]}


def is_mma_sync(name):
    return bool(MMA_SYNC.search(name)) and not OTHER.search(name)


def short(name):
    """The part of a kernel's name that says its instruction, tile and stages."""
    word = next(word for word in re.findall(r"\w+", name) if MMA_SYNC.search(word))
    return re.sub(r"EEv\w*$", "", re.sub(r"^.*?(?=cutlass_80|sm80_|ampere_)", "", word))


def tuned(label, product):
    """(kernel's name, call) of the fastest mma.sync kernel on balanced rows, with checked results;
    None if there is none."""
    left, right, out = product.balanced()
    batched = Batched(handle(), left, right, out)
    names = mma_sync_choices(batched.transposed)
    found = list(runs(handle(), batched, names, (0, 1)))
    if not found:
        return None
    times = [timing.elapsed(2, run) for _, run in found]
    choice, run = found[times.index(min(times))]
    out.fill_(float("nan"))
    run()
    for e in {0, len(out) // 2, len(out) - 1}:
        want = (left[e] @ right[e]).float()
        error, norm = (out[e].float() - want).norm().item(), want.norm().item()
        if not error <= 1e-2 * norm:
            raise SystemExit(f"{label} in cuBLAS: {e} is wrong: error {error:.1e} of {norm:.1e}")
    return short(names[choice]), run
