"""Parts used by several layers around other packages' grouped products."""

from __future__ import annotations

import torch.nn.functional as F


def topk_softmax(logits, k):
    chosen, ids = logits.topk(k, dim=-1)
    return ids, F.softmax(chosen.float(), dim=-1)


def swiglu(h):
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up
