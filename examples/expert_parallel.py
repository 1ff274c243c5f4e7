#!/usr/bin/env python3
"""Trains one layer whose 12 experts are divided among processes, and keeps a checkpoint.

    torchrun --nproc-per-node 2 examples/expert_parallel.py --folder out/ep
    torchrun --nproc-per-node 3 examples/expert_parallel.py --folder out/ep    continues with three

Each process uses its own GPU if there are enough GPUs, else the CPU. docs/distributed.md explains
the steps.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sonicmoe_cpp import unsupported_reason
from sonicmoe_cpp.distributed import ExpertParallelMoE, clip_grad_norm_
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

HIDDEN, TOKENS = 64, 512


def batch(step: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the tokens of a step, and the outputs that the layer is to learn."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    x = x.tensor_split(dist.get_world_size())[dist.get_rank()].to(device, dtype)
    return x, torch.nn.functional.gelu(2 * x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()

    dist.init_process_group()
    local = int(os.environ["LOCAL_RANK"])
    cuda = local < torch.cuda.device_count() and unsupported_reason(f"cuda:{local}") is None
    device, dtype = (f"cuda:{local}", torch.bfloat16) if cuda else ("cpu", torch.float32)
    if cuda:
        torch.cuda.set_device(device)

    layer = ExpertParallelMoE(12, 2, HIDDEN, 32, lb_coef=0.01, device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    done = torch.zeros((), dtype=torch.int64)

    def state() -> dict:
        model, moments = get_state_dict(layer, optimizer)
        return {"model": model, "optimizer": moments, "steps": done}

    saved = sorted(given.folder.glob("step-*")) if given.folder is not None else []
    if saved:
        found = state()
        dcp.load(found, checkpoint_id=saved[-1])
        set_state_dict(
            layer, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
    for step in range(int(done), int(done) + given.steps):
        x, target = batch(step, device, dtype)
        out, aux = layer(x)
        # The whole loss is the sum of the ranks' losses. Every rank adds aux.loss, which still
        # counts once.
        loss = (out - target).float().square().sum() / (TOKENS * HIDDEN)
        (loss + aux.loss).backward()
        layer.sum_replicated_gradients()
        clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
        done += 1
    if given.folder is not None:
        dcp.save(state(), checkpoint_id=given.folder / f"step-{int(done):06}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
