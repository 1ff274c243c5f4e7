"""Trains torchtitan 0.2.2's Qwen3-MoE on the CPU with its own experts, broken ones and ours.

    python titan_02_jobs.py FOLDER

FOLDER holds the unpacked wheel in `titan`. Two ranks are forked; rank 0 writes FOLDER/results:
{way of training/experts: [[loss, norm of the gradients] of each step]}.
"""

import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

FOLDER = Path(sys.argv[1])
sys.path.insert(0, str(FOLDER / "titan"))

from sonicmoe_cpp.integrations import torchtitan as ours  # noqa: E402
from torchtitan.distributed.expert_parallel import ExpertParallel  # noqa: E402
from torchtitan.models.moe import MoEArgs, moe, utils  # noqa: E402
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs  # noqa: E402
from torchtitan.models.qwen3.model.model import Qwen3Model  # noqa: E402

RANKS = 2
STEPS = 4
WAYS = ("one process", "compiled", "FSDP2", "EP")
EXPERTS = ("own", "swapped", "replaced")
THEIR_EXPERTS, THEIR_PADDING = moe._run_experts_grouped_mm, moe.indices_padding_wrapper
# Its rows are permuted by a Triton kernel, or on the CPU by this function of the same file.
utils.generate_permute_indices = partial(utils.generate_permute_indices, use_cpu=True)
# Histograms of integers need a GPU.
histogram = torch.histc
torch.histc = lambda ids, **bins: histogram(ids.float(), **bins).to(ids.dtype)


def use(experts: str) -> None:
    moe._run_experts_grouped_mm, moe.indices_padding_wrapper = THEIR_EXPERTS, THEIR_PADDING
    if experts == "swapped":
        moe._run_experts_grouped_mm = lambda w1, w2, w3, *rows: THEIR_EXPERTS(w3, w2, w1, *rows)
    elif experts == "replaced":
        ours.replace()


def model() -> Qwen3Model:
    torch.manual_seed(0)
    experts = MoEArgs(
        num_experts=8,
        num_shared_experts=0,
        top_k=2,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
    )
    arguments = Qwen3ModelArgs(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        vocab_size=256,
        max_seq_len=64,
        moe_enabled=True,
        moe_inter_dim=32,
        moe_args=experts,
    )
    found = Qwen3Model(arguments)
    with torch.no_grad():
        found.init_weights()
        for layer in found.layers.values():
            for weight in layer.moe.experts.parameters():
                weight.normal_(std=0.1)
    return found


def trained(way: str, rank: int) -> list:
    """Trains. Every rank has the same tokens, so a sum of gradients over the ranks keeps its
    direction."""
    torch._dynamo.reset()
    net = model()
    if way == "EP":
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
        for layer in net.layers.values():
            parallelize_module(layer.moe.experts, mesh, ExpertParallel())
    if way == "FSDP2":
        for layer in net.layers.values():
            fully_shard(layer)
        fully_shard(net)
    if way == "compiled":
        for layer in net.layers.values():
            layer.compile(backend="aot_eager")
    tokens = torch.randint(256, (2, 49), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=0.1, foreach=False)
    steps = []
    for _ in range(STEPS):
        logits = net(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norms = [p.grad.norm() for p in net.parameters()]
        norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        optimizer.step()
        optimizer.zero_grad()
        steps.append([float(loss), float(torch.stack(norms).norm())])
    return steps


def work(rank: int) -> None:
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=rank, world_size=2)
    found = {}
    for way in WAYS:
        for experts in EXPERTS:
            use(experts)
            found[f"{way}/{experts}"] = trained(way, rank)
    if rank == 0:
        (FOLDER / "results").write_text(json.dumps(found))
    dist.barrier()


def main() -> None:
    processes = []
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                work(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        processes.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
