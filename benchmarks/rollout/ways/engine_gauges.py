"""Gauges of a bare AsyncLLM: its queue, its KV cache and its preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.rollout.ways.bare import start_engine


class LoggedGauges:
    """The newest figures that vLLM handed to its statistics logger."""

    def __init__(self) -> None:
        self.num_preempted = 0
        self.cache_use = 0.0
        self._num_waiting = 0
        self._num_running = 0

    @property
    def has_waiting(self) -> bool:
        return self._num_waiting > 0

    @property
    def is_busy(self) -> bool:
        return self._num_waiting + self._num_running > 0

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Take in the statistics of one step of the engine; either may be None."""
        if scheduler is not None:
            self._num_running = scheduler.num_running_reqs
            self._num_waiting = scheduler.num_waiting_reqs
            self.cache_use = scheduler.kv_cache_usage
        if iteration is not None:
            self.num_preempted += iteration.num_preempted_reqs


async def start_metered_engine(folder: Path, kv_cache_bytes: int, gauges: LoggedGauges) -> Any:
    """Return an AsyncLLM that keeps `gauges` up to date."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            gauges.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return start_engine(folder, False, kv_cache_bytes, [Logger])
