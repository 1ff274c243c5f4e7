#!/usr/bin/env python3
"""Trains a small mixture-of-experts language model on text, twice: with top-K routing and with
token rounding. Compares both with n-gram baselines and writes a report.

    python examples/train_lm.py                        the Python standard library's sources
    python examples/train_lm.py --data FOLDER          any folder of text
    python examples/train_lm.py --config settings.yaml --steps 2000
    python examples/train_lm.py --resume               after Ctrl-C

Exit codes: 0 done; 1 a run that diverged or failed, or a short run whose loss did not fall; 2 bad
input or a disk that cannot be written; 130 interrupted and saved, 143 by SIGTERM.
docs/demo.md explains the figures.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle torch threads must not spin

import torch
from lm import baselines, checkpoint, measure, report
from lm.config import Config, Request, parse
from lm.data import Corpus, load_corpus, validation_windows
from lm.device import startable_threads
from lm.errors import UserError, exit_code
from lm.files import claim, write_file
from lm.model import ROUTINGS, generate
from lm.trainer import Run, StopSignal

PROMPT = "def "
MARKER = ".train_lm"  # this file in the output folder says that the demo wrote to it before
TOKENIZER = "tokenizer.json"


def prepare_output(config: Config) -> Path:
    """Makes the output folder before anything is computed. Refuses a folder that is not writable or
    holds files of other programs."""
    out = Path(config.out)
    claim(out, MARKER)
    return out


def save_tokenizer(corpus: Corpus, path: Path) -> None:
    try:
        write_file(path, corpus.tokenizer.to_str(pretty=True).encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def measure_baselines(corpus: Corpus, config: Config) -> dict[str, float]:
    """Both n-gram losses on the tokens that the model is scored on."""
    inputs, targets = validation_windows(corpus.validation, config.context)
    return {
        "unigram": baselines.unigram_loss(corpus.train, targets, config.vocab),
        "bigram": baselines.bigram_loss(corpus.train, inputs, targets, config.vocab),
    }


def open_runs(request: Request, corpus: Corpus, out: Path) -> list[Run]:
    """Both runs, at their last checkpoint or at the start."""
    folder = out / "checkpoints"
    runs = [Run(name, request.config, corpus, folder / name) for name in ROUTINGS]
    if not request.resume:
        removed = [checkpoint.remove(run.folder) for run in runs]
        if any(removed):
            print(f"starting afresh: the checkpoints in {folder} were removed (--resume continues)")
    else:
        for run in runs:
            if run.restore():
                print(f"{run.name}: continuing at step {run.step} of {request.config.steps}")
            else:
                print(f"{run.name}: no checkpoint yet, starting at step 0")
    return runs


def finish_run(run: Run) -> dict[str, Any]:
    """The final figures of a trained run."""
    val_loss = run.final_loss()
    memory = measure.activation_memory(run.config, run.model.blocks[0].moe, run.name)
    print(f"{run.name:>7}: validation loss {val_loss:.3f} on the whole split", flush=True)
    return report.describe_run(run, val_loss, memory)


def write_sample(run: Run, corpus: Corpus) -> str:
    """The prompt and the text that the trained model writes after it."""
    prompt = corpus.tokenizer.encode(PROMPT, add_special_tokens=False).ids
    tokens = generate(run.model, prompt, run.config.sample_tokens, run.config)
    return corpus.tokenizer.decode(tokens)


def loss_fell(result: dict[str, Any]) -> bool:
    """Whether the loss ended at least half a nat below that of the untrained model."""
    return result["val_loss"] < result["history"]["val_loss"][0] - 0.5


def demo(request: Request, stdout: TextIO) -> int:
    """Both runs and their report, with --json on `stdout` too; returns the exit code."""
    began = time.monotonic()
    config = request.config
    out = prepare_output(config)
    torch.set_num_threads(startable_threads(config.threads or len(os.sched_getaffinity(0))))

    corpus = load_corpus(config)
    save_tokenizer(corpus, out / TOKENIZER)
    print(
        f"{corpus.train_files} training files, {len(corpus.train):,} tokens; "
        f"{corpus.validation_files} validation files, {len(corpus.validation):,} tokens"
    )
    levels = measure_baselines(corpus, config)
    print(
        f"unigram {levels['unigram']:.3f}, bigram {levels['bigram']:.3f} nats a token", flush=True
    )

    runs = open_runs(request, corpus, out)
    earlier = sum(run.history.seconds for run in runs)
    results = {}
    with StopSignal() as stop:
        for run in runs:
            if not run.train(stop):
                print(
                    f"stopped: {run.name} is saved at step {run.step} of {config.steps}; continue "
                    "with --resume (make demo RESUME=1)"
                )
                return 128 + stop.number
            results[run.name] = finish_run(run)

    document = report.build_report(config, corpus, results, levels)
    sample = write_sample(runs[0], corpus)
    document["seconds"] = earlier + time.monotonic() - began
    report.write(document, sample, out)
    for name, result in results.items():
        below = result["below_bigram"]
        side = "below" if below >= 0 else "above"
        print(f"{name}: {result['val_loss']:.3f}, {abs(below):.3f} {side} the bigram")
    print(f"{document['seconds']:.0f} s; {out / 'report.md'}, {out / 'loss.png'}", flush=True)
    if request.json:
        stdout.write(report.as_json(document))
    if request.short and not all(loss_fell(result) for result in results.values()):
        print("error: the loss did not fall", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str]) -> int:
    def command() -> int:
        request, stdout = parse(argv), sys.stdout
        # With --json stdout holds only the report; progress goes to stderr.
        with contextlib.redirect_stdout(sys.stderr if request.json else stdout):
            return demo(request, stdout)

    return exit_code(command, interrupted="interrupted; what was saved before is intact")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
