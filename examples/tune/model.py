"""The model with its factors, and the text as rows of tokens."""

import contextlib
from pathlib import Path

import torch
import torch.nn.functional as F
from lm.data import find_files, read_texts
from lm.errors import UserError, first_line
from sonicmoe_cpp import packed
from sonicmoe_cpp.integrations import hf
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

from tune import dense
from tune.settings import CONFIGS, PACKED, Settings

LARGEST_TEXT = 1 << 26  # characters that are tokenised


def _config(s: Settings):
    if s.config:
        kind, sizes = CONFIGS[s.config]
        config = AutoConfig.for_model(kind, **sizes)
    else:
        config = AutoConfig.from_pretrained(s.model, local_files_only=True)
    config.use_cache = False
    if s.layers:
        inner = config.get_text_config()
        if s.layers > inner.num_hidden_layers:
            raise UserError(f"layers is {s.layers}; the model has {inner.num_hidden_layers}")
        inner.num_hidden_layers = s.layers
        if getattr(inner, "layer_types", None):
            inner.layer_types = inner.layer_types[: s.layers]
    return config


def _attention(s: Settings, config) -> dict[str, str]:
    if s.attention:
        return {"attn_implementation": s.attention}
    # Models with attention sinks have no SDPA, and eager attention makes T x T scores.
    sinks = config.model_type == "gpt_oss" and s.device == "cuda"
    return {"attn_implementation": "flex_attention"} if sinks else {}


def _quantisation(s: Settings, config) -> dict:
    """The option of from_pretrained for --weights. A checkpoint of gpt-oss is in MXFP4 already."""
    found = getattr(config, "quantization_config", None) or {}
    if found.get("quant_method") == "mxfp4":
        if s.weights == "mxfp4":
            hf.keep_mxfp4()
            return {}
        if s.weights:
            raise UserError(f"weights is '{s.weights}'; the checkpoint is in MXFP4: give mxfp4")
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    if not s.weights:
        return {}
    if found:
        raise UserError(f"weights is '{s.weights}'; the checkpoint is quantised already: omit it")
    format, more = PACKED[s.weights]
    return {"quantization_config": hf.experts_config(format, **more)}


def _random_packed(shape, format: str, s: Settings, dtype: torch.dtype) -> packed.PackedWeights:
    """Packed weights (E, out, in) of random codes, with about 0.02 as standard deviation. They are
    made as codes: unpacked they would need four times the memory."""
    experts, out, inner = shape
    kind, more = PACKED[format]

    def codes(*sizes):
        return torch.randint(0, 256, sizes, dtype=torch.uint8, device=s.device)

    if kind == "mxfp4":
        scales = torch.full((experts, out, inner // 32), 120, dtype=torch.uint8, device=s.device)
        return packed.from_mxfp4(codes(experts, out, inner // 32, 16), scales, dtype=dtype)
    blocks = experts * out * inner // 64
    if more:
        steps = torch.linspace(-1, 1, 256, device=s.device)
        scales = torch.full((-(-blocks // 256),), 0.005, device=s.device)
        nested = steps, scales, torch.full((1,), 0.035, device=s.device)
        return packed.from_nf4(
            codes(experts, out, inner // 2), codes(blocks), shape, nested=nested, dtype=dtype
        )
    absmax = torch.full((blocks,), 0.035, device=s.device)
    return packed.from_nf4(codes(experts, out, inner // 2), absmax, shape, dtype=dtype)


def _random(s: Settings, config, options: dict) -> nn.Module:
    torch.manual_seed(s.seed)
    if not s.weights:
        with torch.device(s.device):
            return AutoModelForCausalLM.from_config(config, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    hf.set_packed(model, lambda _, shape: _random_packed(shape, s.weights, s, options["dtype"]))
    if s.dense:
        dense.replace(
            model, lambda weight: _random_packed((1, *weight.shape), s.dense, s, options["dtype"])
        )
    embedding = model.get_input_embeddings()
    for module in model.modules():
        module._is_hf_initialized = isinstance(module, dense.PackedLinear)
        device = "cpu" if s.offload_embedding and module is embedding else s.device
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None and value.is_meta:
                    zeros = torch.zeros_like(value, device=device)
                    tensors[name] = nn.Parameter(zeros) if tensors is module._parameters else zeros
    model.initialize_weights()
    return model


class HostEmbedding(nn.Module):
    """An embedding whose weight stays in the memory of the CPU."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self._weight = [weight.detach().cpu()]  # in a list, so that no move of the model finds it

    @property
    def weight(self) -> torch.Tensor:
        return self._weight[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids.cpu(), self.weight).to(ids.device)


def offload_embedding(model: nn.Module) -> None:
    weight = model.get_input_embeddings().weight
    if weight is model.get_output_embeddings().weight:
        raise UserError("offload_embedding: the head of this model is its embedding; omit it")
    model.set_input_embeddings(HostEmbedding(weight))


def build(s: Settings) -> nn.Module:
    """The model on its device, in bf16 on a GPU and in fp32 on the CPU."""
    hf.register()
    try:
        config = _config(s)
        options = _attention(s, config) | {
            "dtype": torch.bfloat16 if s.device == "cuda" else torch.float32,
            "experts_implementation": s.experts,
        }
        if s.config:
            model = _random(s, config, options)
            if s.dense and not s.weights:
                dense.pack(model)
            return model
        options |= {"local_files_only": True, "device_map": {"": s.device}}
        options |= _quantisation(s, config)
        model = AutoModelForCausalLM.from_pretrained(s.model, config=config, **options)
        if s.dense:
            dense.pack(model)
        return model
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(f"cannot build the model: {first_line(error)}") from error


def experts_of(model: nn.Module, s: Settings) -> list[nn.Module]:
    """The experts modules of a model; refuses a model whose experts are not computed here."""
    found = hf.supports(model)
    for name, reason in found.refused.items():
        raise UserError(f"{name} is not served: {reason}")
    if not found:
        raise UserError(f"{s.model or s.config} has no experts that sonicmoe_cpp computes")
    return [model.get_submodule(name) for name in found.served]


def _projections(model: nn.Module) -> list[str]:
    """The names of the linear layers of attention."""
    return sorted({name.rpartition(".")[2] for name in dense.attention_of(model)})


def add_factors(model: nn.Module, s: Settings):
    """The PeftModel with factors on all experts and on the projections of attention."""
    torch.manual_seed(s.seed + 1)
    with torch.device(s.device):  # PEFT would draw them on the CPU
        return hf.add_lora(
            model,
            s.rank,
            s.alpha,
            target_modules=_projections(model),
            autocast_adapter_dtype=s.factors == "fp32",
        )


class Rows(Dataset):
    """Sequences of equal length. Labels are the same tokens: the loss shifts them."""

    def __init__(self, tokens: torch.Tensor, sequence: int):
        self.rows = tokens[: len(tokens) // sequence * sequence].view(-1, sequence)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def _encode(text: str, s: Settings) -> torch.Tensor:
    if s.config:  # random weights have no tokenizer: a token is a byte
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    try:
        tokenizer = AutoTokenizer.from_pretrained(s.model, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{s.model} has no tokenizer: {first_line(error)}") from error
    if len(tokenizer) < 256:  # without a file transformers makes an empty tokenizer
        raise UserError(f"{s.model} has no tokenizer.json, or one of less than 256 entries")
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def load_rows(s: Settings, limit: int) -> tuple[Rows, Rows]:
    """At most `limit` rows to train on, and one row in 20 (at most 8) to measure the loss on."""
    path = Path(s.data)
    files = [path] if s.data and path.is_file() else find_files(s.data, "")
    text = "\n".join(read_texts(files))[:LARGEST_TEXT]
    # No tokenizer of a model makes more than one token of a byte, and few less than one of 16.
    text = text[: 16 * s.sequence * (limit + 8)]
    rows = Rows(_encode(text, s), s.sequence).rows
    if len(rows) < 2:
        raise UserError(
            f"the text has {len(rows)} sequence(s) of {s.sequence} tokens, and needs 2: give more "
            "text or a smaller --sequence"
        )
    held = min(8, max(1, len(rows) // 20))
    parts = rows[:held], rows[held : held + limit]
    measured, train = (Rows(part.flatten(), s.sequence) for part in parts)
    return train, measured


def compile_parts(model: nn.Module) -> None:
    """torch.compile of what surrounds the experts: attention with its factors, the norms outside of
    it, the router. All layers share a few compiled functions, also the first one, whose input would
    need no gradient."""
    model.get_base_model().enable_input_require_grads()
    for path, module in model.named_modules():
        own = path.rpartition(".")[2]
        norm = "norm" in own and "attn" not in path
        if norm or own in ("self_attn", "gate", "router"):
            module.compile(dynamic=False)


@contextlib.contextmanager
def uncompiled(model: nn.Module):
    """Calls the parts of compile_parts() without their compiled functions, which are for training:
    others would be compiled for evaluations. What transformers itself compiles stays compiled, for
    flex attention makes T x T scores otherwise."""
    parts = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
    for module in parts:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, compiled in parts.items():
            module._compiled_call_impl = compiled


def merge(model, folder: Path) -> None:
    """Writes the model with the factors added to its weights, as from_pretrained reads it."""
    model.merge_and_unload().save_pretrained(folder)
