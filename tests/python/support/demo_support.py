"""A few small files of text and a model of a few thousand parameters, for the demo's tests."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT = EXAMPLES / "train_lm.py"
sys.path.insert(0, str(EXAMPLES))

# Flags of a model that takes milliseconds a step. An expert has T*K/E = 128/4 = 32 rows, so token
# rounding changes the routing.
TINY = {
    "vocab": 280,
    "context": 16,
    "batch": 4,
    "width": 16,
    "layers": 2,
    "heads": 2,
    "experts": 4,
    "top_k": 2,
    "expert_width": 8,
    "tile": 8,
    "steps": 12,
    "warmup": 3,
    "eval_every": 4,
    "eval_sequences": 4,
    "save_every": 5,
    "sample_tokens": 8,
    "threads": 1,
    "device": "cpu",
    "precision": "fp32",
}

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")


def write_text(folder: Path, files: int = 12, words: int = 400) -> Path:
    """Deterministic text with a bigram structure, a different one in every file."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        line, state = [], i
        for j in range(words):
            state = (state * 1103515245 + 12345 + i) % 2**31
            line.append(WORDS[(state >> 16) % len(WORDS)] + ("\n" if j % 9 == 8 else ""))
        (folder / f"file{i:02d}.txt").write_text(" ".join(line))
    return folder


def flags(**settings: object) -> list[str]:
    """Settings as command-line flags."""
    return [
        part
        for key, value in settings.items()
        for part in ("--" + key.replace("_", "-"), str(value))
    ]
