"""Low-rank factors on the frozen experts of a transformers model: add, save, load, merge."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from ..lora import new_factors
from . import _peft_files
from ._hf_experts import (
    SAVED_WITH_FACTORS,
    experts_forward,
    experts_of,
    plan_of,
    up_name,
    weights_of,
)
from ._peft_files import Scaling

# The folder to which save_pretrained writes the factors. If they were in the model's directory
# itself, from_pretrained would load them through PEFT, if PEFT is installed.
FOLDER = "lora"
_FACTORS = {"up": ("up_a", "up_b"), "down": ("down_a", "down_b")}


def _check_call(module: nn.Module, _arguments) -> None:
    """Runs before the forward of experts with factors. Refuses calls that leave the factors out."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    kind, name = type(module).__name__, module.config._experts_implementation
    if name not in ALL_EXPERTS_FUNCTIONS or ALL_EXPERTS_FUNCTIONS[name] is not experts_forward:
        raise RuntimeError(
            f'experts_implementation is "{name}", which leaves out the low-rank factors of {kind}: '
            'must be "sonicmoe_cpp"'
        )
    if hasattr(module, "parametrizations"):
        raise RuntimeError(
            f"PEFT adapts parameters of {kind.removeprefix('Parametrized')}, which has factors of "
            "hf.add_lora, too: use one of the two (PEFT may adapt the modules of other layers)"
        )
    frozen = not any(p.requires_grad for p in module.lora.parameters())
    if frozen and module.training and torch.is_grad_enabled():
        warnings.warn(
            f"the low-rank factors of {kind} are frozen (PEFT's get_peft_model freezes all that is "
            "not its own): call hf.add_lora(the PeftModel) after it; after requires_grad_() on the "
            "factors instead, hf.save_lora alone saves them",
            stacklevel=2,
        )


def _found(model: nn.Module) -> dict[str, nn.Module]:
    modules = experts_of(model)
    if not modules:
        raise ValueError(f"{type(model).__name__} has no experts that transformers can replace")
    return modules


def _marked(modules: dict[str, nn.Module]) -> list:
    """The configs whose attribute says that factors were saved."""
    configs = {id(m.config): m.config for m in modules.values()}
    return [c for c in configs.values() if getattr(c, SAVED_WITH_FACTORS, False)]


def _base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PeftModel; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _warn_of_other_owner(model: nn.Module) -> None:
    """Warns if `model` is inside a PeftModel. Only save_pretrained of `model` and of models inside
    `model` writes the factors; save_pretrained of the PeftModel does not."""
    peft = sys.modules.get("peft")
    if peft is None or isinstance(model, peft.PeftModel):
        return
    adapted = any(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in model.modules())
    if adapted and not getattr(model, "_hf_peft_config_loaded", False):  # by model.add_adapter
        warnings.warn(
            f"{type(model).__name__} has adapters of PEFT, and save_pretrained of its PeftModel "
            "will leave out the low-rank factors: pass the PeftModel instead, or save them by "
            "hf.save_lora",
            stacklevel=3,
        )


def _adapted_names(module: nn.Module) -> dict[str, str]:
    """{"gate_up_proj": "up", "down_proj": "down"} in the order in which they are registered."""
    sides = {up_name(module): "up", "down_proj": "down"}
    return {n: sides[n] for n, _ in module.named_parameters(recurse=False) if n in sides}


def _attach(model: nn.Module, modules: dict[str, nn.Module], factors: list) -> None:
    for module, lora in zip(modules.values(), factors, strict=True):
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
        module.lora = lora
        module._sonicmoe_cpp_check = module.register_forward_pre_hook(_check_call)
    for owner in model.modules():
        if hasattr(owner, "save_pretrained") and hasattr(owner, "config") and experts_of(owner):
            owner.save_pretrained = types.MethodType(_save_pretrained, owner)


def add_lora(model: nn.Module, rank: int, alpha: float, *, dtype=None) -> list[str]:
    """Freezes every experts module of `model` and adds trainable low-rank factors to it.

    The factors are parameters of the experts: lora.up_a, lora.up_b, lora.down_a, lora.down_b, with
    scale = alpha / rank. dtype: the dtype of the factors; default: the weights' dtype. Other
    parameters are neither frozen nor unfrozen. Returns the modules' names. The model must run with
    experts_implementation="sonicmoe_cpp". Raises ValueError if the model has no experts, or has
    factors already, NotImplementedError if its experts cannot be computed.
    """
    modules = _found(model)
    for config in _marked(modules):
        path = getattr(config, "_name_or_path", "") or "DIRECTORY"
        raise ValueError(
            f"{type(model).__name__} was saved with low-rank factors, which are not loaded: call "
            f'hf.load_lora(model, "{path}"), or delete config.{SAVED_WITH_FACTORS} first'
        )
    factors = [_new(name, m, rank, alpha, dtype) for name, m in modules.items()]
    _warn_of_other_owner(model)
    _attach(model, modules, factors)
    return list(modules)


def _new(name: str, module: nn.Module, rank: int, alpha: float, dtype):
    if name.split(".")[-1] == "base_layer":
        raise ValueError(
            f"PEFT adapts parameters of {type(module).__name__} already: use one of the two"
        )
    precision = getattr(module, "_sonicmoe_cpp_precision", None)
    if precision is not None:
        raise NotImplementedError(
            f'precision is "{precision.precision}", low-rank factors need None: hf.set_precision()'
        )
    plan_of(module)  # refuses quantised weights and other experts that cannot be computed
    return new_factors(module, weights_of(module)[:2], rank, alpha, dtype)


def _scaling_of(modules: dict[str, nn.Module]) -> Scaling:
    for module in modules.values():
        if getattr(module, "lora", None) is None:
            raise ValueError(f"{type(module).__name__} has no low-rank factors")
    lora = next(iter(modules.values())).lora
    rank = lora.up_a.shape[1]
    return Scaling(rank, lora.scale * rank)


def _whole(name: str, module: nn.Module, factor: str, state: dict | None) -> Tensor:
    if state is not None and f"{name}.lora.{factor}" in state:
        return state[f"{name}.lora.{factor}"]
    value = getattr(module.lora, factor)
    if hasattr(value, "to_local"):
        raise ValueError(
            f"{name}.lora.{factor} is a DTensor: pass state_dict=, gathered on every rank"
        )
    return value


def save_lora(model: nn.Module, directory, *, state_dict: dict | None = None) -> None:
    """Writes the factors in PEFT's format, which load_lora and PEFT read.

    state_dict: a gathered state dict that has the factors, for a model whose parameters are
    sharded.
    """
    base = _base_model(model)
    modules = _found(base)
    scaling = _scaling_of(modules)
    factors = {}
    for name, module in modules.items():
        factors[name] = {
            parameter: tuple(_whole(name, module, f, state_dict) for f in _FACTORS[side])
            for parameter, side in _adapted_names(module).items()
        }
    path = getattr(getattr(base, "config", None), "_name_or_path", None)
    _peft_files.write(directory, factors, scaling, path or None)


@contextlib.contextmanager
def _marking(configs: list):
    for config in configs:
        setattr(config, SAVED_WITH_FACTORS, True)
    try:
        yield
    finally:
        for config in configs:
            delattr(config, SAVED_WITH_FACTORS)


def _save_pretrained(model: nn.Module, save_directory, *arguments, **options) -> None:
    """Runs the model's own save_pretrained and writes the factors to a separate folder, because
    from_pretrained drops parameters that the model's class does not have. An attribute of the
    config marks that the folder exists."""
    modules = experts_of(model)
    own = type(model).save_pretrained
    if all(getattr(m, "lora", None) is None for m in modules.values()):
        # merge_lora() was called with a model inside this one, so it has not removed this function.
        model.__dict__.pop("save_pretrained", None)
        own(model, save_directory, *arguments, **options)
        return
    configs = {id(m.config): m.config for m in modules.values()}
    given = inspect.signature(own).bind(model, save_directory, *arguments, **options).arguments
    given = given | given.get("kwargs", {})
    if given.get("push_to_hub"):
        raise ValueError(
            "push_to_hub is True, which would upload the model without its low-rank factors: save "
            "it, then upload the directory"
        )
    if given.get("is_main_process", True):  # refuses sharded factors before the model is written
        save_lora(model, Path(save_directory) / FOLDER, state_dict=given.get("state_dict"))
    with _marking(list(configs.values())):
        own(model, save_directory, *arguments, **options)


def load_lora(model: nn.Module, directory, *, dtype=None) -> list[str]:
    """As add_lora, with factors from `directory`, which save_lora, PEFT or save_pretrained wrote.
    dtype: the dtype of the factors; default: as in the file. Returns the modules' names. Raises
    FileNotFoundError if the directory has no factors, ValueError if they are not of this model.
    """
    folder = Path(directory) / FOLDER
    if not (folder / _peft_files.CONFIG).is_file():  # a PeftModel's directory has both
        folder = Path(directory)
    if not (folder / _peft_files.CONFIG).is_file():
        raise FileNotFoundError(
            f"{directory} has no {_peft_files.CONFIG}, neither itself nor in its folder {FOLDER}"
        )
    base = _base_model(model)
    modules = _found(base)
    wanted = {name: list(_adapted_names(m)) for name, m in modules.items()}
    read, scaling = _peft_files.read(folder, wanted)
    marked = _marked(modules)
    for config in marked:
        delattr(config, SAVED_WITH_FACTORS)
    try:
        factors = [
            _filled(name, m, read[name], scaling, dtype or next(iter(read[name].values()))[0].dtype)
            for name, m in modules.items()
        ]
    except BaseException:
        for config in marked:
            setattr(config, SAVED_WITH_FACTORS, True)
        raise
    _warn_of_other_owner(model)
    _attach(model, modules, factors)
    return list(modules)


def _filled(name: str, module: nn.Module, read: dict, scaling: Scaling, dtype):
    lora = _new(name, module, scaling.rank, scaling.alpha, dtype)
    for parameter, side in _adapted_names(module).items():
        for factor, value in zip(_FACTORS[side], read[parameter], strict=True):
            have = getattr(lora, factor)
            if have.shape != value.shape:
                raise ValueError(
                    f"{factor} of {name} has shape {tuple(value.shape)} in the file, must be "
                    f"{tuple(have.shape)}"
                )
            with torch.no_grad():
                have.copy_(value)
    return lora


def merge_lora(model: nn.Module) -> list[str]:
    """Adds scale * B A to the experts' weights, rounded once, and removes the factors.

    The weights stay frozen. Returns the modules' names.
    """
    modules = _found(_base_model(model))
    _scaling_of(modules)
    for module in modules.values():
        for weight, (a, b, scale) in zip(
            weights_of(module)[:2], module.lora().values(), strict=True
        ):
            _add_product(weight, a, b, scale)
        del module.lora
        module._sonicmoe_cpp_check.remove()
        del module._sonicmoe_cpp_check
    for owner in model.modules():
        owner.__dict__.pop("save_pretrained", None)
    return list(modules)


@torch.no_grad()
def _add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    wide = torch.promote_types(weight.dtype, torch.float32)
    for w, a_e, b_e in zip(weight, a, b, strict=True):  # one expert at a time: W in fp32 is large
        w.copy_(w.to(wide) + scale * (b_e.to(wide) @ a_e.to(wide)))
