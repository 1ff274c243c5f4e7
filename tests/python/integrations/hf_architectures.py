"""Runs the experts of every architecture of transformers that has some, to see which this library
serves.

python tests/python/integrations/hf_architectures.py prints the table of docs/huggingface.md.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from sonicmoe_cpp.integrations import hf
from sonicmoe_cpp.integrations._hf_adopted import KNOWN, Known, adopt_classes
from sonicmoe_cpp.integrations._hf_experts import weights_of
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

MODELS = Path(transformers.__path__[0]) / "models"
COUNTS = re.compile(r"config\.(num_experts|num_local_experts|n_routed_experts|moe_num_experts)\b")
ROUTES = re.compile(r"top_?k|router", re.IGNORECASE)
# A config gets those of these values whose names it has: they make its experts small.
SMALL = {
    "hidden_size": 32,
    "moe_hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "moe_ffn_hidden_size": 24,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
}


class Found(NamedTuple):
    architecture: str
    experts: str  # name of the class
    plan: hf.Plan | None
    reason: str  # of a refusal


def architectures() -> tuple[list[str], list[str]]:
    """(architectures whose experts use transformers' interface for implementations, architectures
    with experts that do not use it). An architecture without a model of its own, such as
    sarvam_moe, is in a row with the one whose model it uses."""
    asking, silent = [], []
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        code, name = file.read_text(), file.parent.name
        if "@use_experts_implementation" in code:
            asking.append(name)
        elif COUNTS.search(code) and ROUTES.search(code):
            silent.append(name)
    return sorted(set(asking)), sorted(set(silent) - set(asking))


def configs_of(module):
    """Small configs of every kind that the module knows; experts are built from one of them."""
    for kind in vars(module).values():
        if not (inspect.isclass(kind) and issubclass(kind, PreTrainedConfig)):
            continue
        config = kind()
        for part in (config, getattr(config, "text_config", None)):
            if part is None or isinstance(part, dict):
                continue
            for name, value in SMALL.items():
                if isinstance(getattr(part, name, "absent"), (int, type(None))):
                    setattr(part, name, value)
            part._experts_implementation = "eager"
            yield part


def small(kind: type, module) -> nn.Module:
    """Experts of a class on the meta device."""
    errors, width = [], {}
    if "intermediate_size" in inspect.signature(kind.__init__).parameters:
        width["intermediate_size"] = SMALL["intermediate_size"]
    for config in configs_of(module):
        try:
            with torch.device("meta"):
                experts = kind(config, **width)
        except (AttributeError, TypeError, KeyError) as error:  # a config without experts
            errors.append(repr(error))
            continue
        if sum(p.numel() for p in experts.parameters()) < 1 << 20:
            return experts
        errors.append(f"{type(config).__name__} makes them large: SMALL lacks a name")
    raise RuntimeError(f"no config builds {kind.__name__}: {errors}")


def classes(architecture: str):
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    for kind in vars(module).values():
        own = inspect.isclass(kind) and kind.__module__ == module.__name__
        if own and issubclass(kind, nn.Module) and hasattr(kind, "_apply_gate"):
            yield kind, module


def build(kind: type, module) -> nn.Module:
    experts = small(kind, module).to_empty(device="cpu")
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in (*experts.parameters(), *experts.buffers()):
            p.copy_(torch.randn(p.shape, generator=g) * p.shape[-1] ** -0.5)
    return experts


def run(experts: nn.Module, implementation: str, scale: float) -> list[torch.Tensor]:
    """The output and every gradient."""
    g = torch.Generator().manual_seed(1)
    hidden = weights_of(experts)[0].shape[2]
    count = experts.down_proj.shape[0]
    x = (scale * torch.randn(23, hidden, generator=g)).requires_grad_()
    ids = torch.rand(23, count, generator=g).topk(2).indices
    weights = torch.rand(23, 2, generator=g, requires_grad=True)
    experts.config._experts_implementation = implementation
    out = experts(x, ids, weights)
    dout = torch.randn(out.shape, generator=g)
    return [out, *torch.autograd.grad(out, [x, weights, *experts.parameters()], dout)]


def borrowers() -> dict[str, list[str]]:
    """Architectures that have a config only, by the architecture whose model they use."""
    found: dict[str, list[str]] = {}
    for name, model in MODEL_MAPPING_NAMES.items():
        if not isinstance(model, str) or not (MODELS / name).is_dir():
            continue
        owner = getattr(transformers, model, None).__module__.split(".")[2]
        if not list((MODELS / name).glob("modeling_*.py")):
            found.setdefault(owner, []).append(name)
    return found


def look_at_adopted(known: Known) -> str:
    """Runs a block whose experts hf.register() makes ask; a difference from eager raises."""
    module = importlib.import_module(
        f"transformers.models.{known.architecture}.modeling_{known.architecture}"
    )
    adopt_classes()
    experts = build(getattr(module, known.experts), module)
    plan = hf.plan_of(experts)
    hidden = weights_of(experts)[0].shape[2]
    g = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(23, hidden, generator=g) for _ in range(2))
    results = []
    for implementation in ("sonicmoe_cpp", "eager"):
        experts.config._experts_implementation = implementation
        leaf = x.clone().requires_grad_()
        if known.block is None:
            count = getattr(experts, "total_experts", len(experts.down_proj))
            ids = torch.rand(23, count, generator=g.manual_seed(2))
            weights = torch.rand(23, 2, generator=g)
            out = experts(leaf, ids.topk(2).indices, weights)
        else:
            block = getattr(module, known.block)(experts.config)
            block.experts = experts
            for key, value in block.named_parameters():
                if not key.startswith("experts."):
                    value.data = torch.randn(value.shape, generator=g.manual_seed(3)) / 6
            out = block(leaf)[0]
        results.append([out, *torch.autograd.grad(out, [leaf, *experts.parameters()], dout)])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    return label(Found(known.architecture, known.experts, plan, ""))


def look_at(architecture: str) -> list[Found]:
    """Runs the experts of an architecture; a difference from eager raises."""
    found = []
    for kind, module in classes(architecture):
        experts = build(kind, module)
        try:
            plan = hf.plan_of(experts)
        except NotImplementedError as error:
            found.append(Found(architecture, kind.__name__, None, str(error)))
            continue
        scale = plan.activation.limit or 1  # large inputs, so that clamps take effect
        results = (run(experts, by, scale) for by in ("sonicmoe_cpp", "eager"))
        for ours, eager in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
        found.append(Found(architecture, kind.__name__, plan, ""))
    assert found, f"{architecture} has no class of experts"
    return found


def label(found: Found) -> str:
    if found.plan is None:
        return "refused"
    a = found.plan.activation
    parameters = ", ".join(f"{value:g}" for value in (a.alpha, a.limit) if value is not None)
    return f"served, `{a.name}`" + (f" ({parameters})" if parameters else "")


def table() -> str:
    """Rows of a Markdown table: result, architectures with this result."""
    asking, silent = architectures()
    rows: dict[str, list[str]] = {}
    others = borrowers()
    for architecture in asking:
        for name in dict.fromkeys(map(label, look_at(architecture))):
            rows.setdefault(name, []).extend([architecture, *others.get(architecture, [])])
    for known in KNOWN:
        if known.architecture in silent:
            silent.remove(known.architecture)
            rows.setdefault(look_at_adopted(known), []).append(known.architecture)
    # Refused experts come last.
    names = sorted(rows, key=lambda name: (name == "refused", -len(rows[name])))
    lines = [(name, sorted(rows[name])) for name in names] + [("never ask", silent)]
    return "\n".join(f"| {name} | {', '.join(names)} |" for name, names in lines)


if __name__ == "__main__":
    hf.register()
    print(table())
