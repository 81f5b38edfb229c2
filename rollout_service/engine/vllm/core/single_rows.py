"""Products of single rows on a CPU, computed as those of two: the engine is then invariant to its batch.

oneDNN multiplies one row by another kernel than several, in another order of sums, from some width on: a
request that is alone in a step gets other last digits than beside others. Owns vLLM's product of matrices
that are not quantised.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from rollout_service.engine.vllm.variant import PADS

Product = Callable[..., torch.Tensor]


def pad_single_rows() -> None:
    """Pad the single rows of this process's engines, if the environment says so; twice does no harm."""
    from vllm.model_executor.layers import utils

    if os.environ.get(PADS, "0") != "0" and not isinstance(utils.cpu_unquantized_gemm, _Padded):
        utils.cpu_unquantized_gemm = _Padded(utils.cpu_unquantized_gemm)


class _Padded:
    """vLLM's product of (layer, rows [..., inputs], weight, bias), which never sees one row."""

    def __init__(self, multiply: Product) -> None:
        self._multiply = multiply

    def __call__(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if x.numel() != x.shape[-1]:
            return self._multiply(layer, x, weight, bias)
        rows = x.reshape(1, -1).expand(2, -1).contiguous()
        return self._multiply(layer, rows, weight, bias)[:1].view(*x.shape[:-1], -1)
