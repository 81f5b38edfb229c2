"""The benchmark of admission rules on vLLM, but for vLLM: a scripted engine stands where it would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from benchmarks.rollout.concurrency_vllm import Plan, check, make_rules, measure_rule, table
from benchmarks.rollout.ways.engine_gauges import LoggedGauges
from benchmarks.rollout.ways.rules import Adaptive, Fixed


def stats(num_preempted: int) -> Any:
    prompts = SimpleNamespace(total=8, local_cache_hit=0)
    return SimpleNamespace(num_preempted_reqs=num_preempted, prompt_token_stats=prompts)


class ScriptedEngine:
    """Answers every request with a token per millisecond, and tells how many it has."""

    def __init__(self, gauges: LoggedGauges) -> None:
        self._gauges = gauges
        self._num_running = 0
        self.most_running = 0

    async def generate(self, prompt: Any, sampling: Any, request_id: str) -> AsyncIterator[Any]:
        self._tell(1)
        self.most_running = max(self.most_running, self._num_running)
        try:
            for _ in range(sampling.max_tokens):
                await asyncio.sleep(0.001)
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])])
        finally:
            self._tell(-1)

    def _tell(self, change: int) -> None:
        self._num_running += change
        scheduler = SimpleNamespace(
            num_running_reqs=self._num_running, num_waiting_reqs=0, kv_cache_usage=self._num_running / 100
        )
        self._gauges.record(scheduler, stats(0))


def test_a_turn_holds_as_many_groups_as_its_rule_wants_and_leaves_the_engine_idle() -> None:
    gauges = LoggedGauges()
    engine = ScriptedEngine(gauges)
    found = asyncio.run(measure_rule(engine, gauges, Fixed(3), (8, 16), Plan(1, 0.1, 0.3)))
    assert engine.most_running == 24
    assert found["tokens_per_s"] > 0 and found["preemptions"] == 0
    assert not gauges.is_busy


def test_the_controller_reads_what_vllm_tells() -> None:
    gauges, controller = LoggedGauges(), Adaptive()
    controller.look(gauges)
    assert controller.num_groups == 3
    gauges.record(SimpleNamespace(num_running_reqs=1, num_waiting_reqs=2, kv_cache_usage=0.1), None)
    controller.look(gauges)
    assert controller.num_groups == 3, "requests wait"
    gauges.record(None, stats(1))
    controller.look(gauges)
    assert controller.num_groups == 2


def test_the_table_shows_every_setting_and_the_replica_s_rule_is_judged() -> None:
    settings = {name: {"tokens_per_s": 100.0, "preemptions": 0.0, "ratio": 0.97} for name in make_rules()}
    results = {"cases": [{"mix": "fixed", "cache": "roomy", "settings": settings}]}
    assert "| fixed | roomy | 100 |" in table(results)
    assert check(results)[0]
    settings["full batch"]["ratio"] = 0.9
    assert check(results) == (False, "worst ratio to a target: 0.95 (full batch, fixed, roomy)")
