#!/usr/bin/env python3
"""Compares the quality of fp8 and bf16 experts: trains the same model on the same text in both
precisions with several seeds, and computes the cosine similarity of a layer's fp8 and bf16 results.

    python examples/precision_study.py --out out/precision --steps 400

Any setting of train_lm.py is a flag here too; d and n must be multiples of 64. A study that was
interrupted continues where it stopped. Writes precision.json, precision.md and precision.png. Exit
codes: 0 done, 1 a run that diverged or failed, 2 bad input or a disk that cannot be written, 130
interrupted.
"""

import argparse
import io
import itertools
import json
import math
import os
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle torch threads must not spin

import matplotlib
import sonicmoe_cpp
import torch
import torch.nn.functional as F
from lm import study
from lm.config import Config, Parser, parse
from lm.data import load_corpus
from lm.device import startable_threads
from lm.errors import UserError, exit_code
from lm.files import claim, write_file
from lm.trainer import Run, StopSignal
from rounding_study import INTERRUPTED, origin

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PRECISIONS = ("bf16", "fp8")
MARKER = ".precision_study"  # this file in the output folder says that a study wrote to it before
FILES = ("precision.json", "precision.md", "precision.png")
LAST_STEPS = 50  # the record has the mean training loss of this many last steps
# d and n are multiples of 64, as fp8 needs. The experts' parameters, total and active, are as many
# as in train_lm.py.
DEFAULTS = {"out": "out/precision", "expert_width": "128", "experts": "32", "top_k": "4"}


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each precision")
    own, rest = parser.parse_known_args(argv)
    if not 2 <= own.seeds <= 1000:
        raise UserError(f"seeds is {own.seeds}; it must be from 2 to 1000")
    defaults = [f"--{key.replace('_', '-')}={value}" for key, value in DEFAULTS.items()]
    config = parse([*defaults, *rest]).config
    for name in ("width", "expert_width"):
        if getattr(config, name) % 64:
            raise UserError(f"{name} is {getattr(config, name)}; fp8 needs a multiple of 64")
    return own, config


def settings(config: Config) -> dict[str, Any]:
    """The settings that all runs of a study share."""
    left_out = ("out", "save_every", "sample_tokens", "threads", "seed", "precision")
    return {key: value for key, value in asdict(config).items() if key not in left_out}


def train(config: Config, corpus, stop: StopSignal) -> dict[str, Any] | None:
    """The result of a run, of this or an earlier call; None if it was interrupted."""
    name = f"{config.precision}-{config.seed}"
    path = Path(config.out) / "runs" / f"{name}.json"
    facts = {"settings": settings(config), "text": corpus.digest()}
    result = study.read_result(path, name, lambda result: _is_result(result, config))
    if result is not None:
        if any(result.get(key) != value for key, value in facts.items()):
            raise UserError(f"{path} is of other settings or text; choose another --out")
        return result
    run = Run("topk", config, corpus, Path(config.out) / "checkpoints" / name)
    run.restore()
    print(name, flush=True)
    if not run.train(stop):
        return None
    curve = {"val_steps": run.history.val_steps, "curve": run.history.val_loss}
    result = {"precision": config.precision, "seed": config.seed, "val_loss": run.final_loss()}
    result |= curve | {"train_loss": run.history.train_loss} | facts
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(result) + "\n").encode())
    return result


def _is_result(result: dict[str, Any], config: Config) -> bool:
    """Whether a JSON object has the form of a run's result, as train() writes it."""
    lists = [result.get(key) for key in ("val_steps", "curve", "train_loss")]
    if not all(isinstance(values, list) and values for values in lists):
        return False
    figures = [result.get("val_loss"), *itertools.chain(*lists)]
    return (
        result.get("precision") == config.precision
        and result.get("seed") == config.seed
        and all(type(x) in (int, float) and abs(x) < math.inf for x in figures)
        and len(lists[0]) == len(lists[1])
    )


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds; fp8 minus bf16 with the same seed."""
    losses = {p: [r["val_loss"] for r in runs if r["precision"] == p] for p in PRECISIONS}
    gaps = [b - a for a, b in zip(losses["bf16"], losses["fp8"], strict=True)]
    rows = {
        p: {"mean": statistics.fmean(v), "std": statistics.stdev(v), "losses": v}
        for p, v in losses.items()
    }
    return rows | {"gap": {"mean": statistics.fmean(gaps), "std": statistics.stdev(gaps)}}


def table(summary: dict[str, Any]) -> str:
    lines = ["| experts | validation loss, mean ± std over seeds | each |", "|---|---:|---|"]
    for precision in PRECISIONS:
        row = summary[precision]
        each = ", ".join(f"{value:.4f}" for value in row["losses"])
        lines.append(f"| {precision} | {row['mean']:.4f} ± {row['std']:.4f} | {each} |")
    gap = summary["gap"]
    lines.append(f"| fp8 - bf16, same seed | {gap['mean']:+.4f} ± {gap['std']:.4f} | |")
    return "\n".join(lines)


def unit_layer(config: Config) -> dict[str, torch.Tensor]:
    """Tensors of a layer with the study's d and n. They are normally distributed; the weights are
    scaled by 1/sqrt(fan-in), so that products have unit scale."""
    d, n, experts = config.width, config.expert_width, config.experts
    generator = torch.Generator().manual_seed(config.seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator) * scale
        return values.bfloat16().requires_grad_()

    leaves = {"x": normal(config.tokens, d), "w_up": normal(experts, 2 * n, d, scale=d**-0.5)}
    leaves |= {"w_down": normal(experts, d, n, scale=n**-0.5)}
    return leaves | {"logits": normal(config.tokens, experts)}


def gradients(config: Config, **options: str | None) -> dict[str, torch.Tensor]:
    """The output of the layer, and its gradients for a random gradient of the output."""
    leaves = unit_layer(config)
    ids, weights = sonicmoe_cpp.route(leaves["logits"], config.top_k)
    out = sonicmoe_cpp.moe(leaves["x"], ids, weights, leaves["w_up"], leaves["w_down"], **options)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    return {"out": out.detach()} | {f"d {name}": leaf.grad for name, leaf in leaves.items()}


def cosines(config: Config) -> dict[str, dict[str, float]]:
    """Cosine similarity of the fp8 output and gradients with bf16's, by the form in which H is kept
    (fp8 or bf16)."""
    exact = gradients(config)
    found = {}
    for kept, keep_h in (("fp8", None), ("bf16", "bf16")):
        ours = gradients(config, precision="fp8", keep_h=keep_h)
        pairs = {name: (want.double(), ours[name].double()) for name, want in exact.items()}
        found[kept] = {
            name: F.cosine_similarity(a.flatten(), b.flatten(), 0).item()
            for name, (a, b) in pairs.items()
        }
    return found


def cosine_table(found: dict[str, dict[str, float]]) -> str:
    names = list(found["fp8"])
    lines = ["| kept H | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for kept, values in found.items():
        lines.append("| " + " | ".join([kept, *(f"{values[n]:.4f}" for n in names)]) + " |")
    return "\n".join(lines)


def plot(runs: list[dict[str, Any]]) -> bytes:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for precision, colour in zip(PRECISIONS, ("#8095a8", "#c4451c"), strict=True):
        for i, run in enumerate(r for r in runs if r["precision"] == precision):
            label = precision if i == 0 else None
            axes.plot(run["val_steps"], run["curve"], color=colour, label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="validation loss, nats a token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    plt.close(figure)
    return image.getvalue()


def shorten(run: dict[str, Any]) -> dict[str, Any]:
    """A run as the record has it: the training losses are replaced by the mean of the last ones."""
    left_out = ("settings", "text", "train_loss")
    last = statistics.fmean(run["train_loss"][-LAST_STEPS:])
    return {k: v for k, v in run.items() if k not in left_out} | {"last_train_loss": last}


def write_report(config: Config, runs: list[dict[str, Any]], train_tokens: int) -> None:
    summary = summarise(runs)
    document = origin(config) | {"settings": settings(config), "train_tokens": train_tokens}
    document |= {"summary": summary, "runs": [shorten(run) for run in runs]}
    document["cosines"] = cosines(config)
    tables = f"{table(summary)}\n\n{cosine_table(document['cosines'])}"
    texts = json.dumps(document, indent=1) + "\n", tables + "\n"
    contents = *(text.encode() for text in texts), plot(runs)
    study.write_report(Path(config.out), dict(zip(FILES, contents, strict=True)))
    print(tables)


def run_study(argv: list[str]) -> int:
    own, config = parse_arguments(argv)
    out = Path(config.out)
    claim(out, MARKER)
    torch.set_num_threads(startable_threads(config.threads or len(os.sched_getaffinity(0))))
    corpus = load_corpus(config)
    runs = []
    with StopSignal() as stop:
        for seed in range(own.seeds):
            for precision in PRECISIONS:
                run = train(replace(config, seed=seed, precision=precision), corpus, stop)
                if run is None:
                    print(INTERRUPTED, file=sys.stderr)
                    return 130
                runs.append(run)
    write_report(config, runs, len(corpus.train))
    return 0


def main(argv: list[str]) -> int:
    return exit_code(lambda: run_study(argv), INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
