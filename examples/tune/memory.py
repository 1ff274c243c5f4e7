"""The memory of a fine-tune, predicted before it starts. A model, not a measurement: `sonicmoe plan
--finetune` has the same items for a model that is not loaded."""

import torch
from torch import nn

from tune import dense
from tune.settings import Settings

# Bytes of optimizer state for a parameter. Others have two moments in the parameter's dtype.
STATES = {"sgd": 0, "adafactor": 0, "adamw_8bit": 2, "paged_adamw_8bit": 2}

ALWAYS = ("experts", "other weights", "factors", "optimizer", "unpacked weights")


def _bytes(tensors) -> int:
    """Bytes on the model's device; packed weights have less than their shape says."""
    return sum(
        t.packed.nbytes() if hasattr(t, "packed") else t.numel() * t.element_size() for t in tensors
    )


def trained(model: nn.Module) -> dict[str, float]:
    """What is trained: tensors, parameters, and their share of all parameters."""
    parameters = list(model.parameters())
    some = [p for p in parameters if p.requires_grad]
    count, every = sum(p.numel() for p in some), sum(p.numel() for p in parameters)
    every += sum(w.shape.numel() for w in dense.packed_layers(model))
    return {"tensors": len(some), "parameters": count, "of": every, "share": count / every}


def predict(model: nn.Module, experts: list[nn.Module], s: Settings) -> dict[str, int]:
    """Bytes by item; "peak" is the most that exists at the same time.

    Exact are weights, factors, gradients and optimizer. In backward a layer has H, dH, A' and dX~
    of its experts, 2C(2Gn + n + d) bytes in 16 bits, and its attention and norms have about
    T(20d + 14q + 10kv): q and kv are the widths of queries and of keys.
    """
    config = model.config.get_text_config()
    trains = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    own = {id(p) for module in experts for p in module.parameters()}
    element = model.get_input_embeddings().weight.element_size()
    d, layers, T = config.hidden_size, config.num_hidden_layers, s.tokens
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or d // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    C = T * config.num_experts_per_tok
    n = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    attention = T * (20 * d + 14 * heads * head + 10 * kv_heads * head) * element // 2
    if model.config._attn_implementation == "eager":  # T x T scores, softmax and a gradient
        attention += 3 * heads * T * s.sequence * element
    kept = layers * T * d * element
    if not s.checkpointing:  # of all layers but the one in backward
        kept = (layers - 1) * (T * d * element + attention + C * 2 * n * element)
    packed = [p for module in experts for p in module.parameters() if hasattr(p, "packed")]
    unpacked = sum(p.numel() * element for p in packed[:2])  # both projections of one layer
    if s.unpack_mib:
        one = max((p.numel() // len(p) * element for p in packed[:2]), default=0)
        unpacked = min(unpacked, max(one, s.unpack_mib * 2**20))
    attention_weights = dense.packed_layers(model)
    unpacked += max((w.shape.numel() * element for w in attention_weights), default=0)
    items = {
        "experts": _bytes(p for p in frozen if id(p) in own),
        "other weights": _bytes(p for p in frozen if id(p) not in own)
        + sum(w.nbytes() for w in attention_weights),
        "factors": _bytes(trains),
        "gradients": _bytes(trains),
        "optimizer": sum(p.numel() * STATES.get(s.optim, 2 * p.element_size()) for p in trains),
        "kept of layers": kept,
        "one layer in backward": C * (5 * n + d) * element + attention,
        "unpacked weights": unpacked,
        "logits": min(T, s.logits) * config.vocab_size * (8 + 2 * element),
    }
    # Backward frees what layers kept while it makes gradients, unless an earlier micro-batch has.
    growing = items["kept of layers"], items["gradients"]
    items["peak"] = (
        sum(items[name] for name in ALWAYS)
        + (max(growing) if s.accumulate == 1 else sum(growing))
        + max(items["one layer in backward"], items["logits"])
    )
    return items


def peak_bytes(device: str) -> int | None:
    """The most that tensors took since the last reset; None on the CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else None
