"""The report of a finished demo: report.json, report.md, the loss plot and a sample of text."""

import io
import json
import math
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import sonicmoe_cpp
import torch

from lm.config import Config
from lm.data import Corpus
from lm.errors import UserError
from lm.files import write_file
from lm.trainer import Run

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FILES = ("loss.png", "sample.txt", "report.json", "report.md")
LABELS = {"topk": "top-K", "rounded": "token rounding"}


def smooth(values: list[float], width: int = 25) -> np.ndarray:
    """Running mean of the last `width` values."""
    total = np.cumsum(np.insert(np.asarray(values, dtype=np.float64), 0, 0.0))
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(end - width, 0)
    return (total[end] - total[begin]) / (end - begin)


def describe_run(run: Run, val_loss: float, memory: dict[str, Any]) -> dict[str, Any]:
    """The figures of one run, as report.json has them."""
    history = run.history
    tokens = run.step * run.config.batch * run.config.context
    return {
        "val_loss": val_loss,
        "train_loss": float(smooth(history.train_loss)[-1]),
        "steps": run.step,
        "tokens": tokens,
        "train_seconds": history.seconds,
        "tokens_per_second": run.tokens_per_second(),
        "activation_memory": memory,
        "padding": {key: sum(p[key] for p in history.padding) for key in history.padding[0]},
        "history": asdict(history),
    }


def build_report(
    config: Config, corpus: Corpus, runs: dict[str, Any], baselines: dict[str, float]
) -> dict[str, Any]:
    """report.json without the wall time, which is known only at the end."""
    predicted = (len(corpus.validation) - 1) // config.context * config.context
    bytes_a_token = corpus.validation_bytes / len(corpus.validation)
    for run in runs.values():
        run["below_bigram"] = baselines["bigram"] - run["val_loss"]
        run["bits_per_byte"] = run["val_loss"] / math.log(2) / bytes_a_token
    return {
        "runs": runs,
        "baselines": baselines,
        "data": {
            "source": config.data or "Python standard library",
            "train_files": corpus.train_files,
            "validation_files": corpus.validation_files,
            "train_tokens": len(corpus.train),
            "validation_tokens": predicted,
            "sha256": corpus.digest(),
        },
        "config": asdict(config),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "sonicmoe_cpp": sonicmoe_cpp.__version__,
            "machine": platform.machine(),
            "device": config.device,
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
        },
    }


def plot(report: dict[str, Any]) -> bytes:
    """Loss against tokens for both runs, with the baselines as lines; a PNG."""
    config = report["config"]
    per_step = config["batch"] * config["context"] / 1e6
    figure, axes = plt.subplots(figsize=(8, 5), dpi=150)
    # The curves nearly coincide: the first is drawn thick, the second thin on top of it.
    looks = (
        {"color": "#7fb0e0", "linewidth": 4, "marker": "o", "markersize": 8},
        {"color": "#b3431a", "linewidth": 1.4, "marker": "s", "markersize": 4},
    )
    for (name, run), look in zip(report["runs"].items(), looks, strict=True):
        history = run["history"]
        train = smooth(history["train_loss"])
        x = np.arange(1, len(train) + 1) * per_step
        axes.plot(x, train, color=look["color"], alpha=0.5, linewidth=look["linewidth"] / 2)
        label = f"{LABELS[name]}: {run['val_loss']:.3f}"
        axes.plot(
            np.array(history["val_steps"]) * per_step, history["val_loss"], label=label, **look
        )
    for (name, loss), style in zip(report["baselines"].items(), (":", "--"), strict=True):
        axes.axhline(
            loss, color="#444444", linestyle=style, linewidth=1.2, label=f"{name}: {loss:.3f}"
        )
    lowest = [report["baselines"]["bigram"]]
    for run in report["runs"].values():
        lowest += [*smooth(run["history"]["train_loss"]), *run["history"]["val_loss"]]
    axes.set_ylim(min(lowest) - 0.15, max(report["baselines"].values()) + 0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("training tokens (millions)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Validation loss, top-K evaluation (pale: training loss)", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(title="final validation loss")
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    plt.close(figure)
    return image.getvalue()


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def _results(report: dict[str, Any]) -> list[str]:
    lines = [
        "| | validation loss | below the bigram | bits a byte | tokens/s |",
        "|---|---|---|---|---|",
    ]
    for name, run in report["runs"].items():
        lines.append(
            f"| {LABELS[name]} | {run['val_loss']:.3f} | {run['below_bigram']:+.3f} | "
            f"{run['bits_per_byte']:.3f} | {run['tokens_per_second']:,.0f} |"
        )
    lines += [f"| {name} | {loss:.3f} | | | |" for name, loss in report["baselines"].items()]
    return lines


def _memory(report: dict[str, Any]) -> list[str]:
    lines = [
        "| MiB a MoE layer keeps for backward | measured | X and H alone | keeping everything |",
        "|---|---|---|---|",
    ]
    for name, run in report["runs"].items():
        memory = run["activation_memory"]
        lines.append(
            f"| {LABELS[name]} | {_mib(memory['bytes_measured'])} | "
            f"{_mib(memory['bytes_predicted'])} | {_mib(memory['bytes_keeping_everything'])} |"
        )
    return lines


def _padding(report: dict[str, Any]) -> list[str]:
    lines = [
        "| rows a step, mean over the run | routed | in whole tiles | padding |",
        "|---|---|---|---|",
    ]
    for name, kind in (("topk", "topk"), ("rounded", "rounded")):
        run = report["runs"][name]
        count = len(run["history"]["padding"])
        rows, tiled = run["padding"][f"{kind}_rows"], run["padding"][f"{kind}_tiled"]
        lines.append(
            f"| {LABELS[name]} | {rows / count:,.0f} | {tiled / count:,.0f} | "
            f"{(tiled - rows) / tiled:.1%} |"
        )
    return lines


def markdown(report: dict[str, Any], sample: str) -> str:
    """report.md."""
    data, config, machine = report["data"], report["config"], report["environment"]
    tokens = report["runs"]["topk"]["tokens"]
    parts = [
        "# A mixture-of-experts language model, trained twice",
        "",
        f"The same model (d = {config['width']}, {config['layers']} layers, "
        f"{config['experts']} experts of width {config['expert_width']}, {config['top_k']} a "
        f"token) from the same weights and on the same {tokens / 1e6:.2f} million tokens, once "
        f"with top-K routing and once with token rounding to multiples of {config['tile']} rows; "
        "both evaluated with top-K.",
        "",
        *_results(report),
        "",
        "Losses are in nats a token, on the same validation tokens. The bigram discounts every "
        "count by 0.75 and backs off to the unigram; both baselines know the whole training split.",
        "",
        "![loss](loss.png)",
        "",
        "## Memory",
        "",
        *_memory(report),
        "",
        "X and H, the layer's input and its pre-activations, are all that the method keeps. The "
        "measured bytes also hold the router's logits and the routing's metadata. Keeping "
        "everything adds gathered X, the activation and Y.",
        "",
        "## Padding",
        "",
        *_padding(report),
        "",
        f"A grouped GEMM with tiles of {config['tile']} rows computes whole tiles. Rounding leaves "
        "nothing to pad, and changes an expert's rows by at most one tile.",
        "",
        "## Text the top-K model writes",
        "",
        "````text",
        sample.replace("````", "```"),
        "````",
        "",
        "## How",
        "",
        f"{data['source']}: {data['train_files']} training files ({data['train_tokens']:,} tokens "
        f"of a BPE with {config['vocab']} entries), {data['validation_files']} validation files "
        f"({data['validation_tokens']:,} tokens). {config['steps']} steps of "
        f"{config['batch'] * config['context']} tokens a run, {report['seconds']:.0f} s in all on "
        f"{machine['cores']} cores ({machine['threads']} threads), Python {machine['python']}, "
        f"torch {machine['torch']}, sonicmoe_cpp {machine['sonicmoe_cpp']}.",
        "",
    ]
    return "\n".join(parts)


def as_json(report: dict[str, Any]) -> str:
    """The content of report.json."""
    return json.dumps(report, indent=1) + "\n"


def write(report: dict[str, Any], sample: str, out: Path) -> None:
    """All files of the report, each replaced as a whole.

    The name of a data folder need not be UTF-8: report.md repeats its bytes.
    """
    text = sample + "\n", as_json(report), markdown(report, sample)
    contents = plot(report), *(part.encode(errors="surrogateescape") for part in text)
    try:
        for name, content in zip(FILES, contents, strict=True):
            write_file(out / name, content)
    except OSError as error:
        raise UserError(
            f"cannot write the report to {out}: {error.strerror}; the trained runs are saved, and "
            "--resume writes it again"
        ) from error
