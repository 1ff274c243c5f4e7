"""A loop over experts in PyTorch, as in model code that has no grouped product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .pieces import swiglu, topk_softmax


def loop_layer(shape):
    """For each expert: find its tokens, copy their rows, two products, add to the output.

    The default experts of Hugging Face transformers do the same. The host waits for the device,
    because it must know the number of tokens. Every expert has its own weight tensors
    (`by_expert`): the backward of a slice would make a gradient of the whole tensor's size for each
    expert.
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
