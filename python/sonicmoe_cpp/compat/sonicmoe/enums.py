"""The enums of sonicmoe, and the activations of this library that they select."""

from __future__ import annotations

from enum import Enum

LIBRARY_NAME = "sonicmoe"
TENSORMAP = "tensormap"


class KernelBackendMoE(Enum):
    scattermoe = "scattermoe"
    torch = "torch"
    sonicmoe = "sonicmoe"


class ActivationType(Enum):
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    REGLU = "reglu"

    RELU_SQ = "relu_sq"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"

    @classmethod
    def _missing_(cls, value):
        return cls.GELU if value == "gelu_tanh_approx" else None


# For GELU and GEGLU sonicmoe's kernels compute the tanh form.
MEANING = {
    ActivationType.SWIGLU: "swiglu",
    ActivationType.GEGLU: "geglu_tanh",
    ActivationType.REGLU: "reglu",
    ActivationType.RELU_SQ: "relu2",
    ActivationType.RELU: "relu",
    ActivationType.GELU: "gelu_tanh",
    ActivationType.SILU: "silu",
}
_BY_NAME = {kind.value: kind for kind in ActivationType} | {
    kind.name.lower(): kind for kind in ActivationType
}
_BY_NAME["gelu_tanh_approx"] = ActivationType.GELU


def is_glu(activation_type: ActivationType) -> bool:
    return activation_type in (ActivationType.SWIGLU, ActivationType.REGLU, ActivationType.GEGLU)


def activation(kind: ActivationType | str) -> str:
    """The library's name of an activation. `kind` is a member, or a member's value or name."""
    if isinstance(kind, str):
        kind = _BY_NAME.get(kind.lower(), kind)
    if not isinstance(kind, ActivationType):
        allowed = ", ".join(_BY_NAME)
        raise ValueError(f'activation_type is "{kind}", must be an ActivationType or: {allowed}')
    return MEANING[kind]
