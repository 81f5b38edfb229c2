"""Number formats of the computation, and the loss scale that float16 needs (pure).

float16 has nothing below 6e-8, so small gradients would vanish: the loss is multiplied by a power of
two, the gradients divided by it. A gradient that overflows is computed again under a smaller scale, from
the same minibatch: none is lost. Invariant: where nothing over- or underflows, any scale gives the same
bits. Other formats have a scale of 1 and pay nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

INITIAL_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
SHRINKAGE = 2.0**4
"""Per try: at most five tries from the initial scale until a gradient counts as not finite."""
GROWTH_UPDATES = 1000
"""Updates in a row that fit, after which the scale is doubled; Megatron's window."""


class LossScale:
    """The scale of one optimizer's losses, for the format `dtype`.

    Example:
        for scale in loss_scale.attempts():
            norm = ...  # of the gradient of loss * scale, divided by scale
            if math.isfinite(norm):
                loss_scale.accept(scale)
                break
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._is_active = dtype is torch.float16
        self._value = INITIAL_SCALE if self._is_active else 1.0
        self._num_updates = 0

    def attempts(self) -> Iterator[float]:
        """Yield the scales to try, largest first, down to 1."""
        scale = self._value
        yield scale
        while scale > 1.0:
            scale = max(1.0, scale / SHRINKAGE)
            yield scale

    def accept(self, scale: float) -> None:
        """Note that the gradient was finite under `scale`."""
        is_first = scale == self._value
        self._num_updates = self._num_updates + 1 if is_first else 0
        if is_first and self._is_active and self._num_updates == GROWTH_UPDATES:
            scale, self._num_updates = min(scale * 2.0, LARGEST_SCALE), 0
        self._value = scale

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps; nothing where there is no scale."""
        return {"loss_scale": self._value, "loss_scale_updates": self._num_updates} if self._is_active else {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Take what `state` returned; that of a run without a scale changes nothing."""
        if self._is_active and "loss_scale" in state:
            self._value = msgspec.convert(state["loss_scale"], float)
            self._num_updates = msgspec.convert(state["loss_scale_updates"], int)
