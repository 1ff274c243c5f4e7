"""Settings: defaults, --short, a YAML file and flags, each overriding the one before."""

import argparse
import dataclasses
import math
import os
import reprlib
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from lm.device import choose, memory_bytes, most_threads
from lm.errors import UserError

LARGEST_FILE = 1 << 20  # bytes of a YAML file


def _setting(default: Any, text: str, low: float = -math.inf, high: float = math.inf) -> Any:
    """A field with its help text and the closed range that it may take."""
    return field(default=default, metadata={"help": text, "low": low, "high": high})


def _count(default: int, text: str, low: int, high: int = 2**31 - 1) -> Any:
    return _setting(default, text, low, high)


@dataclass(frozen=True)
class Config:
    """Every setting is a flag (--expert-width) and a key of the YAML file (expert_width)."""

    data: str = _setting("", "folder of text; empty: the sources of Python's standard library")
    glob: str = _setting("", "files to take from it, recursively; empty: *.py, or * with --data")
    out: str = _setting("out/demo", "folder that receives report, plot, sample and checkpoints")
    val_fraction: float = _setting(0.04, "share of the text, by file, kept for validation", 0, 0.5)
    vocab: int = _count(2048, "entries of the byte-level BPE", 257, 1 << 20)
    # Model: T = batch * context / accumulate tokens at once, d = width, n = expert_width.
    context: int = _count(256, "tokens a sequence", 8)
    batch: int = _count(8, "sequences a step", 1)
    accumulate: int = _count(1, "parts of a step's batch, their gradients summed", 1)
    width: int = _count(128, "model width d", 2)
    layers: int = _count(2, "transformer blocks", 1, 1000)
    heads: int = _count(4, "attention heads", 1)
    experts: int = _count(64, "experts E a layer", 1, 1 << 16)
    top_k: int = _count(8, "experts K a token", 1)
    expert_width: int = _count(64, "expert width n", 1)
    tile: int = _count(64, "rows that token rounding rounds to", 1)
    rounding: str = _setting("nearest", "token rounding mode")
    # Training.
    steps: int = _count(1000, "optimiser steps of each run", 1, 10**7)
    warmup: int = _count(50, "steps of linear warm-up", 0)
    lr: float = _setting(4e-3, "peak learning rate", 0)
    final_lr: float = _setting(0.05, "learning rate at the end, as a share of the peak", 0, 1)
    weight_decay: float = _setting(0.1, "AdamW weight decay of matrices", 0)
    beta2: float = _setting(0.98, "AdamW second-moment decay", 0, 0.99999)
    clip: float = _setting(1.0, "largest gradient norm", 0)
    lb_coef: float = _setting(0.01, "weight of the load-balancing loss", 0)
    z_coef: float = _setting(1e-4, "weight of the router z-loss", 0)
    seed: int = _count(0, "seed of initialisation, data order and sampling", 0, 2**63 - 1)
    device: str = _setting("", "cpu or cuda; empty: cuda where sonicmoe_cpp computes there")
    precision: str = _setting(
        "", "fp32, bf16 (autocast), fp8 (experts; all else bf16); empty: by device"
    )
    # These do not change the trained weights.
    eval_every: int = _count(100, "steps between validation points of the plot", 1)
    eval_sequences: int = _count(64, "validation sequences of those points; the end takes all", 1)
    save_every: int = _count(250, "steps between checkpoints", 1)
    sample_tokens: int = _count(160, "tokens of generated text", 0, 1 << 20)
    threads: int = _count(0, "CPU threads; 0: all that this process may use", 0)

    @property
    def tokens(self) -> int:
        """T: the tokens that a layer sees at once."""
        return self.batch // self.accumulate * self.context

    @property
    def parameters(self) -> int:
        """Weights of the model: embedding and head, attention, router, experts, norms."""
        d = self.width
        layer = 4 * d * d + self.experts * d * (1 + 3 * self.expert_width) + 2 * d
        return 2 * self.vocab * d + self.layers * layer + d

    @property
    def least_bytes(self) -> int:
        """A lower bound of the memory of a step: weights, gradients and both moments in fp32,
        logits and their gradient, and 2 bytes for each element of X and H of every layer."""
        kept = self.layers * (2 * self.width + 4 * self.top_k * self.expert_width)
        return 16 * self.parameters + self.tokens * (8 * self.vocab + kept)


# A resumed run may change these settings and no other.
FREE_KEYS = frozenset({"out", "save_every", "sample_tokens", "threads"})
# The settings that determine the shapes of the tensors.
SHAPE_KEYS = ("vocab", "width", "layers", "heads", "experts", "top_k", "expert_width")
# `--short`: enough steps for CI to see that the demo completes and that the loss falls.
SHORT = {"steps": 30, "warmup": 5, "eval_every": 15, "save_every": 15, "eval_sequences": 16}
PRECISIONS = ("fp32", "bf16", "fp8")
ROUNDING_MODES = ("nearest", "up", "down", "score", "stochastic", "balanced")


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    config: Config
    resume: bool
    short: bool
    json: bool


class Parser(argparse.ArgumentParser):
    """Refuses a command line by a UserError, which is one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the options")


def _convert(key: str, kind: type, value: Any) -> Any:
    """A YAML value as the type of its key."""
    integral = type(value) is int and abs(value) < 2**64
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
    # YAML reads hexadecimal integers of any length, but repr refuses one of more than 4300 digits.
    large = type(value) is int and not integral
    shown = f"an integer of {value.bit_length()} bits" if large else reprlib.repr(value)
    raise UserError(f"config key '{key}' takes {name}, got {shown}")


def _read_scalars(path: str, content: bytes) -> dict[str, Any]:
    """The keys and values of a flat YAML mapping.

    Only scalars are constructed, so aliases of aliases, which could grow exponentially, are not
    expanded.
    """
    loader = yaml.SafeLoader(content)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"config file {path} must hold 'key: value' lines")
        found: dict[str, Any] = {}
        for key_node, value_node in root.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(f"config file {path} has a key that is not a word")
            key = key_node.value
            if key in found:
                raise UserError(f"config file {path} has the key '{key}' twice")
            if not isinstance(value_node, yaml.ScalarNode):
                raise UserError(f"config key '{key}' in {path} takes one value, got several")
            found[key] = loader.construct_object(value_node)
        return found
    finally:
        loader.dispose()


def read_yaml(path: str) -> dict[str, Any]:
    """The settings in a YAML file: one flat mapping of Config's names."""
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_FILE + 1)
        if len(raw) > LARGEST_FILE:
            raise UserError(f"config file {path} is larger than {LARGEST_FILE} bytes")
        content = _read_scalars(path, raw)
    except OSError as error:
        raise UserError(f"cannot read config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML does not wrap the errors of its constructors: 2001-99-99, !!int "", !!bool maybe
        raise UserError(f"config file {path} is not valid YAML") from error
    kinds = {f.name: f.type for f in dataclasses.fields(Config)}
    for key in content:
        if key not in kinds:
            raise UserError(
                f"unknown config key '{key}' in {path}; allowed are {', '.join(sorted(kinds))}"
            )
    return {key: _convert(key, kinds[key], value) for key, value in content.items()}


def _check_text(name: str, value: str) -> None:
    """Refuses a string that cannot be part of a file name."""
    try:
        usable = b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise UserError(
            f"{name} is {value!r}; it must be text without null and surrogate characters"
        )


def validate(config: Config) -> Config:
    """Refuses settings that the model or the trainer cannot use."""
    for f in dataclasses.fields(Config):
        value, low, high = getattr(config, f.name), f.metadata["low"], f.metadata["high"]
        if f.type is str:
            _check_text(f.name, value)
        elif not low <= value <= high or value == math.inf:
            bounds = f"finite and at least {low}" if high == math.inf else f"from {low} to {high}"
            raise UserError(f"{f.name} is {value}; it must be {bounds}")
    if not config.out:
        raise UserError("out is empty; it must name a folder")
    if config.threads > most_threads():
        raise UserError(
            f"threads is {config.threads}; it must be at most 4 times the cores = {most_threads()}"
        )
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
    if config.precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise UserError(f"precision is '{config.precision}'; it must be one of {known}")
    available = memory_bytes(config.device)
    if config.least_bytes > available:
        raise UserError(
            f"these settings need at least {config.least_bytes >> 20} MiB of memory, "
            f"{config.device} has {available >> 20}; give a smaller model or fewer tokens a step"
        )
    return config


def parse(argv: list[str]) -> Request:
    """Parses a command line: the defaults, the defaults of the device, --short, --config and the
    other flags. Each overrides the settings before it."""
    parser = Parser(
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
