"""The loss of a causal language model without the logits of all tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def chunked(head: nn.Module, chunk: int):
    """transformers' loss function for a model whose head returns the hidden states: mean
    cross-entropy of the next token. Logits of `chunk` tokens exist at a time. At 201,088 entries
    and 4096 tokens those of all tokens would take 3.3 GB in fp32, and as much for their gradient.
    """

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, head.weight, head.bias).float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch=None, **_):
        hidden, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = sum(
            checkpoint(part, h, t, use_reentrant=False)
            for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
        )
        count = num_items_in_batch
        return total / ((targets != IGNORED).sum() if count is None else count)

    return loss


def use_chunks(model: nn.Module, chunk: int) -> bool:
    """Makes the model compute its loss in chunks, unless its own loss is another function (because
    it scales or clamps logits): then nothing changes, and the result is False."""
    head = model.get_output_embeddings()
    ids = torch.arange(128, device=head.weight.device)[None]
    model.eval()
    with torch.no_grad():
        want = model(input_ids=ids, labels=ids).loss
        before = model.loss_function
        head.forward, model.loss_function = (lambda hidden: hidden), chunked(head, chunk)
        got = model(input_ids=ids, labels=ids).loss
    if torch.allclose(got.float(), want.float(), rtol=1e-2, atol=1e-2):
        return True
    del head.forward
    model.loss_function = before
    return False
