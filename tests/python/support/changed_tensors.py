"""Tensors that come back from hooks, or from tuples that a user builds, with other strides,
devices, dtypes or sizes; and derivatives of calls whose saved tensors are changed so."""

import torch
from torch.autograd.graph import saved_tensors_hooks

REFUSED = (ValueError, RuntimeError, TypeError, IndexError)  # NotImplementedError is a RuntimeError


def stacked(t):
    return torch.stack([t, t], -1)[..., 0]


def sliced(t):
    """Contiguous, but begins at the second element of an allocation."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def padded(t):
    return torch.nn.functional.pad(t, (0, 3))[..., : t.shape[-1]]


def transposed(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(t):
    return t.flatten()[:1].expand(t.numel()).view(t.shape)


def truncated(t):
    return t[: t.shape[0] // 2]


def empty(t):
    return t[:0]


def flat(t):
    return t.flatten()


def freed(t, part=0):
    """As FSDP frees gathered parameters."""
    t = t.clone()
    t.untyped_storage().resize_(part * t.untyped_storage().nbytes() // 2)
    return t


def half_freed(t):
    return freed(t, 1)


def other_bytes(t):
    """In metadata: indices that are out of range."""
    return torch.full_like(t, 0x7F) if t.dtype == torch.uint8 else t


def wider(t):
    return t.to(torch.complex64 if t.dtype == torch.float64 else torch.float64)


def as_wide(t):
    """Another dtype of the same size, so that the number of bytes does not show it."""
    same = {1: torch.int8, 2: torch.float16, 4: torch.int32, 8: torch.float64}
    return t.view(same[t.element_size()])


def on_meta(t):
    return t.to("meta")


SAME = (stacked, sliced, padded, transposed)
OTHER = (expanded, truncated, empty, flat, freed, half_freed, other_bytes, wider, as_wide, on_meta)


def differentiated(call, device, change, only=None):
    """The gradients of a call of which all saved tensors, or the tensor number `only`, are changed;
    how many there are; and whether a tensor was changed before backward read it."""
    count, changed = 0, False

    def pack(t):
        nonlocal count
        count += 1
        return count - 1, t

    def unpack(packed):
        nonlocal changed
        number, t = packed
        if t.dim() == 0 or only not in (None, number):
            return t
        changed = True
        return change(t)

    torch.manual_seed(1)
    with saved_tensors_hooks(pack, unpack):
        out, inputs = call(device)
    found = torch.autograd.grad(out.float().square().sum(), inputs, allow_unused=True)
    return found, count, changed
