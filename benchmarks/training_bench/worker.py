"""A rank of one measurement: python -m torch.distributed.run ... -m training_bench.worker ..."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from sonicmoe_cpp.integrations.torchtitan.sizes import SIZES
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from training_bench.model import POLICIES, ChunkedLoss, Model, chunk_gradient, job
from training_bench.over_ranks import (
    add_in_place,
    clip_gradients,
    divide_experts,
    divided,
    norm_of_parts,
    parameter_groups,
    part_of_rank,
    sum_gradients,
)
from training_bench.profile import where

GIB = 1 << 30
# "fsdp": FSDP2 shards all parameters. "ep": a rank has whole experts, FSDP2 shards the others.
# "ep-gathered": as "ep", and the others stay gathered from a step's first forward to its last
# backward, in which their gradients are reduced.
PARALLEL = ("fsdp", "ep", "ep-gathered")
WARM_UP = 4  # steps before the measured ones; one is enough if settle() ran others
BALANCE = 1e-3  # by which a step moves the experts' selection bias
FASTER = 20  # the first step of settle() moves the bias by FASTER * BALANCE


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--experts", choices=("ours", "titan"), required=True)
    parser.add_argument("--policy", choices=POLICIES, required=True)
    parser.add_argument("--parallel", choices=PARALLEL, default="fsdp")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--capacity", type=float, default=0)
    parser.add_argument("--keep-rows", type=int, default=0)
    parser.add_argument("--settle", type=int, default=0)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--reduce", default="float32")
    parser.add_argument("--sequence", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--text", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", type=int, default=1)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


class Text:
    """Batches of a file of tokens; without a file, random tokens by Zipf's law."""

    def __init__(self, options, vocabulary: int, rank: int, ranks: int):
        self.shape = (options.tokens // options.sequence, options.sequence + 1)
        self.rank, self.ranks, self.vocabulary = rank, ranks, vocabulary
        self.tokens = numpy.load(options.text, mmap_mode="r") if options.text else None
        if self.tokens is not None and self.tokens.max(initial=0) >= vocabulary:
            raise ValueError(f"{options.text} has tokens beyond the vocabulary of {vocabulary}")
        count = self.shape[0] * self.shape[1]
        if self.tokens is not None and len(self.tokens) <= count:
            raise ValueError(
                f"{options.text} has {len(self.tokens)} tokens, must have more than the {count} of "
                "a batch"
            )

    def __call__(self, step: int) -> Tensor:
        number = step * self.ranks + self.rank
        count = self.shape[0] * self.shape[1]
        if self.tokens is None:
            rng = numpy.random.default_rng(number)
            drawn = rng.zipf(1.2, count) % self.vocabulary
        else:
            begin = number * count % (len(self.tokens) - count)
            drawn = self.tokens[begin : begin + count].astype(numpy.int64)
        return torch.from_numpy(drawn.reshape(self.shape))


def build(options, size, mesh) -> Model:
    """The sharded model, fp32 parameters, bf16 in its products; the same weights for both kinds of
    experts."""
    config = job(size, options.experts == "ours", options.policy)
    with torch.device("meta"):
        model = Model(size, config, options.sequence)
    divides = options.parallel != "fsdp"
    if divides:
        divide_experts(model, options, mesh.size())
    if config.checkpointing is not None:
        policy = config.checkpointing.build()
        for i, layer in enumerate(model.layers):
            model.layers[i] = policy._wrap_block(layer, base_fqn=f"layers.{i}")
    if options.compile:
        ChunkedLoss.gradient = staticmethod(torch.compile(chunk_gradient))
        for layer in model.layers:
            layer.compile(fullgraph=True)
    mixed = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, options.reduce)
    )
    sharding = {"mesh": mesh, "mp_policy": mixed}
    sharding["ignored_params"] = divided(model) if divides else set()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=not keeps_gathered(options), **sharding)
    fully_shard(model, **sharding)
    if divides:
        sum_gradients(model)
    if options.device == "cpu":  # gloo has no scaled sum
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=options.device)
    initialise(model, size, mesh.get_local_rank())
    if divides:
        add_in_place(model)
    return model


def keeps_gathered(options) -> bool:
    return options.parallel == "ep-gathered"


def initialise(model: Model, size, rank: int) -> None:
    """Sets this rank's part of the weights, and zeros in the buffers. Embeddings have a standard
    deviation of 1, as in torchtitan's DeepSeek-V3. With 0.02, attention's output, which is similar
    for all tokens, soon exceeds the embeddings, and most tokens choose the same experts."""
    torch.manual_seed(1 + rank)
    residual = 0.02 / (2 * size.layers) ** 0.5
    for name, parameter in model.named_parameters():
        part = part_of_rank(parameter).detach()
        if "norm" in name:
            part.fill_(1)
        elif name == "embeddings.weight":
            part.normal_()
        else:
            scaled = name.endswith(("wo.weight", "w2_EDF"))
            part.normal_(std=residual if scaled else 0.02)
    for buffer in model.buffers():
        buffer.zero_()


@torch.no_grad()
def balance(model: Model, ranks: int, by: float) -> Tensor:
    """Moves the experts' selection bias by `by` against their load, for all layers at once. Returns
    the largest load of an expert and of a rank's E / ranks experts, over the mean, each averaged
    over the layers."""
    moes = [m for m in model.modules() if hasattr(m, "expert_bias_E")]
    counts = torch.stack([m.tokens_per_expert_E for m in moes])
    if ranks > 1:
        dist.all_reduce(counts)
    mean = counts.mean(-1, keepdim=True)
    for moe, step in zip(moes, by * (mean - counts).sign(), strict=True):
        moe.expert_bias_E.add_(step)
        moe.tokens_per_expert_E.zero_()
    loads = counts / mean
    of_ranks = loads.unflatten(1, (ranks, -1)).mean(-1)
    return torch.stack([load.amax(1).mean() for load in (loads, of_ranks)])


class Training:
    def __init__(self, options):
        self.options, self.size = options, SIZES[options.model]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(options.device, (self.ranks,))
        self.model = build(options, self.size, mesh)
        self.rope = self.model.rope(options.device)
        self.text = Text(options, self.size.vocabulary, self.rank, self.ranks)
        self.divided = parameter_groups(self.model) if options.parallel != "fsdp" else None
        groups = [{"params": g} for g in self.divided or [list(self.model.parameters())]]
        self.optimizer = torch.optim.AdamW(
            groups, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []  # of the experts' gradients, before they are clipped
        self.loads: list[Tensor] = []  # of every step: the result of balance()
        self.batches = 0  # micro-batches so far

    def settle(self) -> None:
        """Balances the routing of new weights: steps of one micro-batch in which the experts' bias
        moves faster, at last by about BALANCE."""
        for left in range(self.options.settle, 0, -1):
            self.step(1, BALANCE * FASTER ** (left / self.options.settle))
        self.losses.clear()
        self.norms.clear()

    def step(self, count: int, by: float = BALANCE) -> None:
        """Forward and backward of `count` micro-batches, clipping, optimizer; nothing waits for the
        device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, (len(self.loads) + 1) / self.options.warm_up)
        total = 0
        for left in reversed(range(count)):
            # The last backward reshards, because the optimizer changes the sharded parameters. The
            # others add to gradients of whole parameters.
            if keeps_gathered(self.options):
                self.model.set_reshard_after_backward(left == 0)
                self.model.set_requires_gradient_sync(left == 0)
            tokens = self.text(self.batches).to(self.options.device, non_blocking=True)
            self.batches += 1
            loss = self.model(tokens, *self.rope) / count
            (loss / self.ranks if self.divided else loss).backward()
            total += loss.detach()
        if len(self.norms) < WARM_UP:
            self.norms.append(norm_of_parts(parameter_groups(self.model)[0]))
        if self.divided:
            clip_gradients(self.divided, 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.loads.append(balance(self.model, self.ranks, by))
        self.optimizer.step()
        self.clear_gradients()
        self.losses.append(total)

    def clear_gradients(self) -> None:
        """Zeros in the gradients that add_in_place() adds to, none for all other parameters."""
        experts, others = self.divided or ([], self.model.parameters())
        for parameter in others:
            parameter.grad = None
        if experts:
            torch._foreach_zero_([p.grad for p in experts])

    def parameters(self) -> int:
        """Of all ranks."""
        groups = self.divided or [[], self.model.parameters()]
        of_experts, others = (sum(p.numel() for p in group) for group in groups)
        return of_experts * self.ranks + others

    def mean_losses(self) -> list[float]:
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)
        return [round(value, 5) for value in (losses / self.ranks).tolist()]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(options) -> dict:
    training, cuda = Training(options), options.device == "cuda"
    training.settle()
    count = options.micro_batches
    for _ in range(1 if options.settle else WARM_UP):
        training.step(count)
    wait(options.device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(options.steps):
        training.step(count)
    wait(options.device)
    seconds = (time.perf_counter() - began) / options.steps
    rate = training.ranks * options.tokens * count / seconds
    of_expert, of_rank = torch.stack(training.loads[-options.steps :]).mean(0).tolist()
    found = {
        "tokens_per_s": round(rate),
        "flops_per_token": training.model.flops_per_token(),
        "peak_gib": None,
        "losses": training.mean_losses(),
        "expert_norms": [norm.item() for norm in training.norms],
        "load": {"expert": round(of_expert, 3), "rank": round(of_rank, 3)},
        "steps": len(training.loads),  # of all kinds
        "parameters": training.parameters(),
        "experts": type(training.model.layers[0].moe.routed_experts).__name__,
        "compiled": bool(options.compile),
        "policy": options.policy,
        "parallel": options.parallel,
    }
    if cuda:
        peak = torch.tensor([torch.cuda.max_memory_allocated() / GIB], device="cuda")
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        found["peak_gib"] = round(peak.item(), 2)
        found["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        found |= where(lambda: training.step(count))
    return found


def main() -> None:
    options = arguments()
    local = int(os.environ["LOCAL_RANK"])
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=300))
    found = measure(options)
    if dist.get_rank() == 0:
        with open(options.out, "w") as file:
            json.dump(found, file)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
