"""Grouped products in Triton on rows that are already gathered, to compare single products with.

With TRITON_OVERRIDE_ARCH=sm80 Triton compiles them to mma.sync and cp.async, as for an A100. They
have no gather, no activation and no biases. A product is timed with the fastest of TILES and ORDERS
for its shape.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import timing


@triton.jit
def rows_kernel(
    a_ptr, w_ptr, out_ptr, tiles_ptr, N, depth, expert_stride, n_stride, k_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out[r] = a[r] W_e^T for the rows r of each expert e. A tile's record is (e, its first row,
    the expert's end, 0, number of the column tile)."""
    record = tiles_ptr + 5 * tl.program_id(0)
    expert = tl.load(record).to(tl.int64)
    begin, end = tl.load(record + 1), tl.load(record + 2)
    rows = begin + tl.arange(0, BM)
    columns = tl.load(record + 4) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows past the end are read from the last row and not written.
    a_at = a_ptr + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * depth + k[None, :]
    w_at = w_ptr + expert * expert_stride + columns[None, :] * n_stride + k[:, None] * k_stride
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, depth, BK):
        a = tl.load(a_at)
        w = tl.load(w_at) if EVEN else tl.load(w_at, mask=columns[None, :] < N, other=0.0)
        sums = tl.dot(a, w, sums)
        a_at += BK
        w_at += BK * k_stride
    out_at = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = (rows < end)[:, None] & (columns < N)[None, :]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def depth_kernel(
    p_ptr, q_ptr, out_ptr, tiles_ptr, M, N,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out[e] = P_e^T Q_e, summed over the rows of expert e. A tile's record is (e, the expert's
    first row, its end, number of the row tile, number of the column tile)."""
    record = tiles_ptr + 5 * tl.program_id(0)
    expert = tl.load(record).to(tl.int64)
    begin, end = tl.load(record + 1), tl.load(record + 2)
    m = tl.load(record + 3) * BM + tl.arange(0, BM)
    n = tl.load(record + 4) * BN + tl.arange(0, BN)
    rows = begin + tl.arange(0, BK)
    # P is read as its transpose: Triton does not prefetch a tile that it transposes after the load.
    p_at = p_ptr + rows.to(tl.int64)[None, :] * M + m[:, None]
    q_at = q_ptr + rows.to(tl.int64)[:, None] * N + n[None, :]
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    whole = (end - begin) // BK
    for _ in range(0, whole):
        if EVEN:
            p, q = tl.load(p_at), tl.load(q_at)
        else:
            p = tl.load(p_at, mask=m[:, None] < M, other=0.0)
            q = tl.load(q_at, mask=n[None, :] < N, other=0.0)
        sums = tl.dot(p, q, sums)
        p_at += BK * M
        q_at += BK * N
    if begin + whole * BK < end:
        left = rows + whole * BK < end
        p = tl.load(p_at, mask=left[None, :] & (m < M)[:, None], other=0.0)
        q = tl.load(q_at, mask=left[:, None] & (n < N)[None, :], other=0.0)
        sums = tl.dot(p, q, sums)
    out_at = out_ptr + expert * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tile:
    BM: int
    BN: int
    BK: int
    stages: int
    warps: int

    def options(self):
        return {"BM": self.BM, "BN": self.BN, "BK": self.BK,
                "num_stages": self.stages, "num_warps": self.warps}  # fmt: skip

    def __str__(self):
        return f"{self.BM}x{self.BN}x{self.BK}, {self.stages} stages, {self.warps} warps"


# On sm_80 Triton prefetches `stages` - 1 tiles: 128x256x64 with 4 stages takes 147 KB.
TILES = tuple(
    Tile(*numbers)
    for numbers in (
        (128, 128, 32, 4, 4),
        (128, 128, 32, 5, 4),
        (128, 128, 64, 3, 4),
        (128, 128, 64, 4, 4),
        (128, 128, 64, 4, 8),
        (128, 256, 32, 4, 8),
        (128, 256, 32, 5, 8),
        (128, 256, 64, 3, 8),
        (128, 256, 64, 4, 8),
        (256, 128, 32, 4, 8),
        (256, 128, 64, 3, 8),
        (256, 128, 64, 4, 8),
    )
)
# The number of row tiles that use the same columns one after the other. The tile is tuned with the
# first value.
ORDERS = (8, 1, 4, 64)


def ordered(row_tiles, column_tiles, group):
    """(row tile, column tile) in groups of row tiles: each group visits all columns."""
    for first in range(0, row_tiles, group):
        last = min(first + group, row_tiles)
        yield from ((m, n) for n in range(column_tiles) for m in range(first, last))


@dataclass(frozen=True)
class RowProduct:
    """a (R, depth), weights (E, N, depth) with any strides, out (R, N); expert e has the rows
    offsets[e] to offsets[e + 1]."""

    a: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    offsets: list

    def records(self, tile, group):
        columns = -(-self.weights.shape[1] // tile.BN)
        for e, (begin, end) in enumerate(itertools.pairwise(self.offsets)):
            for m, n in ordered(-(-(end - begin) // tile.BM), columns, group):
                yield e, begin + m * tile.BM, end, 0, n

    def call(self, tile, tiles):
        N, depth = self.weights.shape[1:]
        if depth % tile.BK:
            raise ValueError(f"depth is {depth}, must be a multiple of {tile.BK}")
        arguments = (self.a, self.weights, self.out, tiles, N, depth, *self.weights.stride())
        even = N % tile.BN == 0
        grid = (len(tiles),)
        return lambda: rows_kernel[grid](*arguments, EVEN=even, **tile.options())

    def expected(self, e):
        rows = slice(*self.offsets[e : e + 2])
        return self.out[rows], self.a[rows] @ self.weights[e].T

    def balanced(self):
        """(left, right, out) of a batched product with as many rows for every expert."""
        experts, N, depth = self.weights.shape
        a, out = self.a.view(experts, -1, depth), self.out.view(experts, -1, N)
        return a, self.weights.transpose(1, 2), out


@dataclass(frozen=True)
class DepthProduct:
    """p (R, M), q (R, N), out (E, M, N)."""

    p: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    offsets: list

    def records(self, tile, group):
        tiles = -(-self.p.shape[1] // tile.BM), -(-self.q.shape[1] // tile.BN)
        for e, rows in enumerate(itertools.pairwise(self.offsets)):
            for m, n in ordered(*tiles, group):
                yield e, *rows, m, n

    def even(self, tile):
        return self.p.shape[1] % tile.BM == 0 and self.q.shape[1] % tile.BN == 0

    def call(self, tile, tiles):
        arguments = (self.p, self.q, self.out, tiles, self.p.shape[1], self.q.shape[1])
        even, grid = self.even(tile), (len(tiles),)
        return lambda: depth_kernel[grid](*arguments, EVEN=even, **tile.options())

    def expected(self, e):
        rows = slice(*self.offsets[e : e + 2])
        return self.out[e], self.p[rows].T @ self.q[rows]

    def balanced(self):
        p, q = (t.view(len(self.out), -1, t.shape[1]) for t in (self.p, self.q))
        return p.transpose(1, 2), q, self.out


def tiles_of(product, tile, group):
    """The records of all tiles, on the device."""
    records = list(product.records(tile, group))
    return torch.tensor(records, dtype=torch.int32, device=product.out.device)


def require_mma_sync(compiled):
    """Exits with a message if Triton was not asked for sm_80 (None: the interpreter ran)."""
    if compiled is not None and "wgmma" in compiled.asm["ptx"]:
        raise SystemExit("Triton made wgmma, must make mma.sync: set TRITON_OVERRIDE_ARCH=sm80")


def check(label, product, tolerance=1e-2):
    """Exits with a message if the product that was computed differs from torch's."""
    experts = len(product.offsets) - 1
    for e in {0, experts // 2, experts - 1}:
        got, want = (t.float() for t in product.expected(e))
        error, norm = ((got - want).norm().item(), want.norm().item())
        if not error <= tolerance * norm:
            raise SystemExit(f"{label}: expert {e} is wrong: error {error:.1e} of {norm:.1e}")
    if not product.out.isfinite().all():
        raise SystemExit(f"{label}: not all of the product was written")


def milliseconds(runs):
    """{key: ms}: the lower of two times, each of two calls."""
    times = {key: timing.elapsed(2, run) for key, run in runs.items()}
    return {key: min(times[key], timing.elapsed(2, run)) for key, run in runs.items()}


def tuned(label, product):
    """(tile and order, call) of the fastest variant, with checked results."""
    calls, of_sides = {}, {}
    for tile in TILES:
        sides = tile.BM, tile.BN
        if sides not in of_sides:
            of_sides[sides] = tiles_of(product, tile, ORDERS[0])
        try:
            run = product.call(tile, of_sides[sides])
            require_mma_sync(run())
        except (ValueError, triton.runtime.errors.OutOfResources):
            continue  # the tile does not fit the shape or the shared memory
        calls[tile] = run
    times = milliseconds(calls)
    tile = min(times, key=times.get)
    orders = {group: product.call(tile, tiles_of(product, tile, group)) for group in ORDERS[1:]}
    orders = {ORDERS[0]: calls[tile]} | orders
    times = milliseconds(orders)
    group = min(times, key=times.get)
    product.out.fill_(float("nan"))
    orders[group]()
    check(f"{label} in Triton", product)
    return f"{tile}, order {group}", orders[group]
