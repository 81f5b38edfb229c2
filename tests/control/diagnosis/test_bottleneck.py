"""Bottleneck of a run, named from rows of metrics and statuses."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.control.diagnosis.waits import Diagnosis, diagnose
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.status.statuses import Statuses
from tests.statuses import statuses_of

UP = {
    "buffer.0": {"state": "READY", "paused": False, "journal": {"kind": "file", "is_away": False}},
    "learner.0": {"state": "READY", "step": 7, "paused": False},
    "weight_sync.0": {"state": "READY"},
    "publisher.0": {"state": "READY"},
    "rollout.0": {"state": "READY", "step": 7, "in_flight_groups": 4, "in_flight_requests": 9},
    "rollout.1": {"state": "READY", "step": 6, "in_flight_groups": 4, "in_flight_requests": 8},
}

CORE = ("buffer.0", "learner.0")


def up(**changes: dict[str, Any]) -> Statuses:
    """The services, all well, but for `changes` (`rollout_0={...}`)."""
    named = {f"{key.rpartition('_')[0]}.{key.rpartition('_')[2]}": change for key, change in changes.items()}
    return statuses_of({name: {**status, **named.get(name, {})} for name, status in UP.items()})


def idle(learner: float, rollout: float, **more: float) -> dict[str, float]:
    """Shares of waiting, and more: stages, or causes (with a slash in their names)."""
    stages = {f"{'perf' if '/' in name else 'timing_s'}/{name}": value for name, value in more.items()}
    return {"perf/learner_idle_share": learner, "perf/rollout_idle_share": rollout, **stages}


NOT_BUSY = {"in_flight_groups": 0, "in_flight_requests": 0}
SCORING = {"in_flight_groups": 4, "in_flight_requests": 0}


@pytest.mark.parametrize(
    ("metrics", "statuses", "who", "waits_for", "said"),
    [
        (idle(0.5, 0.0), up(), "rollout", "rollout", "more replicas would help"),
        (
            idle(0.5, 0.0),
            up(rollout_1={"state": "SYNCING"}),
            "rollout",
            "rollout",
            "not generating: rollout.1 SYNCING",
        ),
        (idle(0.5, 0.0), up(rollout_0=SCORING, rollout_1=SCORING), "reward", "reward", "8 groups are open"),
        (
            idle(0.0, 0.6, step=2.0, update_actor=1.2, old_log_prob=0.4, wait=1.5),
            up(),
            "learner",
            "",
            "forward, backward and optimizer takes 60% of a step",
        ),
        (idle(0.0, 0.6), up(), "learner", "", "the replicas 60% of theirs"),
        (
            idle(0.5, 0.15, **{"rollout_idle/group": 0.12}),
            up(),
            "reward",
            "reward",
            "rewards, tools or environments",
        ),
        (
            idle(0.5, 0.3, **{"rollout_idle/weights": 0.1, "rollout_idle/swap": 0.12}),
            up(),
            "weight_sync",
            "rollout",
            "replicas wait for weights",
        ),
        (idle(0.05, 0.5, **{"rollout_idle/standby": 0.5}), up(), "", "", "balanced"),
        (idle(0.0, 0.65, **{"rollout_idle/standby": 0.5}), up(), "learner", "", "the replicas 30% of theirs"),
        (
            idle(0.5, 0.56, **{"rollout_idle/standby": 0.5, "rollout_idle/group": 0.06}),
            up(),
            "reward",
            "reward",
            "rewards, tools or environments",
        ),
        (
            idle(0.05, 0.4, **{"learner_idle/checkpoint": 0.3}),
            up(),
            "checkpoint",
            "checkpoint",
            "checkpoint before to be written: 30% of a step",
        ),
        (idle(0.4, 0.0, **{"learner_idle/publisher": 0.2}), up(), "rollout", "rollout", "more replicas"),
        (idle(0.03, 0.05), up(), "", "", "balanced"),
        (idle(0.15, 0.08), up(), "", "rollout", "balanced"),
        (
            idle(0.5, 0.5),
            up(rollout_0={**NOT_BUSY, "step": 5}, rollout_1={**NOT_BUSY, "step": 5}),
            "weight_sync",
            "rollout",
            "the learner is at step 7, they serve step 5",
        ),
        (idle(0.5, 0.5), up(rollout_0=NOT_BUSY, rollout_1=NOT_BUSY), "buffer.0", "rollout", "too few leases"),
        ({}, up(), "rollout", "rollout", "the first batch"),
        ({}, up(rollout_0=SCORING, rollout_1=SCORING), "reward", "reward", "8 groups are open"),
        ({}, Statuses(), "", "", "nothing was measured"),
    ],
)
def test_idle_shares_and_what_is_in_flight_name_the_bottleneck(
    metrics: dict[str, float], statuses: Statuses, who: str, waits_for: str, said: str
) -> None:
    found = diagnose(metrics, statuses)
    assert (found.who, found.learner_waits_for) == (who, waits_for)
    assert said in found.why


@pytest.mark.parametrize(
    ("statuses", "who", "said"),
    [
        (up(buffer_0={"state": "DEAD"}), "buffer.0", "buffer.0 is DEAD"),
        (up(weight_sync_0={"state": "SILENT"}), "weight_sync.0", "is SILENT"),
        (up(learner_0={"state": "STARTING"}), "learner.0", "is STARTING"),
        (up(learner_0={"state": "DEAD"}), "learner.0", "is DEAD"),
        (up(buffer_0={"paused": True}), "operator", "asyncrl unpause"),
        (up(learner_0={"paused": True}), "operator", "paused"),
        (
            up(rollout_0={"state": "DEAD"}, rollout_1={"state": "STARTING"}),
            "rollout",
            "rollout.0 DEAD, rollout.1 STARTING",
        ),
        (
            statuses_of({name: UP[name] for name in ("buffer.0", "learner.0")}),
            "rollout",
            "no rollout replicas",
        ),
    ],
)
def test_what_stops_everything_is_told_before_any_share(statuses: Statuses, who: str, said: str) -> None:
    found = diagnose(idle(0.0, 0.9), statuses)
    waits_for = "" if who.startswith("learner.") else who
    assert (found.who, found.learner_waits_for) == (who, waits_for)
    assert said in found.why


def test_a_dead_service_is_named_before_a_pause_and_a_pause_before_replicas_that_are_gone() -> None:
    gone = up(publisher_0={"state": "DEAD"}, buffer_0={"paused": True}, rollout_0={"state": "DEAD"})
    assert diagnose({}, gone).who == "publisher.0"
    paused = up(buffer_0={"paused": True}, rollout_0={"state": "DEAD"}, rollout_1={"state": "DEAD"})
    assert diagnose({}, paused).who == "operator"


def test_one_replica_that_is_lost_stops_nothing() -> None:
    assert diagnose(idle(0.0, 0.6), up(rollout_0={"state": "DEAD"})).who == "learner"


def test_an_obstacle_is_told_in_the_words_of_its_service_before_any_guess() -> None:
    away = Obstacle("buffer.0", Cause.JOURNAL_AWAY, "Redis at localhost:1 is away: Connection refused")
    nobody = Obstacle("rollout.0", Cause.NO_AGENT, "no agent asks")
    found = diagnose(idle(0.0, 0.9), up(), [away, nobody])
    assert found == Diagnosis("buffer.0", away.reason, "buffer.0")
    paused = up(buffer_0={"paused": True})
    assert diagnose({}, paused, [nobody]).who == "operator", "no replica is held up by more than the pause"
    assert diagnose({}, paused, [away]).who == "buffer.0"
    assert diagnose({}, up(), [nobody]).why == "no agent asks", "and not that rewards are slow"
    hindrance = replace(nobody, blocks=False)
    assert diagnose(idle(0.0, 0.6), up(), [hindrance]).who == "learner"


def test_a_first_batch_whose_groups_are_dropped_says_so() -> None:
    dropping = up(buffer_0={"dropped": {"zero_variance": 40}})
    why = "the first batch is being generated; groups are dropped (zero_variance), see "
    assert diagnose({}, dropping).why.startswith(why)
    assert "dropped" not in diagnose({}, up(buffer_0={"dropped": {"zero_variance": 40}, "trained": 8})).why
