"""One training run: schedule, steps, evaluation, progress, checkpoints."""

import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from lm import checkpoint, measure
from lm.config import Config
from lm.data import Batches, Corpus, validation_windows
from lm.device import autocast
from lm.errors import TrainingFailed, UserError, first_line
from lm.files import make_folder
from lm.model import build


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then half a cosine down to final_lr of the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (
        config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
    )


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices and none for norms."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(0.9, config.beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )


def cross_entropy(
    model: nn.Module, inputs: np.ndarray, targets: np.ndarray, config: Config
) -> tuple[torch.Tensor, list[Any]]:
    """Mean nats a token of (rows, context) int64 arrays, and the MoEAux of each layer."""
    with autocast(config.device, config.precision):
        logits, auxes = model(torch.from_numpy(inputs).to(config.device))
    wanted = torch.from_numpy(targets).to(config.device)
    return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten()), auxes


@torch.no_grad()
def evaluate(model: nn.Module, inputs: np.ndarray, targets: np.ndarray, config: Config) -> float:
    """Mean nats a token over (windows, context) arrays; an MoE in eval mode routes by top-K."""
    model.eval()
    total = 0.0
    for i in range(0, len(inputs), config.batch):
        rows = slice(i, i + config.batch)
        loss, _ = cross_entropy(model, inputs[rows], targets[rows], config)
        total += loss.item() * targets[rows].size
    return total / targets.size


class StopSignal:
    """Turns the first Ctrl-C (or SIGTERM) into a flag, so that the run ends after a whole step.

    A second Ctrl-C interrupts at once; checkpoints stay complete.
    """

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "StopSignal":
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self.number != 0

    def _note(self, number: int, _frame: object) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number


@dataclass
class History:
    """Losses, padding and time of the steps so far; saved with every checkpoint."""

    train_loss: list[float] = field(default_factory=list)  # every step
    val_steps: list[int] = field(default_factory=list)
    val_loss: list[float] = field(default_factory=list)
    padding: list[dict[str, int]] = field(default_factory=list)  # at the steps of val_steps > 0
    seconds: float = 0.0  # in training steps, without evaluation


class Run:
    """The model of one routing, from its initial weights or its last checkpoint to the end."""

    def __init__(self, name: str, config: Config, corpus: Corpus, folder: Path):
        self.name = name
        self.config = config
        self.folder = folder
        make_folder(folder)
        try:
            self.model = build(config, name)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise UserError(f"the model cannot be built: {first_line(error)}") from error
        self.optimizer = make_optimizer(self.model, config)
        self.history = History()
        self.step = 0
        self._digest = corpus.digest()
        self._batches = Batches(corpus.train, config)
        self._validation = validation_windows(corpus.validation, config.context)
        every = max(1, len(self._validation[0]) // config.eval_sequences)
        self._sampled = tuple(part[::every][: config.eval_sequences] for part in self._validation)

    @property
    def finished(self) -> bool:
        return self.step >= self.config.steps

    def restore(self) -> bool:
        """Continues from the checkpoint; False if there is none."""
        path = checkpoint.newest(self.folder)
        if path is None:
            return False
        content = checkpoint.load(path, self._identity())
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        torch.set_rng_state(content["rng"])
        self.step = content["step"]
        self.history = History(**content["history"])
        return True

    def _identity(self) -> dict[str, Any]:
        """The parts of a checkpoint's state that never change during a run."""
        return {"run": self.name, "text": self._digest, "config": asdict(self.config)}

    def save(self) -> Path:
        """Writes a checkpoint. A run that has diverged fails instead and keeps the last one."""
        optimizer = self.optimizer.state_dict()
        moments = [value for state in optimizer["state"].values() for value in state.values()]
        if not all(value.isfinite().all() for value in [*self.model.parameters(), *moments]):
            raise self._diverged(f"weights or moments are not finite after step {self.step}")
        content = self._identity() | {
            "step": self.step,
            "history": asdict(self.history),
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "rng": torch.get_rng_state(),
        }
        try:
            return checkpoint.save(self.folder, content)
        except OSError as error:
            raise UserError(
                f"cannot write a checkpoint to {self.folder}: {error.strerror}; the one before it "
                "is intact"
            ) from error

    def final_loss(self) -> float:
        """Mean nats a token of the whole validation split."""
        return self._evaluate(*self._validation)

    def train(self, stop: Callable[[], bool]) -> bool:
        """Trains to the last step, or until `stop` returns true, and saves. True if finished.

        A run that diverges, or whose step cannot be computed, raises TrainingFailed.
        """
        try:
            self._train_steps(stop)
        except (RuntimeError, MemoryError) as error:
            raise TrainingFailed(
                f"{self.name}: training failed after step {self.step}: {first_line(error)}; "
                f"{self._kept()}"
            ) from error
        self.save()
        return self.finished

    def _train_steps(self, stop: Callable[[], bool]) -> None:
        if not self.history.val_steps:
            self._note_validation()
        with tqdm(
            total=self.config.steps,
            initial=self.step,
            desc=f"{self.name:>7}",
            unit="step",
            disable=None,  # shown on a terminal only; _note_validation prints lines to a log
        ) as bar:
            while not self.finished and not stop():
                random_state = torch.get_rng_state()
                auxes = self._train_step()
                bar.update()
                loss, speed = self.history.train_loss[-1], self.tokens_per_second()
                bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
                if self.step % self.config.eval_every == 0 or self.finished:
                    self.history.padding.append(measure.padding(self.config, auxes, random_state))
                    self._note_validation()
                if self.step % self.config.save_every == 0:
                    self.save()

    def tokens_per_second(self) -> float:
        tokens = self.step * self.config.batch * self.config.context
        return tokens / self.history.seconds if self.history.seconds else 0.0

    def _time_left(self) -> str:
        """An estimate for this run, as the end of a line; empty at its first and last step."""
        if self.step == 0 or self.finished:
            return ""
        seconds = self.history.seconds / self.step * (self.config.steps - self.step)
        return f"  about {timedelta(seconds=round(seconds))} left"

    def _kept(self) -> str:
        """The checkpoint that a failed run can continue from, as part of a sentence."""
        path = checkpoint.newest(self.folder)
        return f"the checkpoint {path} is kept" if path else "no checkpoint was saved before"

    def _diverged(self, what: str) -> TrainingFailed:
        return TrainingFailed(
            f"{self.name} diverged: {what}; {self._kept()}; a smaller --lr or --clip may help"
        )

    def _train_step(self) -> list[Any]:
        began = time.perf_counter()
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        random_state = torch.get_rng_state()
        try:
            losses, totals, auxes = self._gradients()
        except (RuntimeError, MemoryError):
            # The weights are still the weights after the previous step, so they can be saved.
            torch.set_rng_state(random_state)
            self.save()
            raise
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean().item()
        if not math.isfinite(loss + torch.stack(totals).sum().item()):
            raise self._diverged(f"the loss of step {self.step + 1} is not finite ({loss})")
        self.history.train_loss.append(loss)
        self.history.seconds += time.perf_counter() - began
        self.step += 1
        return auxes

    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
        """Clipped gradients of a step: for each part of the batch its mean nats a token and the
        total that is minimised, and for each layer and part its MoEAux."""
        parts = self.config.accumulate
        losses, totals, auxes = [], [], []
        for inputs, targets in zip(
            *(np.split(part, parts) for part in self._batches[self.step]), strict=True
        ):
            loss, of_layers = cross_entropy(self.model, inputs, targets, self.config)
            total = (loss + sum(aux.loss for aux in of_layers)) / parts
            total.backward()
            losses.append(loss.detach())
            totals.append(total.detach())
            auxes += of_layers
        if self.config.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        return losses, totals, auxes

    def _evaluate(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        loss = evaluate(self.model, inputs, targets, self.config)
        if not math.isfinite(loss):
            raise self._diverged(f"the validation loss at step {self.step} is not finite ({loss})")
        return loss

    def _note_validation(self) -> None:
        loss = self._evaluate(*self._sampled)
        self.history.val_steps.append(self.step)
        self.history.val_loss.append(loss)
        if not sys.stderr.isatty():
            print(
                f"{self.name:>7}  step {self.step:5d} of {self.config.steps}  validation "
                f"{loss:.3f}  {self.tokens_per_second():7,.0f} tokens/s{self._time_left()}",
                flush=True,
            )
