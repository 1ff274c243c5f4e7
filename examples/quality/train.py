"""One training run of the studies: steps without waits for the device, evaluation, its record."""

import functools
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lm.errors import TrainingFailed
from torch import Tensor, nn

from quality import text, times
from quality.graphs import Replayed
from quality.model import Model, Parts, Rule, changed_rows, count_parameters
from quality.settings import ARCHITECTURES, ROUNDING_BEGINS, SIZES, Job

WARM_UP = 0.05  # share of the steps
FINAL_LR = 0.1  # of the peak
EVALUATIONS = 8  # during a run, besides the first and the last
SAMPLED, WHOLE = 128, 1024  # windows of the validation text: during a run, at its end
BIAS_RATE = 0.001  # DeepSeek-V3's, for each step
COUNTED_STEPS = 64  # loads and changed rows are sums over the last steps


class OutOfTime(Exception):
    """The deadline of the call came before the end of the run."""


@dataclass
class Place:
    """What the runs of one process share."""

    device: torch.device
    folder: Path  # of the text
    out: Path
    deadline: float  # time.monotonic() after which a run is dropped
    parts: Parts
    graph: bool = True  # steps are CUDA graphs
    loaded: dict[str, Any] = field(default_factory=dict)  # text that was read before

    def tokens(self, name: str, context: int):
        if name not in self.loaded:
            self.loaded[name] = text.read_tokens(self.folder, name, 8 * (context + 1))
        return self.loaded[name]

    def windows(self, name: str, context: int, seed: int) -> text.Windows:
        return text.Windows(self.tokens(name, context), context, self.device, seed)

    def vocab(self) -> int:
        return text.read_meta(self.folder)["vocab"]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def learning_rate(peak: float, step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine."""
    warm_up = max(1, int(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    device = trained[0].device
    return torch.optim.AdamW(
        groups,
        lr=torch.tensor(lr, device=device),  # a tensor, because a graph reads its value
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
        capturable=device.type == "cuda",
    )


def rule_of(job: Job) -> Rule | None:
    if not job.ratio:
        return None
    tile = SIZES[job.size].tile
    return Rule(job.mode, tile, ARCHITECTURES[job.architecture].group(job.ratio, tile))


def evaluated(model: Model, rule: Rule | None, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a batch. Gradients stay enabled, so that the compiled parts of training serve
    here too."""
    return model(inputs, targets, rule)[0].detach()


class Run:
    """A model in training on one kind of text."""

    def __init__(self, job: Job, place: Place, model: Model, kind: str):
        self.job, self.place, self.model = job, place, model
        context = SIZES[job.size].context
        order = job.seed if job.order is None else job.order
        self.windows = place.windows(f"{kind}-train", context, order)
        self.validation = place.windows(f"{kind}-validation", context, 0)
        self.optimizer = make_optimizer(model, job.lr)
        self.rule = rule_of(job)
        self.curve: list[dict[str, float]] = []
        self.seconds, self.timed_steps = 0.0, 0
        self._evaluations: dict[Rule | None, Replayed] = {}
        shape = (len(model.blocks), ARCHITECTURES[job.architecture].experts)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=place.device)
        self._changed = torch.zeros((shape[0], 2), dtype=torch.int64, device=place.device)

    def graph(self, rule: Rule | None) -> bool:
        """Whether a step with this rule can be a graph: stochastic rounding draws a seed on the
        host for each step, which a graph would repeat."""
        stochastic = rule is not None and rule.mode == "stochastic"
        return self.place.graph and self.place.device.type == "cuda" and not stochastic

    def forget_graphs(self) -> None:
        """After the model's parameters were replaced by others, or to have their memory."""
        self._evaluations.clear()

    def evaluate(self, windows: int, rule: Rule | None) -> float:
        """Mean nats a token of the first windows of the validation text."""
        if rule not in self._evaluations:
            of_batch = functools.partial(evaluated, self.model, rule)
            self._evaluations[rule] = Replayed(of_batch, self.graph(rule))
        batch = SIZES[self.job.size].batch
        count = max(1, min(windows, self.validation.count) // batch)
        total = torch.zeros((), device=self.place.device)
        for i in range(count):
            total += self._evaluations[rule](*self.validation.batch(i * batch, batch))
        return float(total / count)

    def train(self) -> Tensor:
        """Trains to the end; returns the training loss of each step."""
        steps, losses = self.job.steps, torch.zeros(self.job.steps, device=self.place.device)
        begin = int(ROUNDING_BEGINS[self.job.begin] * steps)
        every = max(1, steps // EVALUATIONS)
        self._warm_up()
        compute = self._replayed(self.rule if begin == 0 else None)
        for step in range(steps):
            if step == begin > 0:
                compute = self._replayed(self.rule)
            if step % every == 0:
                self._note(step)
                began = time.perf_counter()
            settled = compute.settled
            losses[step] = self._step(step, compute)
            if not settled:  # the first steps and the capture are not timed
                self.place.wait()
                began = time.perf_counter()
            self.timed_steps += settled
            if (step + 1) % every == 0 or step + 1 == steps:
                self.place.wait()
                self.seconds += time.perf_counter() - began
        return losses

    def _replayed(self, rule: Rule | None) -> Replayed:
        return Replayed(functools.partial(self._compute, rule), self.graph(rule))

    def _warm_up(self) -> None:
        """Compiles what a step needs, so that `seconds` does not count it. Changes no weights."""
        loss, _ = self.model(*self.windows.batch(0, SIZES[self.job.size].batch), None)
        loss.backward()

    def _note(self, step: int) -> None:
        if time.monotonic() > self.place.deadline:
            raise OutOfTime(self.job.name)
        loss = self.evaluate(SAMPLED, None)
        if not math.isfinite(loss):
            raise TrainingFailed(f"{self.job.name} diverged before step {step}")
        self.curve.append({"step": step, "seconds": round(self.seconds, 2), "loss": loss})

    def _step(self, step: int, compute: Replayed) -> Tensor:
        lr = learning_rate(self.job.lr, step, self.job.steps)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)
        batch = SIZES[self.job.size].batch
        loss, counts, changed = compute(*self.windows.batch(step * batch, batch))
        if step >= self.job.steps - COUNTED_STEPS:
            self._counts += counts
            self._changed += changed
        return loss

    def _compute(self, rule: Rule | None, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """Trains on a batch. Returns its loss, each layer's rows of the experts, and the rows that
        rounding changed in each."""
        self.optimizer.zero_grad()
        loss, layers = self.model(inputs, targets, rule)
        (loss + sum(layer.loss for layer in layers)).backward()
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        self.optimizer.step()
        for block, layer in zip(self.model.blocks, layers, strict=True):
            if block.moe.selection_bias is not None:
                block.moe.update_selection_bias(layer.counts, BIAS_RATE)
        counts = torch.stack([layer.counts for layer in layers])
        return loss.detach(), counts, torch.stack([changed_rows(layer) for layer in layers])

    def loads(self) -> dict[str, Any]:
        """Of each layer in the last steps: the largest load of an expert and the standard deviation
        over the mean, and the rows that rounding added and dropped over all."""
        counts = self._counts.double()
        mean = counts.mean(1)
        found = {"largest": counts.amax(1) / mean, "deviation": counts.std(1) / mean}
        if self.rule is not None:
            added, dropped = (self._changed.double() / counts.sum(1, keepdim=True)).unbind(1)
            found |= {"added": added, "dropped": dropped}
        return {key: [round(v, 4) for v in value.tolist()] for key, value in found.items()}

    def tokens_per_second(self) -> int:
        size = SIZES[self.job.size]
        tokens = self.timed_steps * size.batch * size.context
        return round(tokens / self.seconds) if self.seconds else 0

    def record(self, losses: Tensor) -> dict[str, Any]:
        last = losses[-max(1, len(losses) // 20) :].mean().item()
        final = self.evaluate(WHOLE, None)
        if not math.isfinite(final):
            raise TrainingFailed(f"{self.job.name} diverged")
        self.curve.append(
            {"step": self.job.steps, "seconds": round(self.seconds, 2), "loss": final}
        )
        found = {"name": self.job.name, "settings": self.job.settings(), "val_loss": final}
        found |= {"last_train_loss": last, "curve": self.curve, "steps": self.job.steps}
        found |= {"seconds": round(self.seconds, 2), "parameters": count_parameters(self.model)}
        found["tokens_per_s"] = self.tokens_per_second()
        found["train_tokens"] = self.windows.count * SIZES[self.job.size].context
        found["text"] = text.read_meta(self.place.folder)["tokens"]
        found["loads"] = self.loads()
        if self.rule is not None:
            found["val_loss_rounded"] = self.evaluate(WHOLE, self.rule)
        return found


def new_model(job: Job, place: Place) -> Model:
    torch.manual_seed(job.seed)
    with place.device:
        return Model(job.size, job.architecture, place.vocab(), place.parts)


def pretrained_file(place: Place, job: Job) -> Path:
    return place.out / f"pretrained-{job.architecture}-{job.size}.pt"


def train(job: Job, place: Place) -> dict[str, Any]:
    """The record of a run from its initial weights on the sources."""
    run = Run(job, place, new_model(job, place), "sources")
    record = run.record(run.train())
    if job.study == "pretrain":
        path = pretrained_file(place, job)
        unfinished = path.with_suffix(".writing")
        torch.save(run.model.state_dict(), unfinished)
        unfinished.replace(path)
    if job.timed and run.rule is not None and place.device.type == "cuda":
        record |= timed(run)
    return record


def timed(run: Run) -> dict[str, Any]:
    """The times of a step, or why there are none: the record of the run is kept."""
    batch = SIZES[run.job.size].batch
    run.forget_graphs()
    try:
        found = times.measure(run.model, run.optimizer, run.rule, run.windows.batch(0, batch))
    except RuntimeError as error:
        return {"times_failed": str(error)}
    return {"times": found}


def measure(job: Job, place: Place) -> dict[str, Any]:
    """The record of the times of a step, after a few steps of training."""
    run = Run(job, place, new_model(job, place), "sources")
    run.train()
    record = {"name": job.name, "settings": job.settings(), "seconds": round(run.seconds, 2)}
    record |= {"steps": job.steps, "parameters": count_parameters(run.model)}
    record |= {"tokens_per_s": run.tokens_per_second(), "loads": run.loads()}
    record |= {"text": text.read_meta(place.folder)["tokens"]}
    return record | timed(run)
