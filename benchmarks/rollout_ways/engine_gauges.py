"""What a bare AsyncLLM tells of its queue, its KV cache and its preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.rollout_ways import setting
from rollout_service.engine import core_nursery


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
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
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

    arguments = AsyncEngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=setting.MAX_MODEL_TOKENS,
        max_num_seqs=setting.MAX_SEQUENCES,
        max_num_batched_tokens=8192,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        enforce_eager=True,
        kv_cache_memory_bytes=kv_cache_bytes,
        distributed_executor_backend="uni",
    )
    with core_nursery.forked_cores():
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[Logger])
