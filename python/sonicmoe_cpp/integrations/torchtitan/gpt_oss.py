"""gpt-oss's experts, computed by this library."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE

from ...fp8 import Fp8Cache
from ...layer import Activation
from .._recognise import local
from .modules import Experts, SonicRoundedMoE


class SonicGptOssGroupedExperts(Experts, GptOssGroupedExperts):
    """Gate and up alternate, both projections have biases."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        precision: str | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self.precision = config.precision
        self._fp8 = {"experts": Fp8Cache("mlp1_weight_EGD", "mlp2_weight_EDF")}

    def parallelize(self, parallel_dims) -> None:
        if parallel_dims.tp > 1 and not parallel_dims.ep_enabled:
            raise NotImplementedError(
                "sonicmoe_cpp computes gpt-oss's experts whole: tensor_parallel_degree is "
                f"{parallel_dims.tp}, which would split them; set expert_parallel_degree, or 1"
            )
        super().parallelize(parallel_dims)

    def layer_arguments(self) -> dict:
        names = ("mlp1_weight_EGD", "mlp2_weight_EDF", "mlp1_bias_EG", "mlp2_bias_ED")
        up, down, b_up, b_down = (local(getattr(self, name)).bfloat16() for name in names)
        weights = {"w_up": up, "w_down": down}
        style = {
            "activation": Activation("swiglu_oai", limit=self.swiglu_limit),
            "gate_layout": "interleaved",
        }
        biases = {"b_up": b_up, "b_down": b_down}
        return weights | biases | style | self._precision(**weights, **style)


EXPERTS = {GptOssGroupedExperts.Config: SonicGptOssGroupedExperts.Config}
LAYERS = {GptOssMoE.Config: SonicRoundedMoE.Config}
