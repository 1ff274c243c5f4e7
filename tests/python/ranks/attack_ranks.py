"""Attacks ranks of expert parallelism: at a random exchange of two steps one rank is killed,
stopped, interrupted, late, raises, never begins, or does something else than the others. The other
ranks must end soon, by a sentence that names it. Without an attack the results are those of one
process.

    python tests/python/ranks/attack_ranks.py --minutes 60 [--seed 7]     over gloo, 2 to 4 ranks
    timeout -k 5 235 python tests/python/ranks/attack_ranks.py --over gpus --count 10 --minutes 2.8

prints each seed; --seed S --count 1 repeats one of them. "gpus" is peer memory of --ranks GPUs,
"stand-in" the same on CPUs with exchange_fake.py. timeout also ends the processes that this one has
started. test_attack_ranks.py runs a few attacks.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import exchange_fake
import sonicmoe_cpp as smoe
import torch
import worlds
from sonicmoe_cpp.distributed import ExpertParallelMoE, moe_expert_parallel

STEPS, SOON = 2, 30.0  # seconds within which the others end


class Place(NamedTuple):
    """Where ranks run."""

    exchanges: tuple[int, int]  # the first and the last one that may be attacked
    limit: float  # seconds; of most attacks
    short: float  # the limit in attacks that end by it
    whole: float  # seconds after which all processes of an attack are killed
    transport: str = "peer"
    device: str = "cpu"
    backend: str = "gloo"
    # What may also be said of a rank that the GPUs wait for.
    waits: str = (
        r"|rank {v} did not send .*within the time limit|ranks .*\b{v}\b.* did not come within"
    )


# Two steps have 26 exchanges over gloo, 14 over peer memory. On GPUs a rank that is lost in the
# first one, in which NCCL starts, or in the last one is noticed by NCCL's own time limit alone, and
# a rank that does something else by the limit of the exchange. A late rank whose last collective
# waits on the GPU for ranks that have ended waits until NCCL's time limit, too: it is killed.
PLACES = {
    "gloo": Place((1, 26), 60.0, 4.0, 80.0, "all_to_all", waits=""),
    "stand-in": Place((1, 14), 60.0, 4.0, 80.0),
    "gpus": Place((2, 13), 12.0, 8.0, 60.0, device="cuda", backend="nccl"),
}
OPTIONS = ("activation", "gate_layout", "score", "routing", "lb_coef", "bias", "top_k")
VALUES = ("geglu", "interleaved", "sigmoid", "expert_choice", 0.5, True, 1)


class Plan(NamedTuple):
    """An attack, which follows from its seed."""

    event: str
    size: int
    victim: int
    exchange: int  # before which the event happens, if it has an exchange
    option: int

    @classmethod
    def of(cls, seed: int, over: str = "gloo", ranks: int | None = None) -> Plan:
        rng = random.Random(seed)
        drawn = rng.choice((2, 2, 3, 4))
        size = ranks or drawn
        exchange = rng.randint(*PLACES[over].exchanges)
        numbers = rng.randrange(size), exchange, rng.randrange(len(OPTIONS))
        events = [each for each in SENTENCES if over != "gpus" or each != "absent"]
        return cls(events[seed % len(events)], size, *numbers)


# On GPUs a rank that leaves a step can hold other ranks in collectives that do not match. Then none
# can tell which one has left, but it must say where itself waits, and if the absent rank has waited
# before, that this was another place.
ELSEWHERE = r"|did not come within \d+ s \((rank \d last waited in (?P<there>[^,)]+),"
ELSEWHERE += r".* this rank waits in (?!(?P=there)\))|this rank waits in )"
# What the other ranks' errors contain, unless they contain CONSEQUENCE; {v} is the attacked rank.
SENTENCES = {
    "nothing": "",
    "kill": r"\b{v}\b.* (has|have) ended",
    "interrupt": r"rank {v} failed: KeyboardInterrupt",
    "raise": r"rank {v} failed: ValueError: x has shape",
    "stop": r"rank {v} .*did not come within|the store of the process group does not answer",
    "late": r"\b{v} did not come within",
    "option": r"all ranks must make the same calls, but {option} is",
    "layer": r"all ranks must make the same calls, but the layer is",
    "no_grad": r"all ranks must make the same calls, but the graph for gradients is",
    "absent": r"rank {v} did not come to the group's first exchange",
    "leave": r"all ranks must make the same calls, but it is",
}
# A rank whose error is the consequence of another one's, or of the end of the attacked rank, which
# has ended before it was asked for the reason.
CONSEQUENCE = r"|rank \d+ failed|\d .*(has|have) ended"


def kill_later(seconds: float) -> None:
    """Kills this process, unless it has ended by then and another one has its number."""
    me = os.getpid()
    still = f'read _ _ _ parent _ < /proc/$$/stat; [ "$parent" = {me} ]'
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; {still} && kill -KILL {me}"])


def stop(place: Place) -> None:
    kill_later(place.whole / 2)
    os.kill(os.getpid(), signal.SIGSTOP)


def late(place: Place) -> None:
    if place.device == "cuda":
        kill_later(2 * place.short + SOON)
    time.sleep(2 * place.short)


ACTIONS = {
    "kill": lambda place: os.kill(os.getpid(), signal.SIGKILL),
    "interrupt": lambda place: os.kill(os.getpid(), signal.SIGINT),
    "stop": stop,
    "late": late,
}


def attacked(seed: int, over: str, rank: int, size: int, folder: Path) -> str:
    """What one rank does."""
    place, plan = PLACES[over], Plan.of(seed, over, size)
    if over == "stand-in":
        exchange_fake.install()
    if plan.event == "nothing":
        return equal(seed, place, rank, size)
    here = rank == plan.victim
    if here and plan.event in ACTIONS:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        worlds.at_exchange(plan.exchange, lambda: ACTIONS[plan.event](place))
    torch.manual_seed(seed)
    timeout = place.short if plan.event in ("stop", "late") else place.limit
    options = {"top_k": 3, "timeout": timeout, "lb_coef": 0.1, "transport": place.transport}
    dtype = torch.bfloat16 if place.device == "cuda" else torch.float32
    kind = {"device": place.device, "dtype": dtype}
    if here and plan.event == "absent":
        raise ValueError("before the first layer")
    if here and plan.event == "option":
        options[OPTIONS[plan.option]] = VALUES[plan.option]
    sizes = {"num_experts": 12, "hidden_size": 24, "intermediate_size": 16} | kind
    layer = ExpertParallelMoE(**sizes, **options)
    other = ExpertParallelMoE(**sizes, **options) if plan.event == "layer" else layer
    for step in range(STEPS):
        now = here and step == STEPS - 1
        tokens = random.Random(seed + rank + step).randrange(40)
        x = torch.randn(tokens, 24, requires_grad=True, **kind)
        if now and plan.event == "raise":
            layer(torch.zeros(3, 25, **kind))
        with torch.set_grad_enabled(not (now and plan.event == "no_grad")):
            out, aux = (other if now else layer)(x)
        if now and plan.event == "leave":
            out, aux = layer(x)
        (out.square().sum() + aux.loss).backward()
        if place.transport == "peer":
            layer.sum_replicated_gradients()  # waits for the GPU, and finds faults of this step
    if plan.event == "leave":
        layer(x)
    return "done"


def equal(seed: int, place: Place, rank: int, size: int) -> str:
    """The layer of random sizes, with tokens and experts of all ranks in one process."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens = [rng.choice((0, 1, rng.randrange(50))) for _ in range(size)]
    each, k, d, n = (rng.randint(1, most) for most in (4, 4, 5, 4))
    d, n = 8 * d, 8 * n if place.device == "cuda" else 7 * n + rng.randrange(7)
    experts, total = each * size, sum(tokens)
    # fp64, but peer memory serves bf16 on GPUs, and the stand-in fp32.
    dtypes = {"cuda": torch.bfloat16, "cpu": torch.float32}
    dtype = torch.float64 if place.transport == "all_to_all" else dtypes[place.device]
    scores = torch.float64 if dtype == torch.float64 else torch.float32
    ids = torch.randint(-1, experts, (total, k), generator=g).to(place.device)
    sizes = (total, d), (total, d), (total, k), (experts, 2 * n, d), (experts, d, n)
    drawn = [torch.randn(size, generator=g, dtype=torch.float64).to(place.device) for size in sizes]
    x, dout, weights, up, down = (
        t.sigmoid().to(scores) if i == 2 else t.to(dtype) for i, t in enumerate(drawn)
    )
    own = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    mine = slice(rank * each, (rank + 1) * each)
    found = []
    whole = slice(None)
    parallel = functools.partial(moe_expert_parallel, transport=place.transport, timeout=20.0)
    for rows, part, layer in ((whole, whole, smoe.moe), (own, mine, parallel)):
        parts = x[rows], weights[rows], up[part], down[part]
        leaves = [t.clone().requires_grad_() for t in parts]
        out = layer(leaves[0], ids[rows], *leaves[1:])
        found.append([out, *torch.autograd.grad(out, leaves, dout[rows])])
    of_one = [t[s] for t, s in zip(found[0], (own, own, own, mine, mine), strict=True)]
    for got, want in zip(found[1], of_one, strict=True):
        difference = torch.linalg.vector_norm((got - want).double())
        allowed = 4 * torch.finfo(dtype).eps * torch.linalg.vector_norm(want.double())
        assert difference <= 4 * allowed + 1e-30, (float(difference), float(allowed), got.shape)
    return "done"


def attack(seed: int, over: str = "gloo", ranks: int | None = None) -> str:
    """Runs one attack and checks it. Returns the event."""
    plan, place = Plan.of(seed, over, ranks), PLACES[over]
    job, backend = functools.partial(attacked, seed, over), place.backend
    with tempfile.TemporaryDirectory() as folder:
        found = worlds.run(job, plan.size, Path(folder), place.whole, backend)
    others = [each for rank, each in enumerate(found) if rank != plan.victim]
    if plan.event == "nothing":
        assert all(each.get("result") == "done" for each in found), found
        return plan.event
    assert found[plan.victim] is None or plan.event not in ("kill", "stop"), found
    sentence = SENTENCES[plan.event] + place.waits
    if place.device == "cuda" and plan.event == "leave":
        sentence += ELSEWHERE
    sentence = sentence.format(v=plan.victim, option=OPTIONS[plan.option])
    named = re.compile(sentence + CONSEQUENCE)
    for each in others:
        assert each is not None and "error" in each, found
        assert each["error"].startswith("ExpertParallelError"), each
        assert named.search(each["error"]), (sentence, each["error"])
        assert each["seconds"] < SOON, each
    return plan.event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1 << 30)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--over", choices=PLACES, default="gloo")
    parser.add_argument("--ranks", type=int, help="of every attack; default: 2 to 4, on GPUs 2")
    parser.add_argument("--spare", action="store_true", help="rests between attacks, by the load")
    options = parser.parse_args()
    if options.over == "gpus":
        options.ranks = options.ranks or 2
        for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
            os.environ.setdefault(name, "0" if name.startswith("NCCL") else "1")
    where = options.over, options.ranks
    until, counts, failed = time.monotonic() + 60 * options.minutes, Counter(), []
    for seed in range(options.seed, options.seed + options.count):
        if time.monotonic() > until:
            break
        sys.stdout.write(f"seed {seed}: {Plan.of(seed, *where)}\n")
        sys.stdout.flush()
        began = time.monotonic()
        try:
            counts[attack(seed, *where)] += 1
        except AssertionError as error:
            failed.append(seed)
            sys.stdout.write(f"seed {seed} FAILED: {error}\n")
        if options.spare:
            busy = max(1.0, os.getloadavg()[0] / os.cpu_count())
            time.sleep(busy * (time.monotonic() - began))
    sys.stdout.write(f"passed: {dict(counts)}; failed: {failed}\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
