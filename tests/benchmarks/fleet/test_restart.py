"""The restart benchmark runs, restarts what it killed, and judges what it measured."""

from __future__ import annotations

import pytest

from benchmarks.buffer import restart


@pytest.mark.long
def test_a_small_journal_is_served_again_by_every_kind() -> None:
    results = restart.measure(40)
    assert (
        set(results["serving_s"])
        == set(results["recovery_s"])
        == {"files", "Redis alive", "Redis killed too"}
    )
    for journal, serving_s in results["serving_s"].items():
        assert 0.0 < results["recovery_s"][journal] < serving_s
    assert "40 groups of 53 KB" in restart.table(results)


def test_the_worst_journal_is_named() -> None:
    is_met, verdict = restart.check(
        {"serving_s": {"files": 1.0, "Redis alive": 4.0, "Redis killed too": 9.0}}
    )
    assert (is_met, verdict) == (False, "worst ratio to a target: 0.50 (Redis alive)")
