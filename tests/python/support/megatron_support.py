"""Runs Megatron-Core on the CPU. It asks torch.cuda for its device and streams on any machine, so
parts of torch.cuda are replaced."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

E, D, N = 4, 32, 24


class Stream:
    """A stream on the CPU, where all work runs in one order."""

    def wait_stream(self, other): ...
    def record_event(self):
        return self

    def synchronize(self): ...


def as_dispatchers_need_it(tensor, as_numpy=False, record_stream=False):
    """maybe_move_tensor_to_cpu that also converts a tensor that is on the CPU already: the
    dispatchers need split sizes that are no tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def pretend_cuda_is_the_cpu(patch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(torch.cuda, "current_stream", lambda: stream)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch.setattr(token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream)
    patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", as_dispatchers_need_it)
    patch.setattr(CudaRNGStatesTracker, "fork", lambda *names: contextlib.nullcontext())
    # A name that Megatron-Core 0.16.1 uses and defines only where TransformerEngine is installed.
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)


@contextlib.contextmanager
def parallel(store, rank=0, world=1, backend="gloo", **sizes):
    """Megatron's process groups."""
    with pytest.MonkeyPatch.context() as patch:
        if backend == "gloo":
            pretend_cuda_is_the_cpu(patch)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        try:
            parallel_state.initialize_model_parallel(**sizes)
            # The routers' log, by layer: it may be that of an earlier model with another number of
            # layers.
            moe_utils.get_moe_layer_wise_logging_tracker().clear()
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def config_of(**options) -> TransformerConfig:
    default = {
        "num_layers": 1,
        "hidden_size": D,
        "num_attention_heads": 4,
        "num_moe_experts": E,
        "moe_router_topk": 2,
        "ffn_hidden_size": N,
        "moe_ffn_hidden_size": N,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "use_cpu_initialization": True,
        "init_method_std": 0.2,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**(default | options))


def own_spec():
    """The spec of Megatron's own MoE layer, which computes its experts one after the other."""
    return get_moe_module_spec(use_te=False, num_experts=E)


def layer_of(spec, config, seed=0) -> MoELayer:
    torch.manual_seed(seed)
    layer = MoELayer(config, spec.submodules)
    layer.set_layer_number(1)
    return layer
