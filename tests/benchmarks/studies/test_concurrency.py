"""The model of an engine's scheduler, and the judgement of what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout import concurrency
from benchmarks.rollout.concurrency import MAX_SEQUENCES, Engine, Request, check, main, measure, table
from benchmarks.rollout.ways.rules import GROUP_SIZE, Adaptive, Fixed, FullBatch


@pytest.mark.parametrize("num_blocks", [1000, 30], ids=["roomy", "tight"])
def test_every_token_is_sampled_once_and_every_block_comes_back(num_blocks: int):
    engine = Engine(num_blocks)
    wanted = [40, 90, 10, 100, 64]
    engine.waiting.extend(Request(0, number) for number in wanted)
    num_ended = 0
    while num_ended < len(wanted):
        num_ended += len(engine.step()[1])
    assert engine.num_sampled == sum(wanted)
    assert engine.free_blocks == num_blocks and engine.status().usage == 0
    assert (engine.num_preempted > 0) == (num_blocks == 30)


def test_the_adaptive_rule_takes_fewer_after_a_preemption_and_only_then():
    engine, rule = Engine(100), Adaptive(MAX_SEQUENCES)
    engine.running = {Request(0, 1): 0 for _ in range(50)}
    engine.free_blocks = 0
    rule.look(engine.status(), 50, 1)
    assert rule.wants_more(1, 300)
    engine.num_preempted = 1
    rule.look(engine.status(), 50, 2)
    assert not rule.wants_more(1, 66) and rule.wants_more(1, 50)


def test_a_batch_is_filled_by_unfinished_requests_however_many_groups_they_are_of():
    full_batch = MAX_SEQUENCES * 5 // 4
    assert FullBatch(MAX_SEQUENCES).wants_more(100, full_batch - GROUP_SIZE)
    assert not FullBatch(MAX_SEQUENCES).wants_more(1, full_batch)


def test_more_groups_in_flight_give_more_tokens_until_the_batch_is_full():
    rates = [
        measure([concurrency.MIXES["fixed"]], 400_000, Fixed(number), 8.0).tokens_per_s
        for number in (2, 8, 32)
    ]
    assert rates[0] < rates[1] < rates[2]


def made_up(ratio: float) -> dict[str, Any]:
    rule = {"tokens_per_s": 100, "groups": 3.0, "preemptions": 0.0, "ratio": ratio}
    fixed = {str(number): 100 for number in concurrency.FIXED}
    case = {"mix": "fixed", "cache": "tight", "fixed": fixed, "best": 100}
    return {"cases": [case | {"rules": {"full batch": rule, "adaptive": rule}}]}


def test_the_check_asks_the_replica_s_rule_for_its_share_of_the_best_fixed_number():
    assert check(made_up(0.95))[0]
    is_met, verdict = check(made_up(0.9))
    assert not is_met and "0.95 (fixed, tight)" in verdict


def test_the_command_prints_the_table_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(concurrency, "DURATION_S", 1.0)
    assert main(["--quick", "--json", str(tmp_path / "figures.json")]) == 0
    results = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert capsys.readouterr().out.strip() == table(results)
    assert len(results["cases"]) == 9
