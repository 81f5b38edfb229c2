"""Element-wise functions that torch.compile makes one kernel of on a GPU, forward and backward.

Owns the choice: on a CPU, and under deterministic algorithms, where no timing may choose a kernel, the eager
form runs. Invariant: both round where the formula casts: results agree to a rounding of the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

COMPILER: dict[str, Any] = {"dynamic": True, "options": {"emulate_precision_casts": True}}
"""One kernel for all lengths: each microbatch has another."""


class CompiledOnGpu:
    """A function of tensors, the first of which has the device of all.

    Example:
        double = CompiledOnGpu(lambda x: x + x)
        double(torch.ones(3))
    """

    def __init__(
        self, formula: Callable[..., torch.Tensor], eager: Callable[..., torch.Tensor] | None = None
    ) -> None:
        """Take the formula to compile, and the form to run in its place where it is not compiled."""
        self._formula, self._eager = formula, eager or formula
        self._compiled: Callable[..., torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor, *others: object) -> torch.Tensor:
        if x.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
            return self._eager(x, *others)
        return self.compiled(x, *others)

    @property
    def compiled(self) -> Callable[..., torch.Tensor]:
        """The compiled formula, for any device; it is compiled when it is first called."""
        if self._compiled is None:
            self._compiled = torch.compile(self._formula, **COMPILER)
        return self._compiled
