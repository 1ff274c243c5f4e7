"""Where the time of a step goes on the device, by the names of its kernels."""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

# A kernel has the first kind whose pattern matches the kernel's name.
KINDS = {
    "communication": r"nccl|all_gather|reduce_scatter|ReduceScatter|AllGather",
    "experts": r"smoe|sonicmoe|grouped|GroupProblem|GroupGEMM|indexing_backward|moe",
    "attention": r"flash|fmha|cudnn.*sdpa|attention",
    "rows": r"index|scatter|gather|[Ss]ort|[Rr]adix|topk|topK",
    "optimizer": r"multi_tensor|[Aa]dam|foreach",
    "products": r"gemm|nvjet|cutlass|cublas|splitK",
    "copies": r"[Mm]emcpy|[Mm]emset|copy|chunk_cat|split_with_sizes",
    "other": r"",
}

LONGEST, NAME = 15, 100  # kernels of the record, and characters of their names


def kind(name: str) -> str:
    return next(k for k, pattern in KINDS.items() if re.search(pattern, name))


def where(step) -> dict:
    """Milliseconds of the device of one step: by kind ("where_ms"), and of the kernels that take
    longest ("longest_ms"). The times of overlapping kernels are added."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        kinds[kind(event.key)] += event.self_device_time_total / 1e3
        kernels[event.key[:NAME]] += event.self_device_time_total / 1e3
    return {"where_ms": longest(kinds, len(kinds)), "longest_ms": longest(kernels, LONGEST)}


def longest(sums: dict, most: int) -> dict:
    found = sorted(sums.items(), key=lambda item: -item[1])[:most]
    return {name: round(value, 2) for name, value in found}
