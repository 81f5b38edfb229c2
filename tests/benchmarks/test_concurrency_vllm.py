"""The benchmark of admission rules on vLLM, but for vLLM: a scripted engine stands where it would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.rollout.concurrency_vllm import (
    Plan,
    Turn,
    check,
    fit_costs,
    make_rules,
    measure_rule,
    rates_of,
    table,
)
from benchmarks.rollout.ways.engine_gauges import LoggedGauges
from benchmarks.rollout.ways.rules import Fixed


def stats(num_preempted: int) -> Any:
    prompts = SimpleNamespace(total=8, local_cache_hit=0)
    return SimpleNamespace(num_preempted_reqs=num_preempted, prompt_token_stats=prompts)


class ScriptedEngine:
    """Answers every request with a token per millisecond, and tells how many it has."""

    def __init__(self, gauges: LoggedGauges) -> None:
        self._gauges = gauges
        self._num_running = 0
        self.most_running = self.longest = 0

    async def generate(self, prompt: Any, sampling: Any, request_id: str) -> AsyncIterator[Any]:
        self._tell(1)
        self.longest = max(self.longest, sampling.max_tokens)
        self.most_running = max(self.most_running, self._num_running)
        try:
            for _ in range(sampling.max_tokens):
                await asyncio.sleep(0.0001)
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])])
        finally:
            self._tell(-1)

    def _tell(self, change: int) -> None:
        self._num_running += change
        details = SimpleNamespace(num_ctx_tokens=8, num_generation_tokens=1, elapsed_ms=2.0, is_dummy=False)
        scheduler = SimpleNamespace(
            num_running_reqs=self._num_running,
            num_waiting_reqs=0,
            kv_cache_usage=self._num_running / 100,
            iteration_details=details,
        )
        self._gauges.record(scheduler, stats(0))


def test_a_turn_holds_as_many_groups_as_its_rule_wants_and_leaves_the_engine_idle() -> None:
    gauges = LoggedGauges()
    engine = ScriptedEngine(gauges)
    found = asyncio.run(measure_rule(engine, gauges, Fixed(3), ("tight", "short", "fixed"), Plan(1, 60, 60)))
    assert engine.most_running == 24
    assert found.num_tokens > 0 and found.num_preempted == 0 and len(found.iterations) >= 60
    assert engine.longest == 96, "the lengths have changed"
    assert not gauges.is_busy


def test_costs_are_those_of_most_iterations_whatever_a_few_took() -> None:
    iterations = [
        (prompt, sampled, 5.0 + 0.02 * prompt + 0.1 * sampled)
        for prompt in (0, 32, 64)
        for sampled in range(9)
    ]
    costs = fit_costs([*iterations, (0, 4, 900.0), (32, 2, 400.0)])
    assert costs == pytest.approx([5.0, 0.02, 0.1], rel=1e-2)
    turn = Turn(iterations[:9], num_tokens=36, num_requests=4, seconds=1.0, num_preempted=2)
    rates = rates_of(turn, costs)
    assert rates["tokens_per_s"] == pytest.approx(36 / 0.0486, rel=1e-2)
    assert (rates["of_clock"], rates["preemptions"]) == (36, 500)


def test_the_table_shows_every_setting_and_the_replica_s_rule_is_judged() -> None:
    settings = {name: {"tokens_per_s": 100.0, "preemptions": 0.0, "ratio": 0.97} for name in make_rules()}
    results = {"cases": [{"lengths": "fixed", "cache": "roomy", "settings": settings}]}
    assert "| fixed | roomy | 100 |" in table(results)
    assert check(results)[0]
    settings["adaptive"]["ratio"] = 0.9
    assert check(results) == (False, "worst ratio to a target: 0.95 (fixed, roomy)")
