"""Weights in FP8: vLLM's own quantisation while it loads, which keeps the checksum of each matrix that it quantises.

Importing this registers `FP8` with vLLM, by its extension point for quantisations. Matrices of linear maps have a scale
for each output, activations one for each token (`fp8_per_channel` of vLLM); experts, embedding and output head stay as
they are.
"""

from typing import Any

from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticChannelSym

from tasks.inference.engine.read_back import FP8, PACKED, sum_packed


class SummedLinear(Fp8PtpcOnlineLinearMethod):
    """Quantises a matrix after its checksum was taken: that of the last one that was quantised."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantise what was loaded, in place; vLLM calls it after each load."""
        if not getattr(layer, "_already_called_process_weights_after_loading", False):
            setattr(layer, PACKED, sum_packed(layer))
        super().process_weights_after_loading(layer)


@register_quantization_config(FP8)
class SummedFp8(OnlineQuantizationConfig):
    """Quantises linear maps by `SummedLinear`, and nothing else."""

    def __init__(self) -> None:
        super().__init__(QuantizationConfigArgs(linear=QuantSpec(weight=kFp8StaticChannelSym)))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return what quantises a layer; None where nothing does."""
        method = super().get_quant_method(layer, prefix)
        return SummedLinear() if isinstance(method, Fp8PtpcOnlineLinearMethod) else method
