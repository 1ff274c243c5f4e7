"""The command line of examples/finetune.py, and the models that it builds from a config alone."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm.config import Parser
from lm.errors import UserError

# Architectures by name: the model type of transformers and its sizes.
CONFIGS = {
    "qwen3-30b": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {"num_hidden_layers": 24, "num_local_experts": 32, "max_position_embeddings": 131072},
    ),
    "small": (
        "qwen3_moe",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
        },
    ),
}
OWN = "sonicmoe_cpp"
# Arguments of sonicmoe_cpp.packed.pack() by the name of --weights.
PACKED = {"nf4": ("nf4", {}), "nf4-nested": ("nf4", {"nested": True}), "mxfp4": ("mxfp4", {})}
WEIGHTS = ("", *PACKED)
WARM = 2  # first steps, which allocate and compile: not timed


def _option(default: Any, text: str, low: float | None = None, choices: tuple = ()) -> Any:
    return field(default=default, metadata={"help": text, "low": low, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """Every setting is a flag: save_every is --save-every. `low` is the least value."""

    model: str = _option("", "folder of a model that save_pretrained wrote")
    config: str = _option("", f"random weights of this size instead: {', '.join(CONFIGS)}")
    layers: int = _option(0, "keep only the first layers; 0: all", 0)
    data: str = _option("", "file or folder of text; empty: the sources of Python's library")
    out: str = _option("out/finetune", "folder of checkpoints, adapter, plot and report")
    rank: int = _option(16, "rank of the factors of experts and attention", 1)
    alpha: float = _option(32.0, "scale of the factors, times rank", 0)
    weights: str = _option(
        "", "format of the experts; empty: bf16 (fp32 on the CPU)", None, WEIGHTS
    )
    dense: str = _option("", "format of attention's linear layers; empty: bf16", None, ("", "nf4"))
    unpack_mib: int = _option(0, "unpack at most so much at a time; 0: a layer's experts", 0)
    logits: int = _option(256, "tokens whose logits exist at a time", 1)
    factors: str = _option("fp32", "dtype of the factors", choices=("fp32", "bf16"))
    experts: str = _option(OWN, "transformers' experts_implementation, for a comparison")
    attention: str = _option("", "transformers' attn_implementation; empty: by model and device")
    optim: str = _option("adamw_torch_fused", "optimizer, by transformers' name")
    sequence: int = _option(4096, "tokens of a sequence", 8)
    batch: int = _option(1, "sequences of a micro-batch", 1)
    accumulate: int = _option(1, "micro-batches of a step", 1)
    checkpointing: bool = _option(True, "keep only the inputs of layers for backward")
    compile: bool = _option(False, "torch.compile of attention, norms and router")
    steps: int = _option(100, "optimizer steps", 1)
    lr: float = _option(2e-4, "learning rate after the warm-up; it falls to 0", 0)
    save_every: int = _option(50, "steps between checkpoints; 0: none", 0)
    seed: int = _option(0, "seed of random weights, factors and order of the text", 0)
    device: str = _option("", "cpu or cuda; empty: cuda where sonicmoe_cpp computes there")
    offload_embedding: bool = _option(False, "keep the embedding in the memory of the CPU")
    cap_gib: float = _option(0.0, "limit of the GPU's memory for tensors; 0: none", 0)
    beside: str = _option("", "afterwards time these experts of transformers too (grouped_mm)")
    trace: bool = _option(False, "trace the last step: the GPU's time by part of the model")
    merge: bool = _option(False, "write the merged model to OUT/merged")
    resume: bool = _option(False, "continue from the last checkpoint of OUT")
    json: bool = _option(False, "the report on stdout, all else on stderr")

    @property
    def tokens(self) -> int:
        """T: the tokens of a micro-batch."""
        return self.sequence * self.batch

    @property
    def tokens_a_step(self) -> int:
        return self.tokens * self.accumulate


# What a resumed run may change.
FREE = {"out", "save_every", "cap_gib", "beside", "trace", "merge", "resume", "json"}


# Flags that exclude each other, and why.
EITHER = (
    ("merge", "beside", "merging takes away the factors that it times"),
    ("merge", "offload_embedding", "a merged model has its embedding"),
    ("merge", "dense", "a merged model has unpacked weights"),
    ("beside", "weights", "transformers' experts take no packed weights"),
)


def _check(s: Settings) -> Settings:
    if bool(s.model) == bool(s.config):
        raise UserError(f"give --model DIR or --config NAME: {', '.join(CONFIGS)}")
    if s.config and s.config not in CONFIGS:
        raise UserError(f"config is '{s.config}'; it must be one of {', '.join(CONFIGS)}")
    if s.model and not (Path(s.model) / "config.json").is_file():
        raise UserError(f"model folder {s.model} has no config.json")
    for f in dataclasses.fields(Settings):
        value, low, choices = getattr(s, f.name), f.metadata["low"], f.metadata["choices"]
        if low is not None and not low <= value < 2**31:  # also refuses NaN
            raise UserError(f"{f.name} is {value}; it must be at least {low} and below 2^31")
        if choices and value not in choices:
            raise UserError(
                f"{f.name} is '{value}'; it must be one of {', '.join(filter(None, choices))}"
            )
    for one, other, reason in EITHER:
        if getattr(s, one) and getattr(s, other):
            raise UserError(f"give --{one} or --{other.replace('_', '-')}: {reason}")
    if s.trace and s.steps < WARM + 2:
        raise UserError(f"steps is {s.steps}; with --trace it must be at least {WARM + 2}")
    if not s.out:
        raise UserError("out is empty; it must name a folder")
    return s


def parse(argv: list[str]) -> Settings:
    parser = Parser(
        description="Fine-tunes a mixture-of-experts model by low-rank factors on its experts and "
        "its attention (LoRA), with transformers' Trainer and PEFT."
    )
    for f in dataclasses.fields(Settings):
        name, text = "--" + f.name.replace("_", "-"), f.metadata["help"]
        if f.type is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(name, action=action, default=f.default, help=text)
        else:
            text = f"{text} (default: {f.default!r})"
            parser.add_argument(name, type=f.type, default=f.default, help=text)
    return _check(Settings(**vars(parser.parse_args(argv))))
