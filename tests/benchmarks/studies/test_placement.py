"""The simulation of placement: its traces end, and the ledger's rule is judged beside today's order."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.rollout import placement
from benchmarks.rollout.placement import RULES, TRACES, Run, Trace, check, table

SMALL = Trace(sources=4, shared_tokens=8000, median_tokens=60, replicas=(2, 3, 2), groups_per_step=16)


def hits(trace: Trace, rule: str) -> float:
    run = Run(trace, rule, seed=0)
    run.generate(3)
    return run.num_cached_tokens / run.num_prompt_tokens


def test_a_whole_session_finds_its_history_and_one_whose_turns_go_anywhere_does_not() -> None:
    sessions = replace(SMALL, shared_tokens=0, turns=6)
    assert hits(sessions, "least loaded") > hits(sessions, "turns anywhere") + 0.1


def test_placed_finds_more_than_turns_where_sources_share_and_nothing_where_there_is_nothing_to_find() -> (
    None
):
    alone = replace(SMALL, replicas=(1, 1, 1))
    assert hits(alone, "placed") == hits(alone, "oldest first")
    nothing = replace(SMALL, sources=1, shared_tokens=0)
    assert hits(nothing, "placed") == hits(nothing, "oldest first")
    assert hits(SMALL, "placed") > hits(SMALL, "round robin")


def test_the_table_has_each_trace_and_a_slower_placement_misses_its_target() -> None:
    rules = {rule: {"hit_share": 0.9, "step_s": 10.0, "speed_up": 1.2} for rule in RULES}
    results = {"cases": [{"trace": name, "rules": dict(rules)} for name in TRACES]}
    assert all(f"| {name} | 10.0 (90.0%) |" in table(results) for name in TRACES)
    assert check(results)[0]
    results["cases"][-1]["rules"]["placed"] = {"hit_share": 0.9, "step_s": 10.0, "speed_up": 0.9}
    assert not check(results)[0]
    assert min(placement.TARGETS.values()) > 0.9
