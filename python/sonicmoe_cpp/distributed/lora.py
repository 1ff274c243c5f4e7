"""Low-rank factors of experts that are divided among ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..lora import LoRA

OF_ALL_EXPERTS = ("up_a", "down_b")  # with share_outer


def local(value: Tensor | None) -> Tensor | None:
    """This rank's part of a parameter."""
    return value.to_local() if isinstance(value, DTensor) else value


def divide(module: nn.Module, names: tuple, mesh) -> None:
    """Makes the named parameters DTensors of which this rank has its own experts' part."""
    for name in names:
        value = getattr(module, name)
        if value is not None:
            whole = DTensor.from_local(value.data, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(whole))


def divided_state(module: nn.Module, names: tuple, state_dict: dict, prefix: str) -> dict:
    """The state dict with this rank's part of whole tensors, as one process has them."""
    given = dict(state_dict)
    for name in names:
        own, value = getattr(module, name), given.get(prefix + name)
        if own is not None and value is not None and not isinstance(value, DTensor):
            where = (own.device_mesh, own.placements)
            given[prefix + name] = distribute_tensor(value, *where, src_data_rank=None)
    return given


class DividedLoRA(LoRA):
    """As LoRA, for the experts of this rank. The factors of experts are DTensors, sharded in
    dimension 0. With share_outer every rank has a whole copy of the two factors that belong to all
    experts; sum_replicated_gradients() of the layer sums their gradients."""

    def __init__(self, weights: tuple, rank: int, alpha: float, dtype, share_outer: bool, first):
        """For the DTensors (w_up, w_down); `first` is the number of this rank's first expert."""
        self.names = tuple(
            f"{of}_{part}"
            for of in ("up", "down")
            for part in "ab"
            if not (share_outer and f"{of}_{part}" in OF_ALL_EXPERTS)
        )
        self.first = first
        super().__init__(*map(local, weights), rank, alpha, dtype, share_outer)
        divide(self, self.names, weights[0].device_mesh)

    def options(self) -> str:
        """What must be equal on all ranks."""
        factors = [f"{n} {p.dtype} {p.shape[-2:]}" for n, p in self.named_parameters()]
        return f"{self.scale} {factors} {self.names}"

    def fill(self, seed: int) -> None:
        """As reset_parameters(), with a seed for each expert."""
        generator = torch.Generator(local(self.up_b).device)
        with torch.no_grad():
            for which, (a, b) in enumerate((("up_a", "up_b"), ("down_a", "down_b"))):
                first = self.first if a in self.names else 0
                for e, value in enumerate(local(getattr(self, a))):
                    generator.manual_seed((seed + 2 * (first + e) + which) % 2**62)
                    bound = value.shape[-1] ** -0.5
                    nn.init.uniform_(value, -bound, bound, generator=generator)
                local(getattr(self, b)).zero_()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *others) -> None:
        given = divided_state(self, self.names, state_dict, prefix)
        super()._load_from_state_dict(given, prefix, *others)

    def _factor(self, name: str) -> Tensor:
        value = getattr(self, name)
        if isinstance(value, DTensor) and (name not in self.names or len(value.placements) > 1):
            return super()._factor(name)  # which refuses it
        return local(value)
