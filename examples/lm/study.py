"""The runs of the rounding study, their results on disk, and the table and plot of the results."""

import io
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from lm.config import Config
from lm.errors import UserError
from lm.files import write_file

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# The settings that may differ when a study is continued.
FREE = ("out", "save_every", "sample_tokens", "threads", "eval_every", "eval_sequences")


@dataclass(frozen=True)
class Case:
    """One training run. `ratio` is T_e / tile, the mean rows of an expert in tiles; 0: top-K."""

    mode: str
    ratio: int
    seed: int

    @property
    def name(self) -> str:
        return (
            f"{self.mode}-ratio{self.ratio}-seed{self.seed}" if self.ratio else f"topk-{self.seed}"
        )

    def config(self, config: Config) -> Config:
        """The settings of this run: `config` with another seed, rounding mode and tile."""
        if not self.ratio:
            return replace(config, seed=self.seed)
        tile = rows_of_expert(config) // self.ratio
        return replace(config, seed=self.seed, rounding=self.mode, tile=tile)


def rows_of_expert(config: Config) -> int:
    """T_e = T K / E, the mean rows of an expert."""
    return config.tokens * config.top_k // config.experts


def cases(config: Config, modes: list[str], ratios: list[int], seeds: int) -> list[Case]:
    """Every run, seed by seed and top-K first, so that a study stopped early can be compared."""
    rows = rows_of_expert(config)
    for ratio in ratios:
        if ratio < 1 or rows % ratio:
            raise UserError(
                f"ratio is {ratio}; it must divide the {rows} rows that an expert gets on average"
            )
    rounded = [(mode, ratio) for ratio in ratios for mode in modes]
    return [
        Case(mode, ratio, seed) for seed in range(seeds) for mode, ratio in [("topk", 0), *rounded]
    ]


def settings(config: Config) -> dict[str, Any]:
    """The settings that all runs of one study share."""
    left_out = {*FREE, "seed", "rounding", "tile"}
    return {key: value for key, value in asdict(config).items() if key not in left_out}


def result_file(out: Path, case: Case) -> Path:
    return out / "runs" / f"{case.name}.json"


def save_result(out: Path, case: Case, result: dict[str, Any]) -> None:
    path = result_file(out, case)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, (json.dumps(asdict(case) | result, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; the trained run is saved, and the same "
            "command continues"
        ) from error


def write_report(out: Path, contents: dict[str, bytes]) -> None:
    """Writes the files of a study's report, {name: content}."""
    try:
        for name, content in contents.items():
            write_file(out / name, content)
    except OSError as error:
        raise UserError(
            f"cannot write the report to {out}: {error.strerror}; the results are saved, and the "
            "same command writes it again"
        ) from error


def read_result(path: Path, name: str, is_result: Callable[[dict], bool]) -> dict | None:
    """The result of the run `name` from its file; None if there is no file."""
    try:
        result = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; move it elsewhere") from error
    if not isinstance(result, dict) or not is_result(result):
        raise UserError(f"{path} is no result of {name}; move it elsewhere")
    return result


def load_result(out: Path, case: Case, config: Config) -> dict[str, Any] | None:
    """The saved result of a run; None if the run is not finished."""
    path = result_file(out, case)
    result = read_result(path, case.name, lambda result: _is_result(result, case))
    if result is not None and result["settings"] != settings(config):
        raise UserError(f"{path} is of a study with other settings; choose another --out")
    return result


def _is_result(result: dict[str, Any], case: Case) -> bool:
    """Whether a JSON object has the form of a run's result, as save_result writes it."""
    if asdict(case).items() - _scalars(result):
        return False
    figures = [result.get("val_loss"), result.get("train_seconds")]
    return (
        all(type(x) in (int, float) and abs(x) < math.inf for x in figures)
        and type(result.get("tile")) is int
        and type(result.get("text")) is str
        and "settings" in result
    )


def _scalars(result: dict[str, Any]) -> set[tuple[str, Any]]:
    return {(key, value) for key, value in result.items() if type(value) in (int, str)}


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each mode and ratio: the mean loss over seeds, the mean distance from top-K's loss
    with the same seed, and the sample standard deviation of this distance; None where there are too
    few seeds."""
    topk = {r["seed"]: r["val_loss"] for r in results if not r["ratio"]}
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for r in results:
        groups.setdefault((r["ratio"], r["mode"]), []).append(r)
    rows = []
    for (ratio, mode), members in sorted(groups.items()):
        losses = [r["val_loss"] for r in members]
        gaps = [r["val_loss"] - topk[r["seed"]] for r in members if r["seed"] in topk]
        rows.append(
            {
                "mode": mode,
                "ratio": ratio,
                "tile": members[0]["tile"] if ratio else None,
                "seeds": len(members),
                "loss": statistics.fmean(losses),
                "lowest": min(losses),
                "highest": max(losses),
                "gap": statistics.fmean(gaps) if gaps else None,
                "gap_std": statistics.stdev(gaps) if len(gaps) > 1 else None,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| routing in training | T_e / tile | tile | seeds | validation loss (lowest to highest) | "
        "beyond top-K, mean ± std over seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        place = ["-", "-"] if not r["ratio"] else [str(r["ratio"]), str(r["tile"])]
        loss = f"{r['loss']:.4f} ({r['lowest']:.4f} to {r['highest']:.4f})"
        gap = "-" if r["gap"] is None else f"{r['gap']:+.4f}" if r["ratio"] else "0"
        if r["ratio"] and r["gap_std"] is not None:
            gap += f" ± {r['gap_std']:.4f}"
        lines.append("| " + " | ".join([r["mode"], *place, str(r["seeds"]), loss, gap]) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]]) -> bytes:
    """A PNG: distance from top-K over T_e / tile, a line for each mode with its spread over
    seeds."""
    rounded = [r for r in rows if r["ratio"]]
    modes = sorted({r["mode"] for r in rounded})
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.axhline(0, color="black", linewidth=1, label="top-K")
    for spread in (r for r in rows if not r["ratio"]):
        half = (spread["highest"] - spread["lowest"]) / 2
        axes.axhspan(-half, half, color="0.9", label="top-K, spread between seeds")
    for i, mode in enumerate(modes):
        points = [r for r in rounded if r["mode"] == mode]
        # Each mode is moved a little sideways, so that the bars do not cover each other.
        x = np.array([r["ratio"] for r in points]) * 1.04 ** (i - (len(modes) - 1) / 2)
        gaps = [math.nan if r["gap"] is None else r["gap"] for r in points]
        bars = [r["gap_std"] or 0.0 for r in points]
        axes.errorbar(x, gaps, bars, marker="o", capsize=3, label=mode)
    ratios = sorted({r["ratio"] for r in rounded})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ratios, [str(r) for r in ratios])
    axes.set_xlabel("T_e / tile: mean rows of an expert, in tiles")
    axes.set_ylabel("validation loss beyond top-K, nats a token")
    axes.legend(fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    plt.close(figure)
    return image.getvalue()
