"""Gauges of a bare AsyncLLM: its queue, its KV cache and its preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.rollout.ways.bare import start_engine
from rollout_service.engine.vllm.core.gauges import CacheGauges


class LoggedGauges(CacheGauges):
    """The gauges of a replica's engine, by the names that rules read."""

    @property
    def cache_use(self) -> float:
        return self.usage

    @property
    def has_waiting(self) -> bool:
        return self.num_waiting > 0

    @property
    def is_busy(self) -> bool:
        return self.num_waiting + self.num_running > 0


async def start_metered_engine(folder: Path, kv_cache_bytes: int, gauges: LoggedGauges) -> Any:
    """Return an AsyncLLM that keeps `gauges` up to date."""
    return start_engine(folder, False, kv_cache_bytes, [gauges.factory])
