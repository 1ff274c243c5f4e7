#!/usr/bin/env python3
"""Trains a stack of attention and divided experts with two micro-batches a step. Attention of one
micro-batch runs while rows of the other one travel, in forward and in backward.

    torchrun --nproc-per-node 2 examples/two_micro_batches.py
    torchrun --nproc-per-node 2 examples/two_micro_batches.py --in-turn    one after the other

On CPUs both print the same losses. Each process uses its own GPU if there are enough GPUs, else the
CPU. docs/distributed.md explains the parts of a layer.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sonicmoe_cpp import unsupported_reason
from sonicmoe_cpp.distributed import ExpertParallelMoE
from torch import Tensor, nn


class Block(nn.Module):
    """Attention in two parts, each long enough to cover a transfer, and a layer over ranks."""

    def __init__(self, given, device, dtype):
        super().__init__()
        d, where = given.hidden, {"device": device, "dtype": dtype}
        self.heads = given.heads
        self.wqkv = nn.Linear(d, 3 * d, bias=False, **where)
        self.wo = nn.Linear(d, d, bias=False, **where)
        limits = {"max_tokens": given.sequences * given.tokens, "capacity": given.capacity}
        sizes = (given.experts, given.top_k, d, given.width)
        self.moe = ExpertParallelMoE(*sizes, shared_experts=given.shared, **where, **limits)

    def project(self, x: Tensor) -> Tensor:
        return self.wqkv(F.rms_norm(x, x.shape[-1:]))

    def attend(self, x: Tensor, qkv: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.wo(out.transpose(1, 2).flatten(2))


def in_turn(blocks, a: Tensor, b: Tensor) -> list[Tensor]:
    outs = []
    for x in (a, b):
        for block in blocks:
            x = block.attend(x, block.project(x))
            x = x + block.moe(F.rms_norm(x, x.shape[-1:]))[0]
        outs.append(x)
    return outs


def interleaved(blocks, a: Tensor, b: Tensor) -> list[Tensor]:
    """Every rank calls the parts in this order, and autograd runs their backward in the reverse
    order."""
    a = blocks[0].attend(a, blocks[0].project(a))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        step = block.moe.begin(F.rms_norm(a, a.shape[-1:]))
        qkv = block.project(b)  # while a's rows travel to their experts
        step.compute()
        b = block.attend(b, qkv)  # while a's partial sums travel
        a = a + step.finish()[0]
        step = block.moe.begin(F.rms_norm(b, b.shape[-1:]))
        if after is not None:
            qkv = after.project(a)
        step.compute()
        if after is not None:
            a = after.attend(a, qkv)
        b = b + step.finish()[0]
    return [a, b]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=2, help="of a micro-batch on a rank")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--experts", type=int, default=12)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--shared", type=int, default=1)
    parser.add_argument("--capacity", type=float, default=4.0)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    dist.init_process_group()
    local, rank, ranks = int(os.environ["LOCAL_RANK"]), dist.get_rank(), dist.get_world_size()
    cuda = local < torch.cuda.device_count() and unsupported_reason(f"cuda:{local}") is None
    device, dtype = (f"cuda:{local}", torch.bfloat16) if cuda else ("cpu", torch.float32)
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the dense weights are equal on all ranks
    blocks = nn.ModuleList(Block(given, device, dtype) for _ in range(given.layers))
    dense = [p for block in blocks for p in (block.wqkv.weight, block.wo.weight)]
    of_layers = [list(block.moe.parameters()) for block in blocks]
    groups = [dense, *of_layers]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3, foreach=False)
    forward = in_turn if given.in_turn else interleaved
    shape = (2, given.sequences, given.tokens, given.hidden)
    losses, began = [], 0.0
    for step in range(given.steps):
        if step == given.steps // 2:  # the second half is timed
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
        generator = torch.Generator().manual_seed(step * ranks + rank)
        x = torch.randn(shape, generator=generator).to(device, dtype)
        outs = forward(blocks, *x)
        # The whole loss is the sum of the ranks' losses.
        loss = sum(
            (out - of.roll(1, 1)).float().square().mean() for out, of in zip(outs, x, strict=True)
        )
        (loss / ranks).backward()
        for block in blocks:
            block.moe.sum_replicated_gradients()
        for parameter in dense:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() / ranks)
    total = torch.stack(losses)
    dist.all_reduce(total)
    milliseconds = 1e3 * (time.perf_counter() - began) / (given.steps - given.steps // 2)
    if rank == 0:
        print("losses", " ".join(f"{value:.5f}" for value in total.tolist()))
        print(f"{milliseconds:.2f} ms a step, {forward.__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
