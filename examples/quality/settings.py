"""Architectures, sizes and jobs of the quality studies."""

from dataclasses import asdict, dataclass, field
from typing import Any

from lm.errors import UserError

TILE = 128  # rows of a tile of the kernels, to which token rounding rounds
ROUNDING_BEGINS = {"start": 0.0, "tenth": 0.1}  # share of the steps that route by top-K before


@dataclass(frozen=True)
class Architecture:
    """How a model routes. The experts of each architecture have as many weights in all."""

    experts: int
    top_k: int
    score: str = "softmax_before_topk"
    renormalize: bool = False
    scale: float = 1.0
    n_group: int | None = None
    topk_group: int | None = None
    selection_bias: bool = False
    shared: bool = False  # one more expert of the same width, which takes every token
    lb_coef: float = 0.01
    z_coef: float = 0.0

    def group(self, ratio: int, tile: int) -> int:
        """The tokens of a micro-batch in which an expert has `ratio` tiles on average."""
        return ratio * tile * self.experts // self.top_k


ARCHITECTURES = {
    "olmoe": Architecture(64, 8, z_coef=0.001),
    "qwen3": Architecture(128, 8, renormalize=True, lb_coef=0.001),
    "deepseek": Architecture(
        128,
        4,
        score="sigmoid",
        renormalize=True,
        scale=2.5,
        n_group=8,
        topk_group=4,
        selection_bias=True,
        shared=True,
        lb_coef=0.0001,
    ),
    "fp8-study": Architecture(32, 4, score="softmax_after_topk", z_coef=0.0001),
}


@dataclass(frozen=True)
class Size:
    """The sizes of a model: width d, layers, attention heads, and E * n of a layer."""

    width: int
    layers: int
    heads: int
    expert_rows: int
    context: int = 1024
    batch: int = 16  # sequences a step
    tile: int = TILE


SIZES = {
    "tiny": Size(64, 2, 2, 2048, context=64, batch=8, tile=8),  # for tests: seconds on a CPU
    "0.01b": Size(256, 4, 4, 2048),
    "0.1b": Size(512, 6, 8, 8192),
    "126m": Size(512, 8, 8, 8192, context=512, batch=32),  # with fp8-study: the model of fp8.md
    "0.5b": Size(1024, 9, 16, 16384),
    "wide": Size(
        2048, 2, 16, 98304
    ),  # the experts of Qwen3-30B-A3B, of OLMoE and a half; for times
}


@dataclass(frozen=True)
class Job:
    """One training run. Its name says all that differs between the runs of a study."""

    study: str  # "rounding", "spread", "times", "pretrain" or "finetune"
    architecture: str
    size: str
    seed: int
    tokens: float
    lr: float
    mode: str = "topk"  # of rounding
    ratio: int = 0  # T_e / tile of rounding; 0: top-K
    begin: str = "start"  # a name of ROUNDING_BEGINS
    variant: str = ""  # of fine-tuning, a name of tune.VARIANTS
    order: int | None = None  # seed of the text's order; None: that of the run
    again: int = 0  # counts repetitions with equal settings
    timed: bool = field(default=False, compare=False)  # also measure the time of a step

    @property
    def name(self) -> str:
        parts = [self.study, self.architecture, self.size]
        if self.study in ("rounding", "times"):
            parts.append(f"{self.mode}{self.ratio or ''}")
            if self.begin != "start":
                parts.append(self.begin)
        if self.variant:
            parts.append(self.variant)
        if self.order is not None:
            parts.append(f"order{self.order}")
        if self.again:
            parts.append(f"again{self.again}")
        return "-".join([*parts, f"seed{self.seed}"])

    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "timed"}

    @property
    def steps(self) -> int:
        size = SIZES[self.size]
        return int(self.tokens) // (size.batch * size.context)

    def check(self) -> "Job":
        """Refuses a job whose rounding does not fit into a step."""
        size, architecture = SIZES[self.size], ARCHITECTURES[self.architecture]
        tokens = size.batch * size.context
        if self.steps < 10:
            raise UserError(f"tokens is {self.tokens:g}; it must be at least {10 * tokens}")
        group = architecture.group(self.ratio, size.tile)
        if self.ratio and (group > tokens or tokens % group):
            raise UserError(
                f"ratio is {self.ratio}; with {self.architecture} this is {group} tokens, which "
                f"must divide the {tokens} tokens of a step"
            )
        return self
