"""Gauges of a bare AsyncLLM: its queue, its KV cache, its preemptions and its iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.rollout.ways.bare import start_engine
from rollout_service.engine.vllm.core.gauges import CacheGauges


class LoggedGauges(CacheGauges):
    """The gauges of a replica's engine, and each iteration's cost.

    Attributes:
        iterations: Of each: prompt tokens (those computed anew after a preemption included), sampled
            tokens, milliseconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.iterations: list[tuple[int, int, float]] = []

    @property
    def is_busy(self) -> bool:
        return self.num_waiting + self.num_running > 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: object = None, engine_idx: int = 0
    ) -> None:
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        details = None if scheduler_stats is None else scheduler_stats.iteration_details
        if details is not None and not details.is_dummy:
            tokens = details.num_ctx_tokens, details.num_generation_tokens
            self.iterations.append((*tokens, details.elapsed_ms))


async def start_metered_engine(folder: Path, kv_cache_bytes: int, gauges: LoggedGauges) -> Any:
    """Return an AsyncLLM that keeps `gauges` up to date."""
    return start_engine(folder, False, kv_cache_bytes, [gauges.factory], tells_iterations=True)
