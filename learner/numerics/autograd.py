"""Contexts of autograd functions: what PyTorch hands to `forward` and `backward`, and its stubs lack."""

from __future__ import annotations

from typing import Protocol

import torch


class SavedTensors(Protocol):
    """A context that keeps tensors from the forward to the backward pass."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keep tensors, inputs or outputs."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Name outputs that have no gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Say whether an output that is not used has a gradient of zeros, or None."""
