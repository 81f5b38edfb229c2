"""Gradients of matrices, which are added to the float32 buffers while they are multiplied."""

from __future__ import annotations

import types

import megatron.core.tensor_parallel.layers
import torch


def bind_weight_gradient() -> None:
    """Have Megatron's matrices add their gradients to the float32 buffers while they multiply.

    Megatron has it by a function of Apex for CUDA. Without it every gradient is a fresh tensor in the model's
    number format: a GPU writes and reads it once more and rounds it before it is added, and its pages cost a
    CPU more than the addition. To be called before a model is made.
    """
    layers = vars(megatron.core.tensor_parallel.layers)
    layers["fused_weight_gradient_mlp_cuda"] = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=add_weight_gradient
    )
    layers["_grad_accum_fusion_available"] = True


def add_weight_gradient(inputs_NI: torch.Tensor, gradient_NO: torch.Tensor, total_OI: torch.Tensor) -> None:
    """Add gradient.T @ inputs to the float32 `total_OI`; N positions, I columns in, O out."""
    if inputs_NI.dtype is torch.float32:
        total_OI.addmm_(gradient_NO.T, inputs_NI)
    elif inputs_NI.device.type == "cpu":
        total_OI.add_(gradient_NO.T @ inputs_NI)
    else:
        torch.addmm(total_OI, gradient_NO.T, inputs_NI, out_dtype=torch.float32, out=total_OI)
