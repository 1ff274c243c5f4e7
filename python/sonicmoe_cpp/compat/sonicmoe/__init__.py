"""Replaces the package `sonicmoe`: the same names, shapes, layouts and results.

docs/sonic-moe.md lists the differences.

    from sonicmoe_cpp.compat import sonicmoe
    sonicmoe.install()      # from here on, `import sonicmoe` is this package
"""

import sys

from ... import __version__
from . import enums, functional, moe
from .count_cumsum import count_cumsum
from .enums import KernelBackendMoE
from .functional import enable_quack_gemm, moe_general_routing_inputs, moe_TC_softmax_topk_layer
from .moe import MoE

__all__ = [
    "KernelBackendMoE",
    "MoE",
    "__version__",
    "count_cumsum",
    "enable_quack_gemm",
    "enums",
    "functional",
    "install",
    "moe",
    "moe_TC_softmax_topk_layer",
    "moe_general_routing_inputs",
]

NAME = "sonicmoe"


def install() -> None:
    """Makes `import sonicmoe`, and imports of its submodules, import this package in this process.

    Raises an error if another `sonicmoe` has been imported, because code may already use its parts.
    """
    here = sys.modules[__name__]
    if sys.modules.get(NAME, here) is not here:
        raise RuntimeError(
            f"{NAME} is imported already, from {sys.modules[NAME].__file__}: call "
            "sonicmoe_cpp.compat.sonicmoe.install() before anything imports it"
        )
    for name in list(sys.modules):
        if name == __name__ or name.startswith(f"{__name__}."):
            sys.modules[name.replace(__name__, NAME)] = sys.modules[name]
