"""Compares every matrix product of the layer with the best mma.sync product of the same shape.

Our kernels gather rows, apply activations and write all that the layer needs. A rival's product
reads rows that are already gathered and writes only the product, on the same number of rows an
expert. Both are hot: bursts of whole passes in random order, times by CUPTI.
"""

from __future__ import annotations

import itertools

import torch

from . import check, cublaslt, kernels, packages, triton_gemm
from .capi import in_turn
from .layer import Data, Ours

FLOPS = {"A": 4, "Y": 2, "dH": 2, "dX~": 4, "dW2": 2, "dW1": 4}  # times rows, n and d
RIVALS = {"triton": triton_gemm, "cublas": cublaslt}
PASSES = {"fwd": ("A", "Y"), "bwd": ("dH", "dX~", "dW2", "dW1")}


def products_of(data, counts):
    """role -> the grouped product; `counts` are the rows of each expert."""
    s, device = data.shape, data.device
    offsets = list(itertools.accumulate(counts, initial=0))

    def rows(width):
        return torch.empty(s.rows, width, dtype=torch.bfloat16, device=device)

    x, dout, a, h = (rows(width).normal_() for width in (s.d, s.d, s.n, 2 * s.n))
    up, down = data.w_up, data.w_down
    up_t, down_t = up.transpose(1, 2), down.transpose(1, 2)
    of_rows, of_depth = triton_gemm.RowProduct, triton_gemm.DepthProduct
    return {
        "A": of_rows(x, up, rows(2 * s.n), offsets),
        "Y": of_rows(a, down, rows(s.d), offsets),
        "dH": of_rows(dout, down_t, rows(s.n), offsets),
        "dX~": of_rows(h, up_t, rows(s.d), offsets),
        "dW2": of_depth(dout, a, torch.empty_like(down), offsets),
        "dW1": of_depth(h, x, torch.empty_like(up), offsets),
    }


def ours_by_role(which, names):
    """The roles of a call's kernels. dW2 is launched before dW1."""
    roles = [kernels.role_of(which, name) for name in names]
    gradients = [i for i, role in enumerate(roles) if role == "dW"]
    for at, i in enumerate(gradients):
        roles[i] = "dW2" if 2 * at < len(gradients) else "dW1"
    return roles


def our_pass(which, run, keeps):
    return kernels.Pass(run, lambda part: ours_by_role(which, [name for name, _ in part]), keeps)


def our_passes(ours):
    """As in kernels.py: weight gradients are timed in a backward without dX, whose sum would
    overlap them."""
    return {
        ("ours", "fwd"): our_pass("fwd", ours.layer, PASSES["fwd"]),
        ("ours", "bwd"): our_pass("bwd", ours.layer_backward, ("dH", "dX~")),
        ("ours", "dW"): our_pass("bwd", ours.layer_backward.without_dx, ("dW2", "dW1")),
    }


def rival_passes(who, calls):
    """The rival's products in the order of our passes, so that the chip has the same clock."""
    passes = {}
    for which, roles in PASSES.items():
        found = [role for role in roles if role in calls]
        if found:
            run = in_turn(*(calls[role] for role in found))
            passes[who, which] = kernels.Pass(run, lambda _, found=found: found, found)
    return passes


def rate(work, us):
    return {"us": round(us, 2), "tflops": round(work / us * 1e-6, 1)}


def rates(shape, times, variants):
    """role -> ours and every rival, and the fastest rival's time over ours."""
    result = {}
    for role, flops in FLOPS.items():
        work = flops * shape.rows * shape.n * shape.d
        if ("ours", role) not in times:
            raise SystemExit(f"no kernel of ours has a name of the role {role}")
        parts = {who: rate(work, us) for (who, of), us in times.items() if of == role}
        for who, part in parts.items():
            part |= {"variant": variants[who][role]} if who in variants else {}
        best = min(part["us"] for who, part in parts.items() if who != "ours")
        result[role] = parts | {"of_best_rival": round(best / parts["ours"]["us"], 3)}
    return result


def measure(library, shape, burst_ms, rivals=RIVALS):
    """{"kernels": role -> figures, "left_out": rival -> reason} of one layer shape. Every result is
    compared with torch's first."""
    data = Data(shape, torch.device("cuda"))
    data.sample(0)
    ours = Ours(library, data)
    data.poison()
    ours.forward()
    ours.backward()
    check.Checker(data).check_ours("ours")
    products = products_of(data, data.ids.flatten().bincount(minlength=shape.E).tolist())
    passes, variants, left_out = our_passes(ours), {}, {}
    for who in rivals:
        try:
            found = {role: RIVALS[who].tuned(role, product) for role, product in products.items()}
        except (OSError, RuntimeError) as error:
            left_out[who] = packages.first_line(error)
            continue
        found = {role: pair for role, pair in found.items() if pair is not None}
        variants[who] = {role: variant for role, (variant, _) in found.items()}
        passes |= rival_passes(who, {role: run for role, (_, run) in found.items()})
    times = kernels.times_by_role(passes, burst_ms)
    result = {"kernels": rates(shape, times, variants)}
    return result | ({"left_out": left_out} if left_out else {})
