"""The simulation of placement: its traces end, and the ledger's rule is judged beside today's order."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.rollout import placement
from benchmarks.rollout.placement import GROUP_SIZE, RULES, TRACES, Replica, Run, Trace, check, table
from benchmarks.rollout.recorded import MAX_BYTES, RECORDED, recorded

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


def test_a_full_cache_drops_what_was_not_used_for_longest_and_keeps_what_is_in_use() -> None:
    replica = Replica("r0")
    for key in ("first", "second"):
        assert not replica.use(key, 40, 100)
        replica.release(key)
    assert replica.use("first", 40, 100), "it was there"
    assert not replica.use("third", 40, 100)
    assert list(replica.cache) == ["first", "third"]
    assert not replica.use("fourth", 40, 100)
    assert list(replica.cache) == ["first", "third", "fourth"], "all are in use"
    replica.release("first")
    replica.clear()
    assert list(replica.cache) == ["third", "fourth"]


def test_the_sessions_of_the_recorded_run_have_answers_and_fill_its_groups() -> None:
    assert RECORDED.stat().st_size <= MAX_BYTES
    for source in recorded():
        for group in source.groups:
            assert len(group) == GROUP_SIZE
            assert all(said > 0 for session in group for said, _ in session)


def test_the_table_has_each_trace_and_a_slower_placement_misses_its_target() -> None:
    rules = {rule: {"hit_share": 0.9, "step_s": 10.0, "speed_up": 1.2} for rule in RULES}
    results = {"cases": [{"trace": name, "rules": dict(rules)} for name in TRACES]}
    assert all(f"| {name} | 10.0 (90.0%) |" in table(results) for name in TRACES)
    assert check(results)[0]
    results["cases"][-1]["rules"]["placed"] = {"hit_share": 0.9, "step_s": 10.0, "speed_up": 0.9}
    assert not check(results)[0]
    assert min(placement.TARGETS.values()) > 0.9
