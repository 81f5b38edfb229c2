"""Room on a GPU of known size: what each side of a run takes of it, and what is left for the KV cache (pure).

Invariant: the activations, which are estimated, count here as they do in `plan`, and refuse nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.core.config.gpus import USABLE
from asyncrl.core.config.tree import Config
from asyncrl.models.architectures import ModelSize
from asyncrl.planner.plan.footprint.memory import (
    GB,
    ITEM_BYTES,
    LEARNER_GPU,
    ROLLOUT_GPU,
    Part,
    find_utilization,
    shares_of,
)


@dataclass(frozen=True)
class Room:
    """Memory of one GPU that one side may take.

    Attributes:
        where: `LEARNER_GPU` or `ROLLOUT_GPU`.
        taken_bytes: By weights, optimizer and activations, or by the engine's weights.
        limit_bytes: That this side may take.
        cache_tokens: For which the engine's KV cache has room on the GPUs of a replica; None of the learner.
    """

    where: str
    taken_bytes: int
    limit_bytes: int
    cache_tokens: int | None = None

    def tell(self) -> tuple[str, str]:
        """Return the figures and a remark, for a reader."""
        figures = f"{self.taken_bytes / GB:.3g} of {self.limit_bytes / GB:.3g} GB on {self.where}"
        if self.cache_tokens is None:
            return figures, "activations, as estimated, included"
        return figures, f"the rest holds {self.cache_tokens:,} tokens of KV cache, less what vLLM computes in"


def find_room(config: Config, parts: Sequence[Part], size: ModelSize, gpu_bytes: int) -> Iterator[Room]:
    """Yield what is taken of a GPU of `gpu_bytes`, side by side."""
    shares = shares_of(config)
    if config.learner.gpus:
        limit = int(gpu_bytes * shares.get(LEARNER_GPU, 1.0))
        yield Room(LEARNER_GPU, _sum(parts, LEARNER_GPU), limit)
    if config.rollout.gpus:
        limit = int(gpu_bytes * (find_utilization(config) or USABLE))
        taken = _sum(parts, ROLLOUT_GPU)
        token_bytes = size.num_cached * ITEM_BYTES[config.model.dtype]
        left = max(0, limit - taken) * max(1, int(config.rollout.gpus))
        yield Room(ROLLOUT_GPU, taken, limit, left // token_bytes)


def _sum(parts: Sequence[Part], where: str) -> int:
    return sum(part.num_bytes for part in parts if part.where == where)
