"""Gauges of vLLM's KV cache, fed by its logger of statistics after each step of the engine core."""

from __future__ import annotations

from asyncrl.core.status.replica import CacheStatus
from rollout_service.engine.vllm.objects import AsyncLLM, IterationStats, SchedulerStats


class CacheGauges:
    """The newest figures of one engine; vLLM sees a `StatLogger` and, in `factory`, what makes it.

    Attributes:
        num_preempted: Requests that lost their KV cache, since the start; at a swap with
            `kv_cache: recompute` all that run lose it.
        num_running, num_waiting: Requests in the batch, and those without a place in it.
        usage: Share of the KV cache that is in use.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_preempted = self.num_running = self.num_waiting = 0
        self.usage = 0.0

    def factory(self, vllm_config: object, engine_index: int = 0) -> CacheGauges:
        """Return this logger: an `AsyncLLM` has one engine core."""
        return self

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Take in the statistics of one step; either may be None."""
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            self.num_waiting = scheduler_stats.num_waiting_reqs
            self.usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.num_preempted += iteration_stats.num_preempted_reqs
            self.num_prompt_tokens += iteration_stats.prompt_token_stats.total
            self.num_cached_tokens += iteration_stats.prompt_token_stats.local_cache_hit

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM tells the sizes of its cache."""

    def status(self) -> CacheStatus:
        """Return the figures for the replica's status."""
        return CacheStatus(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            preemptions=self.num_preempted,
            usage=self.usage,
            running=self.num_running,
            waiting=self.num_waiting,
        )


def drop_prometheus(llm: AsyncLLM) -> None:
    """Take the logger out that vLLM adds to any other: it observes each token, for a server that has none."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    loggers = llm.logger_manager.stat_loggers
    loggers[:] = [one for one in loggers if not isinstance(one, PrometheusStatLogger)]
