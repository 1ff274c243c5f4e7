"""A run of transformers' Trainer: progress, checkpoints, interruption, resuming."""

import gc
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
from lm.errors import TrainingFailed, UserError
from lm.trainer import StopSignal
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tune.memory import peak_bytes
from tune.settings import WARM, Settings
from tune.trace import Trace, table

GIB = 2**30


class Progress(TrainerCallback):
    """Times steps, prints lines, stops after a step on Ctrl-C or a loss that is not finite. With
    --trace the last step is traced instead of timed."""

    def __init__(self, s: Settings, stop: StopSignal):
        self.settings, self.stop = s, stop
        self.seconds: list[float] = []  # of each step
        self.failed = 0
        self.traced: dict = {}  # of trace.attribute()
        self._began = 0.0
        self._trace: Trace | None = None

    def on_step_begin(self, args, state, control, model=None, **others):
        last = state.global_step == state.max_steps - 1
        if self.settings.trace and last and len(self.seconds) > WARM:
            self._trace = Trace(model)
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **others):
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        if self._trace is None:
            self.seconds.append(time.perf_counter() - self._began)
        else:
            self.traced, self._trace = self._trace.end(), None
            print(table(self.traced, 1e3 * self.step()), flush=True)
        if self.stop():
            control.should_training_stop = True
            control.should_save = self.settings.save_every > 0

    def on_log(self, args, state, control, logs=None, **others):
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if loss != loss or abs(loss) == float("inf"):
            self.failed = state.global_step
            control.should_save, control.should_training_stop = False, True
        every = max(1, state.max_steps // 20)
        if state.global_step % every == 0 or state.global_step == state.max_steps:
            left = timedelta(seconds=round((state.max_steps - state.global_step) * self.step()))
            print(
                f"step {state.global_step}/{state.max_steps}: loss {loss:.3f}, "
                f"{self.tokens_per_second():,.0f} tokens/s{_peak(self.settings)}, {left} left",
                flush=True,
            )

    def step(self) -> float:
        """The median seconds of a step."""
        return statistics.median(self.seconds[WARM:] or self.seconds)

    def tokens_per_second(self) -> float:
        return self.settings.tokens_a_step / self.step()


def _peak(s: Settings) -> str:
    peak = peak_bytes(s.device)
    return "" if peak is None else f", peak {peak / GIB:.2f} GiB"


def last_checkpoint(s: Settings) -> str | None:
    """The checkpoint that a run continues from."""
    found = get_last_checkpoint(s.out)
    if found and not s.resume:
        raise UserError(
            f"{s.out} has {Path(found).name}: continue it with --resume, or choose another --out"
        )
    if s.resume and not found:
        raise UserError(f"{s.out} has no checkpoint to resume")
    return found


def arguments(s: Settings, **others) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": s.out,
            "max_steps": s.steps,
            "per_device_train_batch_size": s.batch,
            "per_device_eval_batch_size": s.batch,
            "gradient_accumulation_steps": s.accumulate,
            "gradient_checkpointing": s.checkpointing,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "learning_rate": s.lr,
            "lr_scheduler_type": "cosine",
            "warmup_steps": min(10, s.steps // 10),
            "optim": s.optim,
            "bf16": s.device == "cuda",
            "use_cpu": s.device == "cpu",
            "logging_steps": 1,
            "logging_nan_inf_filter": False,  # Trainer would log another number
            "save_strategy": "steps" if s.save_every else "no",
            "save_steps": s.save_every or s.steps,
            "save_total_limit": 2,
            "prediction_loss_only": True,
            "report_to": [],
            "disable_tqdm": True,
            "seed": s.seed,
        }
        | others
    )


def trainer_of(model, s: Settings, rows, progress: Progress, **others) -> Trainer:
    train, measured = rows
    options = {"train_dataset": train, "eval_dataset": measured, "callbacks": [progress]}
    trainer = Trainer(model, arguments(s, **others), **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(trainer: Trainer, progress: Progress, checkpoint: str | None) -> bool:
    """Trains to the end; False if Ctrl-C came before, after a checkpoint."""
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except torch.OutOfMemoryError as error:
        raise UserError(
            "the GPU's memory (or --cap-gib) is too small: give a smaller --sequence or --rank, "
            "--factors bf16, or --checkpointing"
        ) from error
    if progress.failed:
        raise TrainingFailed(f"the loss is not finite at step {progress.failed}: lower --lr")
    return trainer.state.global_step >= trainer.args.max_steps


def free_optimizer(trainer: Trainer) -> None:
    """Frees the optimizer's state and the gradients, which would count to the next run's peak."""
    trainer.accelerator.free_memory()
    trainer.model.zero_grad()
    handler = trainer.callback_handler
    trainer.optimizer = trainer.lr_scheduler = handler.optimizer = handler.lr_scheduler = None
    trainer.model_wrapped = trainer.model
    gc.collect()


def beside(model, s: Settings, rows, stop: StopSignal) -> dict:
    """The same steps with other experts of transformers, in this process: tokens/s and peak."""
    model.get_base_model().set_experts_implementation(s.beside)
    progress = Progress(s, stop)
    trainer = trainer_of(model, s, rows, progress, max_steps=WARM + 6, save_strategy="no")
    if s.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print(f"beside: {s.beside}")
    try:
        trainer.train()
    except torch.OutOfMemoryError:
        return {"experts": s.beside, "fits": False}
    found = {"experts": s.beside, "fits": True, "peak_bytes": peak_bytes(s.device)}
    found["trace"] = progress.traced
    return found | {"tokens_per_s": progress.tokens_per_second(), "step_ms": 1e3 * progress.step()}
