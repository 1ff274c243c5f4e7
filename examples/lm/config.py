"""Settings: defaults, a short preset, a YAML file and flags, each overriding the one before."""

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lm.device import choose
from lm.errors import UserError


def _setting(default: Any, text: str, low: float = -math.inf, high: float = math.inf) -> Any:
    """A field with its help text and the closed range that it may take."""
    return field(default=default, metadata={"help": text, "low": low, "high": high})


@dataclass(frozen=True)
class Config:
    """Every setting is a flag (--expert-width) and a key of the YAML file (expert_width)."""

    data: str = _setting("", "folder of text; empty: the sources of Python's standard library")
    glob: str = _setting("", "files to take from it, recursively; empty: *.py, or * with --data")
    out: str = _setting("out/demo", "folder that receives report, plot, sample and checkpoints")
    val_fraction: float = _setting(0.04, "share of the text, by file, kept for validation", 0, 0.5)
    vocab: int = _setting(2048, "entries of the byte-level BPE", 257, 1 << 20)
    # Model: T = batch * context / accumulate tokens at once, d = width, n = expert_width.
    context: int = _setting(256, "tokens a sequence", 8)
    batch: int = _setting(8, "sequences a step", 1)
    accumulate: int = _setting(
        1, "parts that a step's batch is taken in, their gradients summed", 1
    )
    width: int = _setting(128, "model width d", 2)
    layers: int = _setting(2, "transformer blocks", 1)
    heads: int = _setting(4, "attention heads", 1)
    experts: int = _setting(64, "experts E a layer", 1)
    top_k: int = _setting(8, "experts K a token", 1)
    expert_width: int = _setting(64, "expert width n", 1)
    tile: int = _setting(64, "rows that token rounding rounds to", 1)
    rounding: str = _setting("nearest", "token rounding mode")
    # Training.
    steps: int = _setting(1000, "optimiser steps of each run", 1)
    warmup: int = _setting(50, "steps of linear warm-up", 0)
    lr: float = _setting(4e-3, "peak learning rate", 0)
    final_lr: float = _setting(0.05, "learning rate at the end, as a share of the peak", 0, 1)
    weight_decay: float = _setting(0.1, "AdamW weight decay of matrices", 0)
    beta2: float = _setting(0.98, "AdamW second-moment decay", 0, 1)
    clip: float = _setting(1.0, "largest gradient norm", 0)
    lb_coef: float = _setting(0.01, "weight of the load-balancing loss", 0)
    z_coef: float = _setting(1e-4, "weight of the router z-loss", 0)
    seed: int = _setting(0, "seed of initialisation, data order and sampling", 0)
    device: str = _setting("", "cpu or cuda; empty: cuda where sonicmoe_cpp computes there")
    precision: str = _setting("", "fp32 or bf16 (autocast); empty: bf16 on cuda, else fp32")
    # Habits that do not change the result.
    eval_every: int = _setting(100, "steps between validation points of the plot", 1)
    eval_sequences: int = _setting(64, "validation sequences of those points; the end takes all", 1)
    save_every: int = _setting(250, "steps between checkpoints", 1)
    sample_tokens: int = _setting(160, "tokens of generated text", 0)
    threads: int = _setting(0, "CPU threads; 0: all that this process may use", 0)

    @property
    def tokens(self) -> int:
        """T: the tokens that a layer sees at once."""
        return self.batch // self.accumulate * self.context


# A resumed run may differ from its checkpoint in these alone.
FREE_KEYS = frozenset({"out", "save_every", "sample_tokens", "threads"})
# These decide the shapes of the tensors.
SHAPE_KEYS = ("vocab", "width", "layers", "heads", "experts", "top_k", "expert_width")
# `--short`: completion and a falling loss, for CI.
SHORT = {"steps": 60, "warmup": 10, "eval_every": 30, "save_every": 30, "eval_sequences": 16}
ROUNDING_MODES = ("nearest", "up", "down", "score", "stochastic", "balanced")


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    config: Config
    resume: bool
    short: bool
    json: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the options")


def _convert(key: str, kind: type, value: Any) -> Any:
    """A YAML value as the type of its key."""
    integral = isinstance(value, int) and not isinstance(value, bool)
    if kind is str and isinstance(value, str):
        return value
    if kind is int and integral:
        return value
    if kind is float and (integral or isinstance(value, float)):
        return float(value)
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 4e-3 as a string
        try:
            return float(value)
        except ValueError:
            pass
    name = {int: "an integer", float: "a number", str: "a string"}[kind]
    raise UserError(f"config key '{key}' takes {name}, got {value!r}")


def read_yaml(path: str) -> dict[str, Any]:
    """The settings in a YAML file: one flat mapping of Config's names."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} is not valid YAML") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise UserError(f"config file {path} must hold 'key: value' lines")
    kinds = {f.name: f.type for f in dataclasses.fields(Config)}
    for key in content:
        if key not in kinds:
            raise UserError(
                f"unknown config key '{key}' in {path}; allowed are {', '.join(sorted(kinds))}"
            )
    return {key: _convert(key, kinds[key], value) for key, value in content.items()}


def validate(config: Config) -> Config:
    """Refuses what the model or the trainer cannot work with."""
    for f in dataclasses.fields(Config):
        value, low, high = getattr(config, f.name), f.metadata["low"], f.metadata["high"]
        if f.type is not str and not low <= value <= high:
            bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise UserError(f"{f.name} is {value}; it must be {bounds}")
    if config.batch % config.accumulate:
        raise UserError(f"accumulate is {config.accumulate}; it must divide batch = {config.batch}")
    if config.top_k > config.experts:
        raise UserError(f"top_k is {config.top_k}; it must be at most experts = {config.experts}")
    if config.width % (2 * config.heads):
        raise UserError(
            f"width is {config.width}; rotary attention needs a multiple of 2 * heads = "
            f"{2 * config.heads}"
        )
    if config.rounding not in ROUNDING_MODES:
        raise UserError(
            f"rounding is '{config.rounding}'; it must be one of {', '.join(ROUNDING_MODES)}"
        )
    if config.precision not in ("fp32", "bf16"):
        raise UserError(f"precision is '{config.precision}'; it must be fp32 or bf16")
    return config


def parse(argv: list[str]) -> Request:
    """Defaults, then those of the device, --short, --config, and the other flags."""
    parser = _Parser(
        description="Trains the same small MoE language model with top-K routing and with token "
        "rounding, and compares both with n-gram baselines."
    )
    parser.add_argument("--config", metavar="FILE", default="", help="YAML file of settings")
    parser.add_argument("--short", action="store_true", help="a minute instead of several")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints")
    parser.add_argument(
        "--json", action="store_true", help="the report on stdout, all else on stderr"
    )
    for f in dataclasses.fields(Config):
        parser.add_argument(
            "--" + f.name.replace("_", "-"),
            type=f.type,
            default=argparse.SUPPRESS,  # so that a flag left out does not override the file
            help=f"{f.metadata['help']} (default: {f.default!r})",
        )
    flags = vars(parser.parse_args(argv))
    file, *given = (flags.pop(name) for name in ("config", "short", "resume", "json"))
    short, resume, as_json = given
    settings = (read_yaml(file) if file else {}) | flags
    device = choose(settings.get("device", ""))
    settings = device.settings | (SHORT if short else {}) | settings
    settings["device"] = device.name
    settings["precision"] = settings.get("precision") or device.precision
    return Request(validate(Config(**settings)), resume, short, as_json)
