"""INT8 weights on a CPU: vLLM's kernel, over weights that are quantised as they are loaded.

vLLM 0.32 quantises dense weights to FP8 while it loads them, on GPUs; for CPUs it has an INT8 kernel and
takes checkpoints that hold INT8 already. This puts the two together, so that versions stay what the
learner publishes. A weight has one scale per output channel, an activation one per token; embeddings,
norms and the head keep the model's dtype. Runs inside vLLM's workers.

Shapes: O output channels of this worker, I inputs.
"""

from __future__ import annotations

import torch
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.utils import replace_parameter

LARGEST = 127
IS_DONE = "_already_called_process_weights_after_loading"
"""vLLM's mark of a processed module; its reload removes it."""


class Int8LinearMethod(OnlineLinearBase):
    """A linear layer whose weight becomes INT8 once all of it is there."""

    def create_weights(self, layer: torch.nn.Module, *sizes: object, **options: object) -> None:
        super().create_weights(layer, *sizes, **options)
        self._kernel = init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name=type(self).__name__,
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantise the weight and hand it to the kernel, which keeps a packed copy."""
        if getattr(layer, IS_DONE, False):
            return
        weight_OI, scale_O1 = quantize(self.get_weight_for_quantization(layer))
        replace_parameter(layer, "weight", weight_OI)
        replace_parameter(layer, "weight_scale", scale_O1)
        for name in ("input_scale", "input_zero_point", "azp_adj"):
            layer.register_parameter(name, None)
        self._kernel.process_weights_after_loading(layer)
        self._scale_O1 = (
            layer.weight_scale
        )  # oneDNN refers to its memory; a reload puts another one in its place
        setattr(layer, IS_DONE, True)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the layer's output for `x` [tokens, I]."""
        output: torch.Tensor = self._kernel.apply_weights(layer, x, bias)
        return output


class Int8Config(QuantizationConfig):
    """vLLM's record of the kind: which layers are quantised, and how."""

    name = ""

    def get_name(self) -> str:
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, object]) -> Int8Config:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Int8LinearMethod | None:
        return Int8LinearMethod() if isinstance(layer, LinearBase) else None


def quantize(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight in INT8 [O, I], and what each channel is to be multiplied with, float32 [O, 1]."""
    scale_O1 = weight_OI.abs().amax(dim=1, keepdim=True).float() / LARGEST
    scale_O1 = torch.where(scale_O1 > 0, scale_O1, 1.0)  # a channel of zeros stays one
    return (weight_OI.float() / scale_O1).round().to(torch.int8), scale_O1


def register_int8(name: str) -> None:
    """Make the kind known to vLLM in this process; calling it twice does no harm."""
    if name not in QUANTIZATION_METHODS:
        Int8Config.name = name
        register_quantization_config(name)(Int8Config)
