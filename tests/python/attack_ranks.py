"""Attacks ranks of expert parallelism over gloo: at a random exchange of two steps one rank is
killed, stopped, interrupted, late, raises, never begins, or does something else than the others.
The other ranks must end soon, by a sentence that names it. Without an attack the results are those
of one process.

    python tests/python/attack_ranks.py --minutes 60 [--seed 7]

prints each seed; --seed S --count 1 repeats one of them. test_attack_ranks.py runs a few.
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

import sonicmoe_cpp as smoe
import torch
import worlds
from sonicmoe_cpp.distributed import ExpertParallelMoE, moe_expert_parallel

STEPS, EXCHANGES = 2, 26  # exchanges of two steps, with the two before the first step
SOON = 30.0  # seconds within which the others end; less than the limit of 60 s of most attacks
SHORT = 4.0  # the limit in attacks that end by it
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
    def of(cls, seed: int) -> Plan:
        rng = random.Random(seed)
        size = rng.choice((2, 2, 3, 4))
        numbers = rng.randrange(size), rng.randint(1, EXCHANGES), rng.randrange(len(OPTIONS))
        return cls(list(SENTENCES)[seed % len(SENTENCES)], size, *numbers)


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
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -KILL {os.getpid()}"])


def stop() -> None:
    kill_later(SHORT + SOON)
    os.kill(os.getpid(), signal.SIGSTOP)


ACTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "stop": stop,
    "late": lambda: time.sleep(2 * SHORT),
}


def attacked(seed: int, rank: int, size: int, folder: Path) -> str:
    """What one rank does."""
    plan = Plan.of(seed)
    if plan.event == "nothing":
        return equal(seed, rank, size)
    here = rank == plan.victim
    if here and plan.event in ACTIONS:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        worlds.at_exchange(plan.exchange, ACTIONS[plan.event])
    torch.manual_seed(seed)
    timeout = SHORT if plan.event in ("stop", "late") else 60.0
    options = {"top_k": 3, "timeout": timeout, "lb_coef": 0.1}
    if here and plan.event == "absent":
        raise ValueError("before the first layer")
    if here and plan.event == "option":
        options[OPTIONS[plan.option]] = VALUES[plan.option]
    sizes = {"num_experts": 12, "hidden_size": 24, "intermediate_size": 16}
    layer = ExpertParallelMoE(**sizes, **options)
    other = ExpertParallelMoE(**sizes, **options) if plan.event == "layer" else layer
    for step in range(STEPS):
        now = here and step == STEPS - 1
        x = torch.randn(random.Random(seed + rank + step).randrange(40), 24, requires_grad=True)
        if now and plan.event == "raise":
            layer(torch.zeros(3, 25))
        with torch.set_grad_enabled(not (now and plan.event == "no_grad")):
            out, aux = (other if now else layer)(x)
        if now and plan.event == "leave":
            out, aux = layer(x)
        (out.square().sum() + aux.loss).backward()
    if plan.event == "leave":
        layer(x)
    return "done"


def equal(seed: int, rank: int, size: int) -> str:
    """The layer of random sizes in fp64, with tokens and experts of all ranks in one process."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens = [rng.choice((0, 1, rng.randrange(50))) for _ in range(size)]
    each, k, d, n = rng.randint(1, 4), rng.randint(1, 4), 8 * rng.randint(1, 5), rng.randint(1, 30)
    experts, total = each * size, sum(tokens)
    kind = {"dtype": torch.float64, "generator": g}
    x, dout = torch.randn(total, d, **kind), torch.randn(total, d, **kind)
    ids = torch.randint(-1, experts, (total, k), generator=g)
    weights = torch.rand(total, k, **kind)
    up, down = torch.randn(experts, 2 * n, d, **kind), torch.randn(experts, d, n, **kind)
    own = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    mine = slice(rank * each, (rank + 1) * each)
    found = []
    whole = slice(None)
    for rows, part, layer in ((whole, whole, smoe.moe), (own, mine, moe_expert_parallel)):
        parts = x[rows], weights[rows], up[part], down[part]
        leaves = [t.clone().requires_grad_() for t in parts]
        out = layer(leaves[0], ids[rows], *leaves[1:])
        found.append([out, *torch.autograd.grad(out, leaves, dout[rows])])
    of_one = [t[s] for t, s in zip(found[0], (own, own, own, mine, mine), strict=True)]
    for got, want in zip(found[1], of_one, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-11)
    return "done"


def attack(seed: int) -> str:
    """Runs one attack and checks it. Returns the event."""
    plan = Plan.of(seed)
    with tempfile.TemporaryDirectory() as folder:
        found = worlds.run(functools.partial(attacked, seed), plan.size, Path(folder))
    others = [each for rank, each in enumerate(found) if rank != plan.victim]
    if plan.event == "nothing":
        assert all(each.get("result") == "done" for each in found), found
        return plan.event
    assert found[plan.victim] is None or plan.event not in ("kill", "stop"), found
    sentence = SENTENCES[plan.event].format(v=plan.victim, option=OPTIONS[plan.option])
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
    options = parser.parse_args()
    until, counts, failed = time.monotonic() + 60 * options.minutes, Counter(), []
    for seed in range(options.seed, options.seed + options.count):
        if time.monotonic() > until:
            break
        sys.stdout.write(f"seed {seed}: {Plan.of(seed)}\n")
        sys.stdout.flush()
        try:
            counts[attack(seed)] += 1
        except AssertionError as error:
            failed.append(seed)
            sys.stdout.write(f"seed {seed} FAILED: {error}\n")
    sys.stdout.write(f"passed: {dict(counts)}; failed: {failed}\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
