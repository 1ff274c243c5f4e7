"""Runs torchtitan's own trainer on the CPU: jobs by command line, one after the other in a process.

    python titan_jobs.py PHASES.json
    python titan_jobs.py --module titan_models --config qwen3 ...    one job, on one rank

PHASES.json: a list of phases, one after the other. A phase is a list of worlds that run beside each
other: {"name": ..., "ranks": ..., "jobs": {name: {"arguments": [...], "kill_at": step}}}. A killed
job is the last of its world. Every rank is forked from this process, which has imported everything
and computed nothing: an import takes longer than a job. Beside PHASES.json come NAME.RANK.log and,
by rank 0, NAME.results: {name: {"steps": {step: metrics}, "names": parameters, "quantised": how
often modules quantised weights} or {"error": ...}}.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

import titan_device  # noqa: F401
import titan_models  # noqa: F401  (jobs name it)
import torch
import torch.distributed as dist
from sonicmoe_cpp import fp8
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask, create_mask
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ConfigManager
from torchtitan.distributed import fsdp
from torchtitan.models.common import attention as titan_attention


def attention(q, k, v, *, block_mask, scale, return_aux, **others):
    """Replaces flex_attention, which has no gradient on the CPU."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    mask = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], device="cpu")
    scores = (q.float() @ k.float().mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -torch.inf)
    out = (scores.softmax(-1) @ v.float()).to(q.dtype)
    return out, AuxOutput(scores.logsumexp(-1))


def without_division(model) -> None:
    """Replaces fsdp.disable_fsdp_gradient_division: it sums, because gloo has no scaled sum."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = without_division
titan_attention.FlexAttention._compiled_flex_attn = attention
titan_attention._compiled_create_block_mask = create_block_mask  # every rank would compile it again
time.sleep = lambda seconds: None  # the trainer waits two seconds at its end


def run(job: dict) -> dict:
    """The metrics of every step, or the sentence of a refusal."""
    steps = {}
    report = MetricsProcessor.log

    def log(self, step, loss, max_loss, grad_norm, extra_metrics=None):
        steps[step] = {"loss": loss, "grad_norm": grad_norm} | (extra_metrics or {})
        if step == job.get("kill_at"):
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        report(self, step, loss, max_loss, grad_norm, extra_metrics)

    MetricsProcessor.log = log
    trainer = None
    quantise = mock.patch.object(fp8, "quantize_weights", wraps=fp8.quantize_weights)
    try:
        with quantise as calls:
            trainer = ConfigManager().parse_args(job["arguments"]).build()
            trainer.train()
    except (NotImplementedError, ValueError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        MetricsProcessor.log = report
        if trainer is not None:
            trainer.close()
    names = [name for name, _ in trainer.model_parts[0].state_dict().items()]
    return {"steps": steps, "names": names, "quantised": calls.call_count}


def work(world: dict, rank: int, stem: str) -> None:
    """One rank of a world."""
    ranks = world["ranks"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    # The trainer uses a process group that exists. Before it makes its own, it does this too:
    torch.autograd.set_multithreading_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{stem}.store", rank=rank, world_size=ranks)
    found = {}
    for name, job in world["jobs"].items():
        found[name] = run(job)
        if rank == 0:
            with open(f"{stem}.results", "w") as file:
                json.dump(found, file)
    dist.destroy_process_group()


def fork(world: dict, rank: int, stem: str) -> int:
    """Forks the process of this rank, which exits with 0 unless it raised."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        log = os.open(f"{stem}.{rank}.log", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        work(world, rank, stem)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    if sys.argv[1].startswith("--"):
        with tempfile.TemporaryDirectory() as folder:
            job = {"arguments": sys.argv[1:]}
            work({"ranks": 1, "jobs": {"job": job}}, 0, f"{folder}/job")
            found = json.loads(Path(f"{folder}/job.results").read_text())["job"]
        for step, metrics in found.get("steps", {}).items():
            print(f"step {step}: loss {metrics['loss']:.3f}")
        sys.exit(found.get("error"))
    path = Path(sys.argv[1])
    for phase in json.loads(path.read_text()):
        expected = {}
        for world in phase:
            killed = any(job["kill_at"] for job in world["jobs"].values())
            for rank in range(world["ranks"]):
                process = fork(world, rank, str(path.parent / world["name"]))
                expected[process] = -signal.SIGKILL if killed else 0
        while expected:
            process, status = os.wait()
            if os.waitstatus_to_exitcode(status) != expected.pop(process):
                sys.exit("a rank failed")


if __name__ == "__main__":
    main()
