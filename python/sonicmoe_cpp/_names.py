"""The names that users write, with the numbers of sonicmoe/c_api.h, which operators take.

Operators take no strings, because torch's C++ header never frees a string argument.
"""

FORM = {"ids": 0, "pairs": 1, "grouped": 2}
ACTIVATION = {
    "swiglu": 0,
    "swiglu_oai": 1,
    "geglu": 2,
    "geglu_tanh": 3,
    "reglu": 4,
    "silu": 5,
    "gelu": 6,
    "gelu_tanh": 7,
    "relu": 8,
    "relu2": 9,
    "swiglu_clamped": 10,
    "situ": 11,
    "swiglu_step": 12,
}
GATED = (
    *("swiglu", "swiglu_oai", "geglu", "geglu_tanh", "reglu"),
    *("swiglu_clamped", "situ", "swiglu_step"),
)
UNGATED = tuple(name for name in ACTIVATION if name not in GATED)
LAYOUT = {"concatenated": 0, "interleaved": 1}  # views.h
# The operators' argument `precision`: products in the tensors' dtype, products in fp8, or products
# in fp8 with H kept in bf16.
PRECISION = {"tensors": 0, "fp8": 1, "fp8_keeps_bf16": 2}  # layer.h
PACKED = {"nf4": 0, "mxfp4": 1, "fp8_blocks": 2}  # packed.h
SCORE = {"softmax_after_topk": 0, "softmax_before_topk": 1, "sigmoid": 2, "sqrt_softplus": 3}
POINTWISE = ("sigmoid", "sqrt_softplus")  # of the expert's own logit: these take a bias
ROUNDING = {"nearest": 0, "up": 1, "down": 2, "score": 3, "stochastic": 4, "balanced": 5}
