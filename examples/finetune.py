#!/usr/bin/env python3
"""Fine-tunes a mixture-of-experts model on one card: low-rank factors on experts and attention,
with transformers' Trainer and PEFT.

    python examples/finetune.py --model FOLDER --data notes.txt
    python examples/finetune.py --config qwen3-30b --steps 20      random weights: speed and memory
    python examples/finetune.py --config small                     a minute on a CPU
    python examples/finetune.py --model FOLDER --resume            after Ctrl-C

Before it starts it prints what is trained and the memory that it expects. OUT gets checkpoints,
adapter/ (PEFT's format), loss.png, report.json, and with --merge the merged model.
Exit codes: 0 done; 1 a loss that is not finite; 2 bad input or too little memory; 130 interrupted
and saved, 143 by SIGTERM. docs/finetune.md explains the settings.
"""

import contextlib
import io
import json
import os
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import matplotlib
import sonicmoe_cpp
import torch
from lm.device import choose
from lm.errors import UserError, exit_code
from lm.files import claim, write_file
from lm.trainer import StopSignal
from sonicmoe_cpp import packed

try:
    import accelerate  # noqa: F401 (Trainer needs it)
    import peft
    import transformers
    from tune import memory, model, run
    from tune.loss import use_chunks
    from tune.settings import FREE, Settings, parse
except ImportError as error:
    print(f"error: fine-tuning needs transformers, accelerate, peft: {error}", file=sys.stderr)
    sys.exit(2)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MARKER = ".finetune"  # this file in OUT says that this program wrote to it before
GIB = 2**30


def open_folder(s: Settings) -> str | None:
    """The checkpoint to continue from; refuses one of a run with other settings."""
    out = Path(s.out)
    claim(out, MARKER)
    checkpoint, file = run.last_checkpoint(s), out / "settings.json"
    now = {key: value for key, value in asdict(s).items() if key not in FREE}
    if checkpoint and file.is_file():
        before = json.loads(file.read_text())
        changed = [key for key, value in now.items() if before.get(key, value) != value]
        if changed:
            key = changed[0]
            raise UserError(f"{key} is {now[key]!r}; the run to resume has {before[key]!r}")
    write_file(file, json.dumps(now, indent=1).encode())
    return checkpoint


def prepare_device(s: Settings) -> None:
    if s.trace and s.device != "cuda":
        raise UserError("trace needs a GPU; omit it with --device cpu")
    if not s.cap_gib:
        return
    if s.device != "cuda":
        raise UserError("cap_gib limits a GPU's memory; it must be 0 with --device cpu")
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, s.cap_gib * GIB / total))


def say_memory(items: dict[str, int], s: Settings) -> None:
    unit, name_of_unit = (GIB, "GiB") if items["peak"] > GIB else (2**20, "MiB")
    print(f"memory expected, a model and not a measurement ({name_of_unit}):")
    for name, count in items.items():
        print(f"  {name:<22} {count / unit:8.2f}")
    if s.cap_gib and items["peak"] > s.cap_gib * GIB:
        print(f"  more than --cap-gib {s.cap_gib:g}: it may not fit")


def plot(losses: list[dict], held_out: list[tuple[int, float]]) -> bytes:
    figure, axes = plt.subplots(figsize=(8, 5), dpi=150)
    steps = [entry["step"] for entry in losses]
    axes.plot(steps, [entry["loss"] for entry in losses], color="#7fb0e0", label="training")
    axes.plot(*zip(*held_out, strict=True), "o--", color="#b3431a", label="text held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    plt.close(figure)
    return image.getvalue()


def describe(s: Settings) -> dict[str, Any]:
    cuda = s.device == "cuda"
    return {
        "settings": asdict(s),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "sonicmoe_cpp": sonicmoe_cpp.__version__,
        },
    }


def prepare(s: Settings, report: dict[str, Any]):
    """The PeftModel, ready to train; prints what is trained and the memory that it will take."""
    try:
        net = model.build(s)
    except torch.OutOfMemoryError as error:
        raise UserError("the weights alone do not fit into the GPU's memory") from error
    experts = model.experts_of(net, s)
    if s.offload_embedding:
        model.offload_embedding(net)
    report["loss_in_chunks"] = use_chunks(net, s.logits)
    net = model.add_factors(net, s)
    if s.compile:
        model.compile_parts(net)
    report["trained"] = memory.trained(net)
    print(f"{report['trained']['share']:.2%} of the parameters are trained")
    report["predicted_bytes"] = memory.predict(net.get_base_model(), experts, s)
    say_memory(report["predicted_bytes"], s)
    return net


def write_report(out: Path, report: dict[str, Any]) -> None:
    write_file(out / "report.json", json.dumps(report, indent=1).encode())


def finetune(s: Settings, stdout: TextIO) -> int:
    prepare_device(s)
    packed.limit_buffers(s.unpack_mib * 2**20 or None)
    checkpoint = open_folder(s)
    out, report = Path(s.out), describe(s)
    rows = model.load_rows(s, s.steps * s.batch * s.accumulate)
    print(f"{len(rows[0])} sequences of {s.sequence} tokens, {len(rows[1])} held out")
    net = prepare(s, report)
    with StopSignal() as stop:
        progress = run.Progress(s, stop)
        trainer = run.trainer_of(net, s, rows, progress)
        with model.uncompiled(net):
            before = trainer.evaluate()["eval_loss"]
        if s.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        done = run.train(trainer, progress, checkpoint)
        report["peak_bytes"] = memory.peak_bytes(s.device)
        if not done:
            saved = "saved; --resume" if s.save_every else "not saved (--save-every 0)"
            print(f"stopped at step {trainer.state.global_step} of {s.steps}, {saved}")
            return 128 + stop.number
        with model.uncompiled(net):
            after = trainer.evaluate()["eval_loss"]
        net.save_pretrained(out / "adapter")
        losses = [entry for entry in trainer.state.log_history if "loss" in entry]
        report |= {
            "tokens_per_s": progress.tokens_per_second(),
            "step_ms": 1e3 * progress.step(),
            "trace": progress.traced,
            "held_out": {"before": before, "after": after},
            "losses": [entry["loss"] for entry in losses],
        }
        if s.beside:
            write_report(out, report)  # is kept if the rival fails
            run.free_optimizer(trainer)
            report["beside"] = run.beside(net, s, rows, stop)
    if s.merge:
        model.merge(net, out / "merged")
    write_file(out / "loss.png", plot(losses, [(0, before), (s.steps, after)]))
    write_report(out, report)
    print(f"held out: {before:.3f} to {after:.3f}; {out / 'adapter'}, {out / 'loss.png'}")
    if s.json:
        stdout.write(json.dumps(report, indent=1) + "\n")
    return 0


def main(argv: list[str]) -> int:
    # Trainer and models of transformers 5.23 warn of names that 5.17 needs.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

    def command() -> int:
        s, stdout = parse(argv), sys.stdout
        # With --json stdout holds only the report; progress goes to stderr.
        with contextlib.redirect_stdout(sys.stderr if s.json else stdout):
            return finetune(replace(s, device=choose(s.device).name), stdout)

    return exit_code(command, interrupted="interrupted; the last checkpoint is intact")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
