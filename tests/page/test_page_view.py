"""View of a snapshot on the page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from page_runs import WORDS, make_group, make_snapshot

from asyncrl.core.errors import WireError
from asyncrl.core.status.service import FileJournalStatus
from asyncrl.page.figures import DASH
from asyncrl.page.pipeline import counters_of
from asyncrl.page.rollouts import HEAD_TOKENS, rollouts_of, text_of
from asyncrl.page.snapshot import shown
from asyncrl.page.trends import FlowMeter
from asyncrl.page.view import view_of
from tests.statuses import snapshot_of


def view(snapshot: dict[str, Any], meter: FlowMeter | None = None, now: float = 0.0) -> dict[str, Any]:
    rates = (meter or FlowMeter()).update(now, counters_of(snapshot_of(snapshot)))
    found = view_of(snapshot_of(snapshot), rates)
    json.dumps(found, allow_nan=False)
    return found


def node(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["nodes"] if one["id"] == name)


def test_the_pipeline_goes_from_prompts_to_weights_with_the_rates_between() -> None:
    meter, later = FlowMeter(), make_snapshot()
    view(make_snapshot(), meter, 0.0)
    later["ledger"]["trained"] += 32
    later["ledger"]["issued"] += 40
    later["ledger"]["pending"]["stored"] -= 2
    later["metrics"]["weights/published"] += 2
    later["step"] += 2
    found = view(later, meter, 4.0)
    assert [one["id"] for one in found["nodes"]] == ["prompts", "replicas", "buffer", "learner", "weights"]
    rates = {f"{edge['from']}>{edge['to']}": (edge["rate"], edge["is_moving"]) for edge in found["edges"]}
    assert rates == {
        "prompts>replicas": ("10", True),
        "replicas>buffer": ("7.5", True),
        "buffer>learner": ("8", True),
        "learner>weights": ("0.5", True),
    }
    assert found["time_left"] == "12 min 14 s"


def test_the_buffer_shows_how_full_it_is_and_the_replicas_how_many_are_ready() -> None:
    found = view(make_snapshot())
    assert (node(found, "buffer")["value"], node(found, "buffer")["unit"]) == ("11", "of 16 groups stored")
    assert node(found, "buffer")["fill"] == 11 / 16
    assert node(found, "replicas")["value"] == "1/2"


def test_both_laws_stand_with_their_parts_and_what_does_not_add_up() -> None:
    account = view(make_snapshot())["account"]
    issued, drawn = account["laws"]
    assert [part["name"] for part in issued["parts"]] == [
        *("trained", "dropped: stale", "dropped: poison"),
        *("issued", "leased", "stored", "reserved"),
    ]
    assert sum(part["share"] for part in issued["parts"]) == pytest.approx(1.0)
    assert sum(part["share"] for part in drawn["parts"]) == pytest.approx(1.0)
    assert (account["residue"], account["tone"]) == ("0", "good")
    broken = make_snapshot()
    broken["ledger"]["residue"] = 2
    assert view(broken)["account"]["tone"] == "bad"


def test_the_histogram_has_a_bar_for_every_lag_up_to_the_bound() -> None:
    lag = view(make_snapshot())["lag"]
    assert [bar["lag"] for bar in lag["bars"]] == ["0", "1", "2", "3", "4"]
    assert [bar["share"] for bar in lag["bars"]] == [0.12, 0.44, 0.33, 0.11, 0.0]


def test_a_replica_tells_its_state_version_and_last_heartbeat() -> None:
    services = view(make_snapshot())["services"]
    assert [one["name"] for one in services][:4] == ["rollout.0", "rollout.1", "learner.0", "buffer.0"]
    second = services[1]
    assert (second["state"], second["tone"], second["version"]) == ("SYNCING", "busy", "230")
    assert (second["behind"], second["heartbeat"], second["restarts"]) == ("2 behind", "0.4 s", "1")


def test_a_spare_is_no_replica_and_a_dead_one_is_not_what_it_last_said() -> None:
    snapshot = make_snapshot()
    snapshot["services"]["rollout.0"] |= {"stage": "DEAD"}
    snapshot["services"]["rollout.2"] = {"state": "READY", "stage": "READY", "standby": True}
    found = view(snapshot)
    assert (
        node(found, "replicas")["value"] == "0/2" and ["standby", "1"] in node(found, "replicas")["figures"]
    )
    states = {one["name"]: (one["state"], one["tone"]) for one in found["services"]}
    assert states["rollout.0"] == ("DEAD", "bad") and states["rollout.2"] == ("READY (standby)", "good")


def test_the_newest_event_comes_first() -> None:
    kinds = [event["kind"] for event in view(make_snapshot())["events"]]
    assert kinds == ["checkpoint", "restart", "exit", "guard", "ready", "start"]


@pytest.mark.parametrize("missing", [*make_snapshot(), "everything"])
def test_what_a_snapshot_lacks_is_a_dash(missing: str) -> None:
    whole = make_snapshot()
    lacking = {} if missing == "everything" else {k: v for k, v in whole.items() if k != missing}
    empty = {} if missing == "everything" else whole | {missing: None}
    for snapshot in (lacking, empty):
        found = view(snapshot)
        assert len(found["nodes"]) == 5 and len(found["account"]["laws"]) == 2
    if missing in ("ledger", "everything"):
        assert view(lacking)["account"]["residue"] == DASH


def test_a_metric_that_is_not_a_number_is_a_dash_too() -> None:
    snapshot = make_snapshot()
    snapshot["metrics"] = dict.fromkeys(snapshot["metrics"], float("nan"))
    found = view(snapshot)
    assert found["lag"]["bars"] == [] and found["lag"]["mean"] == DASH


def test_a_learner_that_is_away_is_not_said_to_wait_for_itself() -> None:
    lost = {"who": "learner.0", "why": "learner.0 is silent", "learner_waits_for": "learner.0"}
    found = view(make_snapshot() | {"bottleneck": lost | {"learner_waits_for": ""}})["bottleneck"]
    assert (found["node"], found["why"], found["wait"]) == ("learner", "learner.0 is silent.", "")


@pytest.mark.parametrize(("state", "tone"), [("finished", "good"), ("stopped", "good"), ("failed", "bad")])
def test_a_run_that_is_over_has_no_bottleneck_no_flow_and_nobody_at_work(state: str, tone: str) -> None:
    meter, over = FlowMeter(), make_snapshot(step=233)
    view(make_snapshot(), meter, 0.0)
    over |= {"state": state, "health": "degraded" if state == "failed" else "ok"}
    over["bottleneck"] = {"who": "rollout", "why": "no replica is READY", "learner_waits_for": "rollout"}
    over["services"]["rollout.1"] |= {"state": "FAILED", "stage": "SUSPECT"}
    found = view(over, meter, 1.0)
    assert (found["state"], found["tone"], found["health"], found["is_leaving"]) == (state, tone, "", True)
    title = f"The run has {state}."
    assert found["bottleneck"] == {"node": "", "title": title, "why": "", "wait": ""}
    assert [(edge["rate"], edge["is_moving"]) for edge in found["edges"]] == [(DASH, False)] * 4
    states = {one["name"]: (one["state"], one["heartbeat"]) for one in found["services"]}
    assert states.pop("rollout.1") == ("FAILED", DASH)
    assert set(states.values()) == {("ENDED", DASH)}
    assert node(found, "replicas")["value"] == "0/2" and found["time_left"] == ""


def test_a_run_that_is_stopping_has_no_bottleneck_and_still_flows() -> None:
    meter = FlowMeter()
    view(make_snapshot(), meter, 0.0)
    found = view(make_snapshot(step=233) | {"state": "stopping"}, meter, 1.0)
    assert found["bottleneck"]["title"] == "The run is stopping." and found["is_leaving"]
    assert any(edge["is_moving"] for edge in found["edges"])


def test_a_degraded_run_looks_bad_while_it_runs() -> None:
    assert view(make_snapshot() | {"health": "degraded"})["tone"] == "bad"


def test_of_a_group_the_best_and_the_worst_answer_are_shown() -> None:
    def decode(ids: Any) -> str:
        return "".join(WORDS[number] for number in ids)

    (shown,) = rollouts_of([make_group(1)], decode)
    assert (shown["prompt"], shown["num_answers"], shown["reward_mean"]) == ("51937=", 8, "0.25")
    assert [(one["reward"], one["tone"]) for one in shown["answers"]] == [("1", "good"), ("0", "none")]
    assert shown["answers"][0]["text"] == "13579</s>"
    assert shown["answers"][0]["versions"] == "2\u20133"


def test_an_episode_of_several_trajectories_is_one_answer_of_its_group() -> None:
    group = make_group(1)
    first, *others = group.trajectories
    forked = replace(group, trajectories=(first, first, first, *others), forked=(0, 0, *range(8)))
    (shown,) = rollouts_of([forked], str)
    assert (shown["num_answers"], shown["reward_mean"]) == (8, "0.25")
    assert shown["rewards"] == group.rewards


def test_long_texts_lose_their_middle() -> None:
    shown = text_of(range(10_000), lambda ids: " ".join(map(str, ids)))
    assert shown.startswith("0 1 2 ") and shown.endswith(" 9999") and "[…]" in shown
    assert len(shown.split()) < HEAD_TOKENS + 200


def test_a_version_is_behind_the_newest_that_a_row_or_a_service_tells_of() -> None:
    snapshot = make_snapshot()
    snapshot["metrics"]["weights/published"] = 10.0
    versions = {"rollout.0": 9, "rollout.1": 12}
    services = {name: {"state": "READY", "version": number} for name, number in versions.items()}
    services["publisher.0"] = {"state": "READY", "version": [12, 11]}  # a number and a step
    shown = view(snapshot | {"services": services})["services"]
    assert [one["behind"] for one in shown] == ["3 behind", "newest", ""]
    shown = view(snapshot | {"services": {"rollout.0": services["rollout.0"]}})["services"]
    assert [one["behind"] for one in shown] == ["1 behind"]


def test_obstacles_stand_with_reason_count_and_since_when() -> None:
    refused = {"service": "rollout.0", "reason": "vLLM refused version 3", "count": 2, "since": 7.0}
    snapshot = make_snapshot() | {"obstacles": [refused | {"blocks": True}]}
    assert view(snapshot)["obstacles"] == [
        {
            "node": "replicas",
            "service": "rollout.0",
            "text": "vLLM refused version 3.",
            "count": "2 times in a row",
            "since": 7.0,
            "tone": "bad",
        }
    ]
    assert view(snapshot | {"state": "failed"})["obstacles"] == []


FIGURES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[str, ...]]] = {
    "snapshot": (lambda one: one, ("time_left_s", "accuracy")),
    "service": (lambda one: one["services"]["rollout.0"], ("heartbeat_age_s",)),
    "event": (lambda one: one["events"][0], ("time",)),
    "metrics": (lambda one: one["metrics"], tuple(make_snapshot()["metrics"])),
}


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e308, 10**400], ids=["nan", "inf", "huge", "beyond"])
@pytest.mark.parametrize("place", FIGURES)
def test_a_figure_that_is_no_number_leaves_the_others_on_the_page(place: str, value: float) -> None:
    find, names = FIGURES[place]
    if value == 10**400 and place in ("snapshot", "service"):
        broken = make_snapshot()
        find(broken)[names[0]] = value
        with pytest.raises(WireError):
            snapshot_of(broken)
        return
    for name in names:
        snapshot = make_snapshot()
        find(snapshot)[name] = value
        json.dumps(view_of(snapshot_of(snapshot)), allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_field_that_must_be_a_number_and_is_none_leaves_the_rest_on_the_page(value: float) -> None:
    snapshot = make_snapshot()
    snapshot["ledger"]["journal"] = {"kind": "file", "is_away": False, "fsync": "batch", "unsynced_s": value}
    snapshot["obstacles"] = [{"service": "buffer.0", "cause": "disk_full", "reason": "full", "since": value}]
    found = snapshot_of(snapshot)
    assert found.ledger is not None and isinstance(found.ledger.journal, FileJournalStatus)
    assert not math.isfinite(found.ledger.journal.unsynced_s), "it is told as it is"
    cleaned = shown(found)
    assert cleaned.ledger is not None and isinstance(cleaned.ledger.journal, FileJournalStatus)
    assert (cleaned.ledger.journal.unsynced_s, cleaned.obstacles[0].since) == (0.0, 0.0)
    assert cleaned.ledger.issued == found.ledger.issued and cleaned.services.keys() == found.services.keys()
    json.dumps(view_of(found), allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, -math.inf, "many"])
@pytest.mark.parametrize("name", ["step", "steps", "max_lag", "ready_groups"])
def test_a_snapshot_whose_counts_are_no_numbers_is_refused(name: str, value: object) -> None:
    with pytest.raises(WireError, match=rf"cannot be read: .*{name}"):
        snapshot_of(make_snapshot() | {name: value})
