"""Implements precision="fp8" and "auto": quantised weights, the choice of a call's precision, and a
module's cache of quantised weights. docs/fp8.md has the formulas."""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _checks, _ops
from ._call import Call, Fp8
from ._fakes import GATED_NUMBERS
from ._names import ACTIVATION, GATED, LAYOUT, PRECISION
from ._weights import LAYOUTS, activation_of, check_weights, gate_and_up

PRECISIONS = ("fp8", "auto")
KEEP_H = ("bf16",)
NEVER = 1 << 48  # more rows than any call has


class Fp8Weights(NamedTuple):
    """Weights of one layer in e4m3 with block scales: the result of quantize_weights()."""

    codes: Tensor  # (bytes,) uint8: codes in two orientations, and scales
    experts: int
    gates: int  # 2 with a gate, else 1
    width: int
    hidden: int


class Request(NamedTuple):
    """The arguments of a call that concern the precision."""

    precision: str | None = None
    keep_h: str | None = None
    # Fp8Weights, None, or a function that returns Fp8Weights or None. The function is called only
    # if the call computes in fp8.
    fp8_weights: object = None

    def quantisations(self) -> int:
        """How often a micro-batch quantises the weights at most: twice (in forward and in backward)
        if the call gets no quantised weights, else once."""
        return 2 if self.fp8_weights is None else 1


NOTHING = Request()


def request_of(precision, keep_h, fp8_weights) -> Request:
    if precision is None and keep_h is None and fp8_weights is None:
        return NOTHING
    return Request(precision, keep_h, fp8_weights)


def check_request(precision, keep_h) -> None:
    for name, value, allowed in (
        ("precision", precision, PRECISIONS),
        ("keep_h", keep_h, KEEP_H),
    ):
        if value is not None and value not in allowed:
            known = ", ".join(f'"{a}"' for a in allowed)
            raise ValueError(f"{name} is {value!r}, must be None or one of: {known}")
    if precision is None and keep_h is not None:
        raise ValueError(f"keep_h is {keep_h!r}, must be None: precision is None")


def _auto_rows(device: torch.device, dtype, activation: int, *sizes: int) -> int:
    like = torch.empty((1, 1, 1), dtype=dtype, device=device).expand(sizes)
    return _ops.run("auto_fp8_rows", like, activation)


def _constant_auto_rows(*arguments) -> int:
    return _auto_rows(*arguments)


# torch.compiler.assume_constant_result() sets the same attribute, but imports the compiler.
_constant_auto_rows._dynamo_marked_constant = True


def auto_rows(w_down, activation: int):
    """The smallest row capacity for which "auto" takes fp8; infinite on the meta device. w_down is
    a tensor or its Facts."""
    if w_down.device.type == "meta":
        return math.inf
    if not torch.compiler.is_compiling():
        return _auto_rows(w_down.device, w_down.dtype, activation, *w_down.shape)
    # Dynamo may see the weights' sizes as symbolic. range() makes it specialise on their values.
    experts, hidden, width = w_down.shape
    sizes = range(experts).stop, range(hidden).stop, range(width).stop
    return _constant_auto_rows(w_down.device, w_down.dtype, activation, *sizes)


def number_of(precision, keep_h, rows: int, w_down, activation: int, quantisations: int) -> int:
    """The operators' argument `precision` (a number) for a call whose row capacity is `rows`.
    "auto" takes fp8 if rows >= quantisations * auto_rows(), because a quantisation takes about as
    long as fp8 saves on auto_rows() rows. `quantisations` is from Request.quantisations()."""
    check_request(precision, keep_h)
    if precision == "auto" and rows < quantisations * auto_rows(w_down, activation):
        precision = None
    if precision is None:
        return PRECISION["tensors"]
    return PRECISION["fp8" if keep_h is None else "fp8_keeps_bf16"]


def capacity(form: str, x, index):
    """The row capacity of a call: the largest number of rows that it can have."""
    if form == "grouped":
        return x.shape[0]
    rows = 1
    for size in index.shape:
        rows = rows * size
    return rows


def given_weights(request: Request, call: Call) -> Tensor | None:
    """Checks a call's quantised weights and returns their codes. Returns None if the call does not
    compute in fp8, or if the operator must quantise the weights."""
    weights = request.fp8_weights
    if call.options.precision == PRECISION["tensors"]:
        if weights is not None and request.precision is None:
            raise ValueError("fp8_weights is given, must be None: precision is None")
        return None
    if weights is not None and not isinstance(weights, Fp8Weights) and callable(weights):
        weights = weights()
    if weights is None:
        return None
    if not isinstance(weights, Fp8Weights):
        raise TypeError(
            f"fp8_weights is {type(weights).__name__}, must be what quantize_weights() returned"
        )
    w_down = call.tensors.w_down
    experts, hidden, width = w_down.shape
    gates = 2 if call.options.activation in GATED_NUMBERS else 1
    if tuple(weights[1:]) != (experts, gates, width, hidden):
        raise ValueError(
            f"fp8_weights are of (E, G, n, d) = {tuple(weights[1:])}, must be of "
            f"{(experts, gates, width, hidden)} as w_up and w_down"
        )
    _checks.tensor("fp8_weights.codes", weights.codes)
    _checks.on_device("fp8_weights", weights.codes, w_down)
    return weights.codes


def over_ranks(request: Request, call: Call, lists: int = 1) -> Call:
    """The call, made with precision "fp8" if the request's is "auto", with what the ranks need to
    choose the precision and to compute in it."""
    if request.precision is None:
        given_weights(request, call)  # refuses weights without a precision
        return call
    least, weights = 0, request.fp8_weights
    if request.precision == "auto":
        least = request.quantisations() * auto_rows(call.tensors.w_down, call.options.activation)
    if callable(weights):
        weights = functools.partial(given_weights, request, call)
    else:
        weights = given_weights(request, call)
    return call._replace(fp8=Fp8(min(least, NEVER), weights, lists))


def quantize_weights(
    w_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    activation="swiglu",
    gate_layout: str = "concatenated",
) -> Fp8Weights:
    """Quantises the weights of a layer to e4m3, for the argument fp8_weights of moe(), moe_pairs()
    and moe_grouped() with precision="fp8" or "auto". Call it again after w_up or w_down have
    changed. w_up and w_down are as in moe(). Raises NotImplementedError unless they are bf16, and d
    and n multiples of 64; other errors as in moe()."""
    w_gate, w_up = gate_and_up("w_up", w_up)
    name = activation_of(activation).name
    _checks.one_of("gate_layout", gate_layout, LAYOUTS)
    for what, value in (("w_up", w_up), ("w_down", w_down)):
        _checks.tensor(what, value)
    _checks.shape("w_down", w_down, "(E, d, n)", (None, None, None))
    _checks.supported(w_down.device)
    experts, hidden, width = w_down.shape
    facts = [
        None if t is None else _checks.Facts(t.dtype, t.device, t.shape)
        for t in (w_gate, w_up, w_down)
    ]
    check_weights(hidden, [*facts, None, None], name in GATED, facts[2])
    with torch.inference_mode(False), torch.no_grad():  # backward may read the codes
        codes = _ops.run(
            "quantize_weights", w_gate, w_up, w_down, ACTIVATION[name], LAYOUT[gate_layout]
        )
    return Fp8Weights(codes, experts, 2 if name in GATED else 1, width, hidden)


# ---- the cache of a module -----------------------------------------------------------------------


class _Steps:
    """Counts the steps of all optimizers. Some optimizers write to `parameter.data`, which does not
    change the version counter of the parameter. So the cache compares this count too."""

    count = 0


def _count_step(*_) -> None:
    _Steps.count += 1


register_optimizer_step_post_hook(_count_step)


def _parts_of(parameter: Tensor) -> tuple:
    """The tensors whose version counters show a change of a parameter: the parameter, and the local
    part of a DTensor, which can be changed without a change of the DTensor's version."""
    local = (parameter._local_tensor,) if _checks.is_distributed(parameter) else ()
    return (parameter, *local)


def _memory_of(tensor: Tensor) -> tuple:
    """The storage and address of a tensor; () for a DTensor, which has none. While the weak
    reference lives, no other storage gets the same key, even at the same address."""
    if _checks.is_distributed(tensor):
        return ()
    return StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr()


class Fp8Cache:
    """Keeps the quantised weights of a module until the parameters change. `names` are the names of
    the parameters in the module, which keeps its caches in the dictionary module._fp8."""

    def __init__(self, *names: str):
        self.names = names
        self.captured = False  # a CUDA graph that uses the parameters was captured
        self.sharded = None  # FSDP2's objects of the sharded parameters; see share_fp8_weights()
        self.forget()

    def forget(self) -> None:
        self._seen: tuple = ()
        self._state: tuple = ()
        self._quantised: Fp8Weights | None = None

    def _watched(self, parameters: tuple) -> tuple:
        """The tensors that show a change of the parameters. FSDP2 gathers a parameter without a
        change of its version, so with share_fp8_weights() the sharded parameters are watched."""
        if self.sharded is not None:
            parameters = [p.sharded_param for p in self.sharded]
        return tuple(part for p in parameters for part in _parts_of(p))

    def _state_of(self, watched: tuple, device: torch.device) -> tuple:
        """A key that changes with every change of the parameters that the module can see: an
        optimizer's step, a change in place, or other memory. A write to `parameter.data` outside
        of an optimizer does not change the key: call MoE.forget_fp8_weights() after it. The CUDA
        stream is a part of the key, because work on another stream would not wait until the
        quantised weights are written."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return _Steps.count, stream, *((t._version, _memory_of(t)) for t in watched)

    def __deepcopy__(self, memo) -> Fp8Cache:
        return Fp8Cache(*self.names)  # a copy of the module has parameters of its own

    def __reduce__(self):
        return Fp8Cache, self.names

    def get(self, parameters: tuple, weights: tuple, dtype: torch.dtype, **style) -> Fp8Weights:
        """The quantised weights. `weights` are w_up and w_down for quantize_weights(): views or
        casts of `parameters`. They are cast to `dtype` before they are quantised. `style` are the
        keyword arguments of quantize_weights()."""
        watched = self._watched(parameters)
        state = dtype, style, *self._state_of(watched, parameters[0].device)
        seen = (*parameters, *watched)
        same = len(self._seen) == len(seen) and all(map(operator.is_, self._seen, seen))
        if not same or state != self._state:
            # Autograd refuses to save tensors made in inference mode for a later backward.
            with torch.inference_mode(False), torch.no_grad():
                cast = [_cast(t, dtype) for t in weights]
                self._quantised = quantize_weights(*cast, **style)
            # Not weak references: with one, torch refuses to swap a parameter's contents, which
            # Module.to() and load_state_dict() do with DTensors.
            self._seen = seen
            self._state = state
        return self._quantised


def _cast(weights: Tensor | tuple, dtype: torch.dtype):
    if isinstance(weights, tuple):
        return tuple(_cast(t, dtype) for t in weights)
    return weights.detach().to(dtype)


def _is_traced() -> bool:
    """Whether make_fx() traces the call, or tensors are fake and have no values."""
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(k) is not None for k in (kinds.PROXY, kinds.FAKE))


def is_cached(module: nn.Module, weights: tuple, cache: Fp8Cache) -> bool:
    """Whether a module may keep its quantised weights from one call to the next. It may not

    - under FSDP2 or DeepSpeed, which gather the weights for each use: a gather does not change the
      version counter, and the quantised copy would occupy memory after the gathered weights are
      freed (share_fp8_weights() allows it for FSDP2);
    - inside a graph of torch.compile, make_fx() or CUDA: replays would use the values from the
      capture;
    - after a CUDA graph capture: a replay can change parameters without a change of version;
    - if a weight is not an nn.Parameter, or is a tensor made in inference mode.
    """
    if torch.compiler.is_compiling() or _is_traced():
        return False
    gathered = getattr(module, "_is_fsdp_managed_module", False) and cache.sharded is None
    for t in weights:
        gathered |= not isinstance(t, nn.Parameter) or t.is_inference() or hasattr(t, "ds_id")
    if gathered:
        cache.forget()  # of the time before: the cache must not keep replaced parameters
        return False
    if weights[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        cache.captured = True
        cache.forget()
    return not cache.captured


def kept_weights(module: nn.Module, name: str, weights: tuple, dtype, style: dict) -> dict:
    """The option fp8_weights of moe() for a module with the cache module._fp8[name]; {} if the
    module may not keep quantised weights. The other arguments are those of Fp8Cache.get()."""
    cache = module._fp8[name]
    parameters = tuple(getattr(module, n) for n in cache.names)
    if not is_cached(module, parameters, cache):
        return {}
    return {"fp8_weights": functools.partial(cache.get, parameters, weights, dtype, **style)}


def caches_of(module: nn.Module) -> list[Fp8Cache]:
    caches = getattr(module, "_fp8", None)
    if not isinstance(caches, dict):  # a module of other code
        return []
    return [cache for cache in caches.values() if isinstance(cache, Fp8Cache)]


def share_fp8_weights(model: nn.Module) -> None:
    """Lets the experts of a model keep their quantised weights between micro-batches under
    fully_shard: those of MoE, of Hugging Face models and of torchtitan's overrides. Call it after
    fully_shard, and after hf.set_precision().

    Without this call, weights are quantised in each forward and each backward. With it, every rank
    holds the quantised weights of whole layers, 2 (G+1) E n d bytes a layer (n and d rounded up to
    multiples of 128), also after the gathered bf16 weights are freed.
    """
    from torch.distributed.fsdp import FSDPModule

    found = {}
    for part in model.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.12 has one group
            for group in (state._fsdp_param_group,) if groups is None else groups:
                for p in () if group is None else group.fsdp_params:
                    found[p._module_info.module, p._module_info.param_name] = p
    for part in model.modules():
        for cache in caches_of(part):
            sharded = [found.get((part, name)) for name in cache.names]
            cache.sharded = None if None in sharded else tuple(sharded)
            cache.forget()
