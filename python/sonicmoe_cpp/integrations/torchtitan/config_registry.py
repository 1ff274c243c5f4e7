"""Configurations that train the paper's models, for torchtitan 0.3's command line:

    torchrun ... -m torchtitan.train --module sonicmoe_cpp.integrations.torchtitan \\
        --config sonicmoe_7b_n256 --hf-assets-path ASSETS --dataloader.dataset-path tokens.npy
"""

from __future__ import annotations

from .._release import needs

with needs("torchtitan", "torchtitan", "0.3"):
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import TrainingConfig
    from torchtitan.config.override import OverrideConfig
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.trainer import Trainer

from .metrics import SonicMetrics
from .models import specification
from .sizes import SIZES
from .tokens import TokenFileLoader

OVERRIDES = "sonicmoe_cpp.integrations.torchtitan.overrides"


def _training(name: str, lr: float, training: TrainingConfig, warmup: int) -> Trainer.Config:
    """AdamW, `warmup` steps of warm-up followed by a cosine to a tenth of the learning rate, and a
    checkpoint every 1000 steps that any number of ranks can resume."""
    overrides = [f"{OVERRIDES}.{part}" for part in ("routed_experts", "router", "selective_ac")]
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=SIZES[name].vocabulary)
        ),
        model_spec=specification(name),
        dataloader=TokenFileLoader.Config(),
        optimizer=default_adamw(lr=lr),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=warmup, decay_type="cosine", min_lr_factor=0.1
        ),
        training=training,
        metrics=SonicMetrics.Config(log_freq=10),
        checkpoint=CheckpointManager.Config(enable=True, interval=1000, last_save_model_only=False),
        activation_checkpoint=SelectiveAC.Config(),
        override=OverrideConfig(imports=overrides),
    )


def _paper(name: str, lr: float) -> Trainer.Config:
    """100,000 steps of 256 sequences of 4096 tokens."""
    training = TrainingConfig(
        local_batch_size=4, global_batch_size=256, seq_len=4096, steps=100_000
    )
    return _training(name, lr, training, warmup=2000)


def sonicmoe_1_4b_n256() -> Trainer.Config:
    return _paper("1.4B-n256", 8e-4)


def sonicmoe_1_4b_n512() -> Trainer.Config:
    return _paper("1.4B-n512", 8e-4)


def sonicmoe_1_4b_n1024() -> Trainer.Config:
    return _paper("1.4B-n1024", 8e-4)


def sonicmoe_7b_n256() -> Trainer.Config:
    return _paper("7B-n256", 4e-4)


def sonicmoe_7b_n512() -> Trainer.Config:
    return _paper("7B-n512", 4e-4)


def sonicmoe_7b_n1024() -> Trainer.Config:
    return _paper("7B-n1024", 4e-4)


def sonicmoe_debug() -> Trainer.Config:
    """Two layers of width 64, for a quick test of a machine."""
    training = TrainingConfig(local_batch_size=2, seq_len=128, steps=10)
    config = _training("debug", 1e-3, training, warmup=2)
    config.metrics.log_freq = 1
    config.checkpoint.interval = 5
    return config
