"""Packs the experts of transformers' models, when they are loaded or afterwards."""

from __future__ import annotations

import functools
import math

from torch import Tensor, nn

from .. import _checks, packed
from ._hf_experts import experts_of, identity_experts, is_transposed, plan_of, up_name
from ._hf_packed import keep_packed, packed_of, parameter_of, unpack_parameter


def checked_names(model: nn.Module) -> list[str]:
    """The names of the parameters of experts; refuses experts that cannot be packed."""
    experts = experts_of(model)
    if not experts:
        raise ValueError(f"{type(model).__name__} has no experts that transformers can replace")
    names = []
    for name, module in experts.items():
        plan_of(module)
        if identity_experts(module):
            raise NotImplementedError(f"{name} has identity experts, which cannot be packed")
        names += [f"{name}.{parameter}" for parameter in (up_name(module), "down_proj")]
    return names


def _parameter(module: nn.Module, weights: packed.PackedWeights) -> nn.Parameter:
    """Packed weights (E, out, in) as the parameter that the module stores."""
    parameter = parameter_of(weights.mT if is_transposed(module) else weights)
    parameter._is_hf_initialized = True  # initialize_weights() of a model leaves it
    return parameter


def _pack(module: nn.Module, value: Tensor, format: str, options: dict) -> nn.Parameter:
    stored = value.mT if is_transposed(module) else value
    return _parameter(module, packed.pack(stored, format, **options))


def set_packed(model: nn.Module, make) -> None:
    """Replaces every weight of the experts by make(name, shape): PackedWeights of this shape, (E,
    out, in). The weights may be on the meta device, so that they never exist unpacked."""
    for name in checked_names(model):
        path, _, parameter = name.rpartition(".")
        module = model.get_submodule(path)
        value = getattr(module, parameter)
        shape = value.mT.shape if is_transposed(module) else value.shape
        weights = make(name, shape)
        if weights.shape != shape:
            raise ValueError(
                f"{name} was made with shape {tuple(weights.shape)}, must have {tuple(shape)}"
            )
        setattr(module, parameter, _parameter(module, weights))


def _check(model: nn.Module, name: str, format: str, options: dict) -> None:
    module, value = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    if packed_of(module, name.rpartition(".")[2]) is not None:
        raise ValueError(f"{name} is packed already")
    if _checks.is_distributed(value) or value.is_meta:
        state = "on the meta device" if value.is_meta else "a DTensor"
        raise ValueError(f"{name} is {state}: pack experts after loading and before sharding")
    # One row checks format, options, dtype and size.
    inner = value.shape[1 if is_transposed(module) else 2]
    packed.pack(value.new_zeros((1, 1, inner)), format, **options)
    low, high = value.detach().aminmax()  # NaN if any value is
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} has NaN or infinite values, must be finite")


def quantize_experts(model: nn.Module, format: str, **options) -> None:
    """Packs the experts of a loaded model in 4 bits, in place and one parameter after another:
    "nf4" (options: block=64, nested=False) or "mxfp4", as sonicmoe_cpp.packed.pack(). They are
    frozen then: train low-rank factors on them (add_lora). Call it before an optimizer is made.

    Raises ValueError if the model has no experts, or if they are packed, distributed, not loaded or
    not finite;
    NotImplementedError if they cannot be computed. Nothing is changed then.
    """
    names = checked_names(model)
    for name in names:
        _check(model, name, format, options)
    for name in names:
        path, _, parameter = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(
            module, parameter, _pack(module, getattr(module, parameter).detach(), format, options)
        )


def unpack_experts(model: nn.Module) -> None:
    """Replaces packed weights of experts by the tensors that they stand for, in place."""
    for module in experts_of(model).values():
        keep_packed(module, (up_name(module), "down_proj"))
        for name in (up_name(module), "down_proj"):
            unpack_parameter(module, name)


# ---- at load -------------------------------------------------------------------------------------

METHOD = "sonicmoe_cpp"
METHOD_OF_BOTH = "sonicmoe_cpp_and_bitsandbytes"


def _packing(quantizer):
    """The step of transformers' loader that packs a parameter of experts, one layer at a time."""
    from transformers.core_model_loading import ConversionOps

    class Pack(ConversionOps):
        def convert(self, input_dict, model=None, **_):
            done = {}
            for name, value in input_dict.items():
                value = value[0] if isinstance(value, list) else value
                module = model.get_submodule(name.rpartition(".")[0])
                config, dtype = quantizer.quantization_config, model.get_parameter(name).dtype
                done[name] = _pack(module, value.to(dtype), config.format, config.options)
            return done

    return Pack()


def _reading_mxfp4(quantizer):
    """The step of the loader that keeps blocks and scales of a gpt-oss checkpoint."""
    from transformers.core_model_loading import ConversionOps

    class Read(ConversionOps):
        def convert(self, input_dict, model=None, full_layer_name=None, **_):
            parts = {
                key.rpartition("_")[2]: value[0] if isinstance(value, list) else value
                for key, value in input_dict.items()
            }
            reference = model.get_parameter(full_layer_name)
            blocks, scales = parts.get("blocks"), parts.get("scales")
            weights = packed.from_mxfp4(blocks, scales, dtype=reference.dtype)
            return {full_layer_name: parameter_of(weights.mT)}

    return Read()


@functools.cache
def _of_both() -> tuple[type, type]:
    """A config and a quantiser that pack experts here and linear layers by bitsandbytes."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.utils.quantization_config import BitsAndBytesConfig

    class ExpertsAndLinearConfig(BitsAndBytesConfig):
        pass

    class Either(ConversionOps):
        def __init__(self, quantizer, linear):
            self.quantizer, self.linear = quantizer, linear

        def convert(self, input_dict, **others):
            of_experts = any(name in self.quantizer.names for name in input_dict)
            step = _packing(self.quantizer) if of_experts else self.linear
            return step.convert(input_dict, **others)

    class PacksBoth(Bnb4BitHfQuantizer):
        def _process_model_before_weight_loading(self, model, **others):
            self.names = set(checked_names(model))
            super()._process_model_before_weight_loading(model, **others)

        def param_needs_quantization(self, model, param_name, **others):
            of_experts = param_name in self.names
            return of_experts or super().param_needs_quantization(model, param_name, **others)

        def get_quantize_ops(self):
            return Either(self, super().get_quantize_ops())

        def _process_model_after_weight_loading(self, model, **others):
            model.config.quantization_config = self.quantization_config.linear
            return super()._process_model_after_weight_loading(model, **others)

    return ExpertsAndLinearConfig, PacksBoth


@functools.cache
def _classes() -> tuple[type, type, type]:
    """(ExpertsConfig, its quantiser, the quantiser of native MXFP4): their bases are imported only
    when they are needed."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class ExpertsConfig(QuantizationConfigMixin):
        def __init__(self, format: str = "nf4", **options):
            options.pop("quant_method", None)
            self.quant_method, self.format, self.options = METHOD, format, options

    class Loads(HfQuantizer):
        """A loaded model is one without quantiser, as after quantize_experts()."""

        requires_calibration = False
        is_trainable = True

        def is_serializable(self):
            return False

        def _process_model_after_weight_loading(self, model, **_):
            self.remove_quantization_config(model)
            return model

    class PacksExperts(Loads):
        def _process_model_before_weight_loading(self, model, **_):
            self.names = checked_names(model)

        def param_needs_quantization(self, model, param_name, **_):
            return param_name in self.names

        def get_quantize_ops(self):
            return _packing(self)

    class KeepsMxfp4(Loads, Mxfp4HfQuantizer):
        def validate_environment(self, *_, **__):
            if not self.pre_quantized:
                raise ValueError(
                    "the checkpoint is not in MXFP4: pack its experts by hf.experts_config"
                )

        def _process_model_before_weight_loading(self, model, **_):
            checked_names(model)

        def param_needs_quantization(self, *_, **__):
            return False

        def get_load_operations(self):
            return {"deserialize": _reading_mxfp4}

    return ExpertsConfig, PacksExperts, KeepsMxfp4


def _register(method: str, config: type, quantizer: type) -> None:
    from transformers.quantizers import auto

    if method not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(method)(config)
        auto.register_quantizer(method)(quantizer)


def experts_config(format: str = "nf4", *, linear=None, **options):
    """A quantization_config of from_pretrained(), which packs experts while they are loaded: never
    more than one projection of a layer exists unpacked. Arguments as of quantize_experts().

        from_pretrained(name, quantization_config=hf.experts_config("nf4"),
                        experts_implementation="sonicmoe_cpp")

    linear: a BitsAndBytesConfig with load_in_4bit, by which bitsandbytes packs linear layers
    (attention); without it all other weights stay as they are, and the loaded model is as after
    quantize_experts().
    """
    _checks.one_of("format", format, ("nf4", "mxfp4"))
    if linear is None:
        config, packs, _ = _classes()
        _register(METHOD, config, packs)
        return config(format, **options)
    if not getattr(linear, "load_in_4bit", False):
        raise ValueError("linear must be a BitsAndBytesConfig with load_in_4bit=True")
    kind, packs = _of_both()
    _register(METHOD_OF_BOTH, kind, packs)
    config = kind()
    vars(config).update(vars(linear))
    config.quant_method, config.linear = METHOD_OF_BOTH, linear
    config.format, config.options = format, options
    return config


def keep_mxfp4() -> None:
    """From now on from_pretrained() keeps experts in MXFP4 (gpt-oss) packed and trainable by
    low-rank factors, instead of unpacking them or replacing them by experts that are not trainable.
    Raises ImportError before transformers 5.23.
    """
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer

    if not hasattr(HfQuantizer, "get_load_operations"):
        raise ImportError("hf.keep_mxfp4 needs transformers 5.23 or later")
    auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = _classes()[2]
