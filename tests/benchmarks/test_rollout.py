"""The rollout benchmark: what its ways are given, how turns are counted, and its verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout import replica as rollout
from benchmarks.rollout.ways import setting
from benchmarks.rollout.ways.bare import Load, _ids
from benchmarks.rollout.ways.setting import Count, Rate, rate_between


class RecordedContest:
    """Stands for the process: answers orders from a list of rates, and keeps the orders."""

    def __init__(self) -> None:
        self.orders: list[tuple[Any, ...]] = []

    def ask(self, *order: Any) -> Rate:
        self.orders.append(order)
        return Rate(len(self.orders), 1.0, 40)


def test_turns_alternate_and_every_other_turn_goes_backwards() -> None:
    contest = RecordedContest()
    rates = rollout.alternate(contest, ["bare", "ours"], 2, 0.5)  # type: ignore[arg-type]
    assert [name for _, name, _ in contest.orders] == ["bare", "ours", "ours", "bare"]
    assert [rate.tokens_per_s for rate in rates["bare"]] == [1, 4]


def test_rates_are_of_the_time_between_two_counts() -> None:
    assert rate_between(Count(10.0, 100, 5, 8), Count(12.0, 300, 9, 40)) == Rate(100.0, 2.0, 40)


def make_results(ours: float, prefix: float = 3.0) -> dict[str, Any]:
    def rates(*tokens_per_s: float) -> dict[str, list[float]]:
        return {"tokens_per_s": list(tokens_per_s), "requests_per_s": [1.0], "in_flight": [40, 38]}

    return {
        "ways": {"bare": rates(100.0, 100.0, 900.0), "ours": rates(ours, ours, 0.0)},
        "prefixes": {"off": rates(10.0), "on": rates(10.0 * prefix)},
        "start_s": 20.0,
        "counters": {"ours": {"push/stored": 4}},
    }


@pytest.mark.parametrize(("ours", "is_met"), [(96.0, True), (94.0, False)])
def test_less_than_95_per_cent_of_bare_vllm_is_a_miss(ours: float, is_met: bool) -> None:
    found, verdict = rollout.check(make_results(ours))
    assert found is is_met
    assert verdict.endswith("(ours of bare, tokens/s)")


def test_the_table_shows_medians_shares_and_what_the_prefix_cache_gives() -> None:
    text = rollout.make_table(make_results(97.0))
    assert "| ours | 97 | 0 to 97 | 1.0 | 39 | 0.970 |" in text
    assert "prefix cache on | 30 | 30 to 30 | 1.0 | - | 3.000 |" in text
    assert "'push/stored': 4" in text


def test_every_prompt_is_answered_by_a_group_of_requests_with_seeds_of_their_own() -> None:
    load = Load(None, [[1], [2]], 4, 8)
    drawn = [next(load._requests) for _ in range(2 * setting.GROUP_SIZE)]
    assert [seed for seed, _ in drawn] == list(range(len(drawn)))
    assert [prompt for _, prompt in drawn] == [[1]] * setting.GROUP_SIZE + [[2]] * setting.GROUP_SIZE
    assert load._sampling(3).max_tokens == 8
    drawing = Load(None, [[1]], 4, None)
    lengths = [drawing._sampling(seed).max_tokens for seed in range(200)]
    assert 20 < sum(lengths) / len(lengths) < 35 and max(lengths) <= setting.MAX_TOKENS


def test_prompts_are_of_their_length_for_both_ways_and_differ(tmp_path: Path) -> None:
    tokenizer = setting.build_tokenizer(600)
    text = setting.make_prompt(7, setting.PROMPT_TOKENS)
    assert len(tokenizer(text)["input_ids"]) == len(_ids(text)) == setting.PROMPT_TOKENS
    assert setting.make_prompt(8, 32) != text
    assert tokenizer.decode([599])
    for name in (setting.PLAIN, *setting.EXTRAS):
        found = json.loads(setting.make_config(tmp_path, name).model_dump_json())["rollout"]
        assert found["response_tokens"] == (setting.RESPONSES if name == setting.PLAIN else None)
