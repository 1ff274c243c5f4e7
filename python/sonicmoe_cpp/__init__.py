"""Mixture-of-Experts layers for training, on PyTorch tensors (docs/pytorch.md).

Importing compiles nothing and touches no GPU. If the library cannot be loaded, the import still
works, and unsupported_reason() says why.
"""

try:
    import torch
except ImportError as error:
    raise ImportError(
        "sonicmoe_cpp needs PyTorch 2.10 or later, which this Python cannot import: install torch "
        "(https://pytorch.org/get-started), then import sonicmoe_cpp again"
    ) from error

from importlib import metadata

from . import _flops, _library, packed
from ._fake import fake_quantize
from ._library import engines, is_available, unsupported_reason, use_engine
from .fp8 import Fp8Weights, quantize_weights, share_fp8_weights
from .layer import Activation, h_views, moe, moe_grouped, moe_pairs
from .lora import LoRA, LowRank, lora_moe, lora_moe_grouped, lora_moe_pairs
from .module import MoE, MoEAux
from .packed import PackedWeights
from .routing import Pairs, expert_choice, route, router_losses, token_round

__all__ = [
    "Activation",
    "Fp8Weights",
    "LoRA",
    "LowRank",
    "MoE",
    "MoEAux",
    "PackedWeights",
    "Pairs",
    "__version__",
    "engines",
    "expert_choice",
    "fake_quantize",
    "h_views",
    "is_available",
    "lora_moe",
    "lora_moe_grouped",
    "lora_moe_pairs",
    "moe",
    "moe_grouped",
    "moe_pairs",
    "packed",
    "quantize_weights",
    "route",
    "router_losses",
    "share_fp8_weights",
    "show_config",
    "token_round",
    "unsupported_reason",
    "use_engine",
]


def _version() -> str:
    if _library.PROBLEM is None:
        return torch.ops.sonicmoe_cpp.version()
    try:
        return metadata.version("sonicmoe-cpp")
    except metadata.PackageNotFoundError:
        return "unknown"


__version__ = _version()
if _library.PROBLEM is None:
    _flops.register()


def _cuda_engine() -> str:
    ordinal = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    note = torch.ops.sonicmoe_cpp.engine_note(ordinal)
    return torch.ops.sonicmoe_cpp.engine_of(ordinal) + (f" ({note})" if note else "")


def show_config() -> str:
    """Versions, library, devices and threads, as text for a bug report."""
    reason = unsupported_reason()
    lines = {
        "sonicmoe_cpp": __version__,
        "torch": torch.__version__,
        "library": _library.path(),
        "cpu": f"available, {torch.get_num_threads()} threads" if reason is None else reason,
        "cuda": unsupported_reason("cuda") or f"available, engine {_cuda_engine()}",
        "engines": ", ".join(engines()) or "none",
        "kernels": "none" if reason else torch.ops.sonicmoe_cpp.cuda_build(),
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())
