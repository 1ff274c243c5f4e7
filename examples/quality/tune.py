"""Fine-tuning of a pretrained model on other text: all weights, or factors of the experts alone."""

from typing import Any

import torch
from lm.errors import UserError
from sonicmoe_cpp import MoE
from torch import nn

from quality.model import Model
from quality.settings import Job
from quality.train import WHOLE, Place, Run, new_model, pretrained_file

RANK, ALPHA = 16, 32
VARIANTS = {  # the trained weights; the form of the frozen experts
    "full": "all weights",
    "experts": "the experts' weights",
    "lora-bf16": "factors on bf16 experts",
    "lora-nf4": "factors on NF4 experts",
    "lora-mxfp4": "factors on MXFP4 experts",
}


def prepare(model: Model, variant: str) -> None:
    """Freezes what the variant does not train, and adds factors to packed or bf16 experts."""
    if variant == "full":
        return
    half = model.embedding.device.type == "cuda"
    model.requires_grad_(False)
    for block in model.blocks:
        moe = block.moe
        if variant == "experts":
            moe.w_up.requires_grad_(True)
            moe.w_down.requires_grad_(True)
            continue
        form = variant.removeprefix("lora-")
        if half:
            moe.w_up, moe.w_down = (
                nn.Parameter(w.detach().bfloat16(), requires_grad=False)
                for w in (moe.w_up, moe.w_down)
            )
        if form != "bf16":
            moe.pack(form)
        moe.add_lora(RANK, ALPHA)


@torch.no_grad()
def merge(moe: MoE) -> None:
    """Replaces the experts by W + scale * B A in the dtype of W, and drops the factors."""
    lora = moe.lora
    for name, a, b in (("w_up", lora.up_a, lora.up_b), ("w_down", lora.down_a, lora.down_b)):
        held = getattr(moe, name)
        weight = held if isinstance(held, nn.Parameter) else held().unpack()
        whole = (weight.float() + lora.scale * torch.bmm(b.float(), a.float())).to(weight.dtype)
        delattr(moe, name)
        setattr(moe, name, nn.Parameter(whole, requires_grad=False))
    moe.lora = None


def tune(job: Job, place: Place) -> dict[str, Any]:
    """The record of a run from the pretrained weights on the documentation."""
    path = pretrained_file(place, job)
    try:
        weights = torch.load(path, map_location=place.device, weights_only=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"the pretrained model {path} cannot be read: {error}") from error
    model = new_model(job, place)
    model.load_state_dict(weights)
    prepare(model, job.variant)
    torch.manual_seed(job.seed)
    run = Run(job, place, model, "documentation")
    record = run.record(run.train())
    if job.variant.startswith("lora"):
        for block in model.blocks:
            merge(block.moe)
        run.forget_graphs()
        record["val_loss_merged"] = run.evaluate(WHOLE, None)
    return record
