"""Protocols that the guard needs of a backend and of an objective (pure).

Each is optional: without it the guard warns where it would have acted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

StepGate = Callable[[float, Mapping[str, float]], bool]
"""(gradient norm before clipping, metrics of the update) -> whether the optimizer may step.

Called on every rank, with equal values, after the gradients are reduced and before anything of the
optimizer changes.
"""

MakeRoom = Callable[[Sequence[int], BaseException, bool], None]
"""(tokens of each row of the pass, what it raised, whether it may be run again).

Returns if the pass is to be run again, with less memory; raises otherwise. It may not be run again where
another rank waits inside the pass: that rank would wait for a collective that does not come.
"""


@runtime_checkable
class TunableBackend(Protocol):
    """A backend whose updates can be refused and whose microbatches can be made smaller."""

    @property
    def max_tokens_per_microbatch(self) -> int:
        """The token budget in use."""

    def set_max_tokens_per_microbatch(self, num_tokens: int) -> None:
        """Use another budget from the next call on; the gradient stays the same."""

    def set_step_gate(self, gate: StepGate | None) -> None:
        """Ask `gate` before every optimizer step; a refused one counts in `actor/skipped_updates`."""

    def set_memory_guard(self, make_room: MakeRoom | None) -> None:
        """Ask `make_room` when a forward pass, or the gradient of an update, raises RuntimeError or
        MemoryError."""


@runtime_checkable
class OffloadingBackend(Protocol):
    """A backend that can move more of its state to the host."""

    def raise_offload(self) -> str:
        """Move the next thing there; return what it was, "" if nothing is left."""


@runtime_checkable
class KlFallback(Protocol):
    """An objective with a KL term."""

    def fall_back_kl(self) -> bool:
        """Use a fixed controller with coefficient 0 from now on; return False if there is no KL term."""
