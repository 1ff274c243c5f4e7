"""Low-rank factors of a transformers model's experts. They are PEFT's own: LoraConfig with
target_parameters makes, names, switches, saves, loads and merges them. This file only hands them to
the experts, which compute lora_moe() instead of forming W + B A."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import signal
import threading
import warnings
from importlib import metadata

import torch
from torch import Tensor, nn

from .. import _checks
from ..lora import LowRank
from . import _hf_packed
from ._hf_experts import (
    FACTORS,
    TRANSPOSED,
    experts_of,
    is_computed_here,
    is_experts,
    plan_of,
    up_name,
)

# The release whose ParamWrapper is known. With another one PEFT forms W + B A, which is as correct.
PEFT = "0.21."


def _is_known() -> bool:
    return metadata.version("peft").startswith(PEFT)


def _weight(linear: nn.Module) -> Tensor:
    """The weight of a module that is not called. accelerate brings an offloaded one back for calls
    only, so its hook is run here."""
    hook = getattr(linear, "_hf_hook", None)
    if not getattr(hook, "offload", False):
        if linear.weight.is_meta:
            raise ValueError(
                "low-rank factors are on the meta device, where PEFT put them beside offloaded "
                "experts: load them before the model is offloaded"
            )
        return linear.weight
    if linear.training and linear.weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "low-rank factors are offloaded, so they would not be trained: accelerate frees what "
            "it brings back, with its gradient (for evaluation call model.eval())"
        )
    hook.pre_forward(linear)
    weight = linear.weight
    hook.post_forward(linear, None)
    return weight


def _replace(kind: type, name: str, make) -> None:
    """Replaces a method by make(method), once."""
    method = getattr(kind, name)
    if not hasattr(method, "_sonicmoe_cpp"):
        new = functools.wraps(method)(make(method))
        new._sonicmoe_cpp = True
        setattr(kind, name, new)


def _factors_of(wrapper, adapter: str) -> LowRank:
    """PEFT keeps the factors of all experts in two matrices: lora_A (E*r, in), whose rows are
    ordered by (expert, rank), and lora_B (out, r*E), its columns ordered by (rank, expert). PEFT
    takes the weights of adopted experts, (E, in, out), for (E, out, in): there lora_A has the
    layer's B, and lora_B its A."""
    experts = wrapper.num_experts
    a, b = _weight(wrapper.lora_A[adapter]), _weight(wrapper.lora_B[adapter])
    a = a.reshape(experts, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, experts)
    if getattr(wrapper.get_base_layer(), TRANSPOSED, False):
        a, b = b.permute(2, 1, 0).contiguous(), a.transpose(1, 2).contiguous()
    else:
        b = b.permute(2, 0, 1).contiguous()
    return LowRank(a, b, wrapper.scaling[adapter])


def _sum_of(terms: list[LowRank]) -> LowRank:
    if len(terms) == 1:
        return terms[0]
    b = torch.cat([t.b * t.scale for t in terms], dim=2)
    return LowRank(torch.cat([t.a for t in terms], dim=1), b)


def _takes_factors(wrapper) -> bool:
    """Whether the wrapped experts compute with the factors themselves. Otherwise, for example if
    the experts are trained too, PEFT gives them W + B A as their weight."""
    module = wrapper.get_base_layer()
    if not is_experts(module) or wrapper.parameter_name not in (up_name(module), "down_proj"):
        return False
    if hasattr(module, "parametrizations") or not is_computed_here(module):
        return False
    parameters = list(module.parameters(recurse=False))
    return not any(p.requires_grad or _checks.is_distributed(p) for p in parameters)


def _refuse_packed(wrapper) -> None:
    if isinstance(wrapper.get_param(), _hf_packed.PackedTensor):
        raise NotImplementedError(
            f"{wrapper.parameter_name} is packed, and only sonicmoe_cpp computes factors on packed "
            'experts: call set_experts_implementation("sonicmoe_cpp"), or hf.unpack_experts(model)'
        )


def _handing_over(fold):
    """Instead of ParamWrapper._activate_lora, which changes a parameter during forward. It runs
    only for active, enabled and unmerged adapters."""

    @contextlib.contextmanager
    def activate(self, active_adapters):
        adapters = [a for a in active_adapters if a in self.lora_A]
        if not adapters or not _takes_factors(self):
            _refuse_packed(self)
            with fold(self, active_adapters):
                yield
            return
        # A stack, because threads may compute with one module at the same time.
        factors = self.get_base_layer().__dict__.setdefault(FACTORS, {})
        stack = factors.setdefault(self.parameter_name, [])
        stack.append(_sum_of([_factors_of(self, a) for a in adapters]))
        try:
            yield
        finally:
            stack.pop()

    return activate


@contextlib.contextmanager
def _uninterrupted():
    """Delays Ctrl-C to the end of the block. Only the main thread gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = []
    before = signal.signal(signal.SIGINT, lambda *_: caught.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)


def _merging_whole(merge):
    """ParamWrapper.merge adds to the weight in place and records it afterwards: an interrupt or an
    error between them would let the next merge add again."""

    def merge_whole(self, safe_merge=False, adapter_names=None):
        with _uninterrupted():
            base = self.get_base_layer()
            safe_merge = safe_merge or is_experts(base)
            _hf_packed.unpack_parameter(base, self.parameter_name)
            merge(self, safe_merge=safe_merge, adapter_names=adapter_names)

    return merge_whole


def _unmerging_whole(unmerge):
    def unmerge_whole(self):
        with _uninterrupted():
            unmerge(self)

    return unmerge_whole


def _refusing_a_second_adapter(init):
    """A second PeftModel around experts with factors would save the factors, but its config would
    not name them, so that they would not be loaded."""

    def refuse(self, model, *arguments, **options):
        if _has_factors(model):
            raise ValueError(
                f"the experts of {type(model).__name__} have low-rank factors already, which a "
                "second adapter's config would not name: unload() first, or adapt other layers by "
                "hf.add_lora(..., target_modules=)"
            )
        for module in experts_of(model).values():
            _hf_packed.keep_packed(module, (up_name(module), "down_proj"))
        init(self, model, *arguments, **options)

    return refuse


def _refusing_mixed_batches(enable_hooks):
    """PEFT refuses them too, but inside of the experts' forward. Its hooks then stay on the model,
    so that all later calls fail."""

    def enable(self, *arguments, **options):
        if options.get("adapter_names") is not None and _has_factors(self.get_base_model()):
            raise ValueError(
                "adapter_names is given, but experts compute all rows with the same adapters: call "
                "set_adapter(name) and the model once for the rows of each adapter"
            )
        return enable_hooks(self, *arguments, **options)

    return enable


def adopt_factors() -> None:
    """Replaces methods of PEFT, so that its factors of experts are computed without W + B A."""
    try:
        from peft import PeftModel
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError:
        return
    if _is_known():
        _replace(ParamWrapper, "_activate_lora", _handing_over)
        _replace(ParamWrapper, "merge", _merging_whole)
        _replace(ParamWrapper, "unmerge", _unmerging_whole)
        _replace(PeftModel, "__init__", _refusing_a_second_adapter)
        _replace(PeftModel, "_enable_peft_forward_hooks", _refusing_mixed_batches)


# ---- saving --------------------------------------------------------------------------------------


def _has_factors(model: nn.Module) -> bool:
    return any(name.endswith("base_layer") for name in experts_of(model))


def _saving_factors(save):
    """A model whose experts PEFT has wrapped, and which is inside a PeftModel or around one, would
    be written under names that from_pretrained does not find. It is saved as transformers saves a
    model with an adapter: in PEFT's format."""

    def saving(self, *arguments, **options):
        if getattr(self, "_hf_peft_config_loaded", False):
            return save(self, *arguments, **options)
        if not _has_factors(self):
            if _hf_packed.has_packed(self):
                raise ValueError(
                    f"the experts of {type(self).__name__} are packed: call "
                    "hf.unpack_experts(model) before save_pretrained"
                )
            return save(self, *arguments, **options)
        configs = {id(c): c for m in self.modules() if (c := vars(m).get("peft_config"))}
        if len(configs) != 1:
            raise ValueError(
                f"{len(configs)} parts of {type(self).__name__} have adapters of their own: save "
                "each by the save_pretrained of its PeftModel"
            )
        warnings.warn(
            f"{type(self).__name__} is not the PeftModel of its low-rank factors: they are saved "
            "in PEFT's format, but Trainer resumes and reloads only the PeftModel (hf.add_lora "
            "returns it)",
            stacklevel=2,
        )
        before = dict(vars(self))
        (self.peft_config,) = configs.values()
        self._hf_peft_config_loaded = True
        try:
            return save(self, *arguments, **options)
        finally:
            for name in {"peft_config", "_hf_peft_config_loaded"} - before.keys():
                delattr(self, name)

    return saving


def save_factors_of_parts() -> None:
    from transformers import PreTrainedModel

    _replace(PreTrainedModel, "save_pretrained", _saving_factors)


# ---- add_lora ------------------------------------------------------------------------------------


def _targets(modules: dict[str, nn.Module]) -> list[str]:
    """What target_parameters takes: the names without the layers' numbers, as far as possible."""
    found = set()
    for name, module in modules.items():
        short = re.sub(r".*\.\d+\.", "", name)
        found |= {f"{short}.{p}" for p in (up_name(module), "down_proj")}
    return sorted(found)


def _check_owner(model: nn.Module, targets: list[str]) -> None:
    """Refuses a model that PEFT has adapted already: its config would lack the experts."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(m, BaseTunerLayer) for m in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has adapters of PEFT already: pass its PeftModel, or give "
            f"target_parameters={targets} to the LoraConfig of the adapter"
        )


def _check(model: nn.Module, modules: dict[str, nn.Module], rank: int, alpha: float) -> None:
    kind = type(model).__name__
    _checks.integer("rank", rank)
    _checks.finite("alpha", alpha)
    if rank < 1:
        raise ValueError(f"rank is {rank}, must be at least 1")
    if not modules:
        raise ValueError(f"{kind} has no experts that transformers can replace")
    if _has_factors(model):
        raise ValueError(f"the experts of {kind} have low-rank factors already: unload() first")
    for name, module in modules.items():
        plan_of(module)  # refuses quantised weights and other experts that cannot be computed
        for parameter, value in module.named_parameters(recurse=False):
            if _checks.is_distributed(value):
                raise ValueError(
                    f"{name}.{parameter} is a DTensor: add_lora must come before fully_shard and "
                    "every other distribution of the model"
                )
            if value.is_meta:
                raise ValueError(
                    f"{name}.{parameter} is on the meta device, not loaded or offloaded: add_lora "
                    "must come after loading and before offloading"
                )


def _with_patterns(patterns: dict, targets: list[str], value) -> dict:
    """PEFT's rank_pattern or alpha_pattern with the value for all targets."""
    from peft.utils.other import get_pattern_key

    # The first pattern that matches holds, and the file has them sorted.
    own = {re.escape(target): value for target in targets}
    found = dict(sorted((patterns | own).items()))
    for target in targets:
        key = get_pattern_key(found, target)
        if found[key] != value:
            raise ValueError(
                f"the adapter's pattern {key} of rank or alpha ({found[key]}) holds for {target}, "
                f"too, which must have {value}"
            )
    return found


def _extend(model, targets: list[str], rank: int, alpha: float, cast: bool) -> None:
    """Adds the experts to the only adapter of a PeftModel, so that one file and one config have all
    of it. PEFT has no public function for this."""
    if not _is_known() or len(model.peft_config) != 1 or model.base_model.prefix != "lora_":
        raise ValueError(
            "the PeftModel must have one adapter, of LoRA, made by PEFT 0.21: otherwise pass "
            f"target_parameters={targets} to its own LoraConfig"
        )
    (name,) = model.peft_config
    before = model.peft_config[name]
    config = copy.deepcopy(before)
    config.target_parameters = sorted({*(config.target_parameters or ()), *targets})
    config.rank_pattern = _with_patterns(config.rank_pattern, targets, rank)
    config.alpha_pattern = _with_patterns(config.alpha_pattern, targets, alpha)
    tuner = model.base_model
    model.peft_config[name] = config
    try:
        tuner._inject_parameters(config, tuner.model, name, low_cpu_mem_usage=False)
    except BaseException:
        if not _has_factors(model):
            model.peft_config[name] = before
        raise
    tuner._cast_adapter_dtype(name, autocast_adapter_dtype=cast)


def _say(model: nn.Module, count: int) -> None:
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained, every = sum(n for n, t in sizes if t), sum(n for n, _ in sizes)
    print(
        f"hf.add_lora: {trained:,} of {every:,} parameters are trained "
        f"({sum(t for _, t in sizes)} of {len(sizes)} tensors), among them the low-rank factors of "
        f"{count} experts modules; all others are frozen"
    )


def add_lora(model, rank: int, alpha: float, *, autocast_adapter_dtype: bool = True, **options):
    """Adds trainable low-rank factors to all experts of `model`, in place, and freezes everything
    else. Returns the peft.PeftModel: train and save this one.

    A short form of get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=[],
    target_parameters=..., **options)). `options` are those of LoraConfig: target_modules adapts
    other layers in the same adapter, modules_to_save trains whole modules. The factors are fp32
    beside half-precision weights, unless autocast_adapter_dtype is False. If `model` is a PeftModel
    with one adapter, its adapter gets the experts too, and its other options hold. Prints what is
    trained.

    Raises ImportError without PEFT; ValueError if the model has no experts or has factors already,
    or if its weights are distributed or not loaded; NotImplementedError if its experts cannot be
    computed.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"hf.add_lora needs PEFT 0.21: {error}") from error
    modules = experts_of(model)
    _check(model, modules, rank, alpha)
    if not _is_known():
        warnings.warn(
            f"PEFT {peft.__version__} is not 0.21, so it will form W + B A of all experts in every "
            "forward, which is slower",
            stacklevel=2,
        )
    if isinstance(model, peft.PeftModel):
        if options:
            raise ValueError(
                f"{', '.join(options)} cannot be given for a PeftModel, which has a LoraConfig"
            )
        base = experts_of(model.get_base_model())
        _extend(model, _targets(base), rank, alpha, autocast_adapter_dtype)
    else:
        targets = _targets(modules)
        _check_owner(model, targets)
        options = {"target_modules": [], "target_parameters": targets} | options
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, **options)
        cast = {"autocast_adapter_dtype": autocast_adapter_dtype}
        model = peft.get_peft_model(model, config, **cast)
    _say(model, len(modules))
    return model
