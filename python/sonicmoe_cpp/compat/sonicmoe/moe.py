"""The module of sonicmoe, with the same parameters and results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import _formulas
from .count_cumsum import frequency
from .enums import ActivationType, KernelBackendMoE, activation, is_glu
from .functional import moe_TC_softmax_topk_layer


def choose(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids, weights) (T, K) by the rules of route(), in plain PyTorch: ties go to the lower expert,
    which torch.topk does not promise; NaN counts as -inf, +inf as the largest finite value; -inf is
    never chosen, and its slot has id E and weight 0."""
    keys = logits.nan_to_num(nan=-torch.inf, posinf=None, neginf=-torch.inf)
    values, ids = keys.sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :k].to(torch.promote_types(logits.dtype, torch.float32)), ids[:, :k]
    empty = values == -torch.inf
    weights = values.masked_fill(empty, torch.finfo(values.dtype).min).softmax(dim=-1)
    return ids.masked_fill(empty, logits.shape[1]), weights.masked_fill(empty, 0)


class Experts(nn.Module):
    """weight (E, out_features, in_features) and bias (E, out_features) or None."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        add_bias: bool = True,
        std: float | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.std = std
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if add_bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, mean=0, std=self.std)
        if self.bias is not None:
            self.bias.zero_()

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight[e], None if self.bias is None else self.bias[e])

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, "
            f"out_features={self.out_features}"
        )


class MoE(nn.Module):
    """Router and experts; gate and up rows of c_fc alternate. forward returns (out, aux_loss)."""

    def __init__(
        self,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        intermediate_size: int,
        activation_function: ActivationType,
        add_bias: bool,
        std: float,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = num_experts_per_tok
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation_function = activation_function
        rows = intermediate_size * (2 if is_glu(activation_function) else 1)
        shape = {"num_experts": num_experts, "add_bias": add_bias, "std": std}
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.c_fc = Experts(in_features=hidden_size, out_features=rows, **shape)
        self.c_proj = Experts(in_features=intermediate_size, out_features=hidden_size, **shape)
        self.stream_id = None  # callers pass it on to the functions, which ignore it

    def forward(
        self,
        hidden_states: Tensor,
        kernel_backend_moe: KernelBackendMoE = KernelBackendMoE.sonicmoe,
        is_inference_mode: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(..., H) -> ((..., H), aux_loss (), None in inference mode).

        In inference mode or after eval() the experts of the sonicmoe backend keep nothing for
        backward, and the output has no gradient. The torch backend, plain PyTorch to compare with,
        computes one expert after the other and waits for the device; it keeps tensors for backward
        in every mode. Other backends raise NotImplementedError.
        """
        rows = hidden_states.reshape(-1, self.hidden_size)
        if kernel_backend_moe == KernelBackendMoE.sonicmoe:
            out, logits, frequency = moe_TC_softmax_topk_layer(
                rows,
                self.router.weight,
                self.c_fc.weight.permute(1, 2, 0),
                self.c_fc.bias,
                self.c_proj.weight.permute(1, 2, 0),
                self.c_proj.bias,
                self.top_k,
                self.stream_id,
                self.activation_function,
                is_inference_mode or not self.training,
            )
        elif kernel_backend_moe == KernelBackendMoE.torch:
            out, logits, frequency = self._torch_forward(rows)
        else:
            raise NotImplementedError(
                f"kernel_backend_moe is {kernel_backend_moe}, must be KernelBackendMoE.sonicmoe or "
                "KernelBackendMoE.torch"
            )
        aux_loss = None if is_inference_mode else self._switch_loss(logits, frequency)
        return out.view(hidden_states.shape), aux_loss

    def _activate(self, h: Tensor) -> Tensor:
        name = activation(self.activation_function)
        if is_glu(self.activation_function):
            return _formulas.gated(name, h[..., 0::2], h[..., 1::2])
        return _formulas.UNARY[name](h)

    def _torch_forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.router(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        ids, weights = choose(logits, self.top_k)
        out = torch.zeros(x.shape, dtype=wide, device=x.device)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            y = self.c_proj.expert(e, self._activate(self.c_fc.expert(e, x[token])))
            out = out.index_add(0, token, y.to(wide) * weights[token, slot, None])
        return out.to(x.dtype), logits, frequency(ids, self.num_experts)

    def _switch_loss(self, logits: Tensor, frequency: Tensor) -> Tensor:
        """E * the sum over experts of (mean router probability) * (fraction of all slots)."""
        probability = F.softmax(logits, dim=-1, dtype=torch.float32).sum(0)
        shares = [F.normalize(t, p=1, dim=0) for t in (probability, frequency.float())]
        return self.num_experts * (shares[0] * shares[1]).sum()
