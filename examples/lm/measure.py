"""Memory and padding for the report, measured on the model that was trained."""

import copy
from typing import Any

import sonicmoe_cpp
import torch
from torch import nn

from lm.config import Config


def saved_for_backward(layer: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a layer's forward keeps for its backward: each storage counts once, parameters do
    not count."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x)  # kept alive: a freed storage's address could be counted for another
    total = sum(kept.values())
    del output
    return total


def activation_memory(config: Config, layer: nn.Module, run: str) -> dict[str, Any]:
    """Bytes that one MoE layer keeps for backward: as measured, as predicted for X and H alone, and
    of an implementation that keeps everything."""
    tokens = config.tokens
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(tokens, config.width, generator=generator)
    x = x.to(config.device, torch.float32 if config.precision == "fp32" else torch.bfloat16)
    x.requires_grad_()
    size = x.element_size()
    rows = tokens * config.top_k
    capacity = rows
    if run == "rounded":  # H is allocated for the most rows that rounding can give
        slack = {"down": 0, "nearest": config.tile // 2}.get(config.rounding, config.tile)
        capacity = min(tokens * config.experts, rows + config.experts * slack)
    d, n = config.width, config.expert_width
    of_h = 1 + 4 / 128 if config.precision == "fp8" else size  # a code, and a scale for 128
    if config.precision != "fp32":  # autocast would keep copies of fp32 weights
        layer = copy.deepcopy(layer).to(torch.bfloat16)
    measured = saved_for_backward(layer.train(), x)
    return {
        "bytes_measured": measured,
        "bytes_predicted": size * tokens * d + round(of_h * 2 * capacity * n),
        "bytes_keeping_everything": size * (tokens * d + rows * (d + 2 * n + n + d)),
        "tokens": tokens,
        "row_capacity": capacity,
    }


@torch.no_grad()
def padding(config: Config, auxes: list[Any], random_state: torch.Tensor) -> dict[str, int]:
    """Rows of one step in all layers, for top-K and for rounding: the routed rows, and the rows of
    whole tiles. random_state: torch's at the begin of the step, from which every layer drew the
    seed of stochastic rounding, in the order of `auxes`."""
    generator = torch.Generator()
    generator.set_state(random_state)

    def whole_tiles(rows: torch.Tensor) -> int:
        return int((-(-rows // config.tile) * config.tile).sum())

    total = {"topk_rows": 0, "topk_tiled": 0, "rounded_rows": 0, "rounded_tiled": 0}
    for aux in auxes:
        topk = aux.tokens_per_expert
        rule: dict[str, Any] = {"tile": config.tile, "mode": config.rounding}
        if config.rounding == "stochastic":
            rule["seed"] = torch.randint(2**62, (), dtype=torch.int64, generator=generator)
        pairs = sonicmoe_cpp.token_round(aux.logits.detach(), config.top_k, **rule)
        rounded = pairs.offsets.diff()
        total["topk_rows"] += int(topk.sum())
        total["topk_tiled"] += whole_tiles(topk)
        total["rounded_rows"] += int(rounded.sum())
        total["rounded_tiled"] += whole_tiles(rounded)
    return total
