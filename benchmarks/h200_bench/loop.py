"""A loop over experts in PyTorch: what model code does where no grouped product is to be had."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .pieces import swiglu, topk_softmax


def loop_layer(shape):
    """For each expert: find its tokens, copy their rows, two products, add to the output.

    As in the default experts of Hugging Face transformers: finding the tokens waits for the device,
    because the host must know their number. Every expert's weights are tensors of their own
    (`by_expert`): slices of one tensor would cost a gradient of that tensor's size for each expert.
    """

    def layer(x, logits, ups, downs):
        ids, weights = topk_softmax(logits, shape.K)
        weights = weights.to(x.dtype)
        used = ids.flatten().bincount(minlength=shape.E).nonzero().flatten().tolist()
        out = torch.zeros_like(x)
        for e in used:
            token, slot = torch.where(ids == e)
            a = swiglu(F.linear(x.index_select(0, token), ups[e]))
            y = F.linear(a, downs[e]) * weights[token, slot].unsqueeze(-1)
            out.index_add_(0, token, y)
        return out

    layer.by_expert = True
    return layer
