import io

import pytest
from rich.console import Console

from asyncrl.cli.live import bottleneck, line_of, panel_of, row_of, state_of, table_of, waiting

SNAPSHOT = {
    "run": "quickstart",
    "state": "running",
    "step": 12,
    "steps": 300,
    "metrics": {
        "critic/rewards/mean": 0.51234,
        "staleness/lag_mean": 1.25,
        "staleness/lag_max_trained": 3,
        "perf/rollout_tokens_per_s": 1234.5,
        "perf/learner_tokens_per_s": 987.0,
        "perf/rollout_idle_share": 0.05,
        "perf/learner_idle_share": 0.4,
        "timing_s/step": 0.333,
    },
    "services": {
        "rollout.0": {"state": "READY", "version": 9},
        "rollout.1": {"state": "SYNCING", "version": None},
    },
    "error": None,
    "ledger": {"issued": 200, "trained": 192, "residue": 0, "dropped": {"stale": 1}},
    "accuracy": 0.625,
}


def drawn(snapshot):
    console = Console(file=io.StringIO(), width=100)
    console.print(panel_of(snapshot))
    return console.file.getvalue()


def test_a_line_holds_step_reward_lag_rates_and_idle_shares():
    assert line_of(SNAPSHOT) == (
        "step 12/300  reward 0.512  lag 1.25/3  tokens/s 1,234/987  idle 5%/40%  0.33 s  "
        "the learner waits for the replicas  accuracy 0.625"
    )


@pytest.mark.parametrize("snapshot", [{"state": "starting"}, {"state": "stopping", "metrics": {}}, {}])
def test_a_snapshot_without_metrics_shows_its_state_only(snapshot):
    assert line_of(snapshot) == f"run: {snapshot.get('state', '-')}"
    assert snapshot.get("state", "-") in drawn(snapshot)


def test_a_missing_metric_is_a_dash():
    assert "lag -/-" in line_of({"state": "running", "metrics": {"timing_s/step": 1.0}})


def test_the_panel_shows_each_service_with_its_state_and_version():
    text = drawn(SNAPSHOT)
    assert "quickstart  running" in text
    rows = [line.strip("│ ").split() for line in text.splitlines()]
    assert ["rollout.0", "READY", "9"] in rows
    assert ["rollout.1", "SYNCING", "-"] in rows
    assert "residue 0, dropped stale=1" in text


def test_the_panel_shows_text_as_it_is_and_not_as_markup():
    assert "bad [red]path[/]" in drawn({**SNAPSHOT, "state": "failed", "error": "bad [red]path[/]"})


@pytest.mark.parametrize(
    ("learner", "replicas", "sentence"),
    [
        (0.4, 0.05, "the learner waits for the replicas"),
        (0.05, 0.4, "the replicas wait for the learner"),
        (0.2, 0.25, "neither side waits much longer than the other"),
        (None, 0.4, ""),
    ],
)
def test_it_says_who_waits_for_whom(learner, replicas, sentence):
    metrics = {"perf/learner_idle_share": learner, "perf/rollout_idle_share": replicas}
    assert waiting({"metrics": metrics}) == sentence


def test_a_table_is_aligned_and_shows_nothing_as_a_dash():
    assert table_of({"a": 1.23456789, "long": None, "d": {}}) == "a     1.235\nlong  -\nd     -"


def test_the_panel_shows_where_agents_reach_a_gateway_if_there_is_one():
    assert "gateway" not in drawn(SNAPSHOT)
    services = {"rollout.0": {"state": "READY", "version": 9, "gateway": "http://127.0.0.1:8100"}}
    assert "http://127.0.0.1:8100" in drawn({**SNAPSHOT, "services": services})


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"who": "rollout", "why": "slow", "learner_waits_for": "rollout"}, "rollout: slow"),
        (
            {"who": "weight_sync", "why": "late", "learner_waits_for": "rollout"},
            "weight_sync: late; the learner waits for rollout",
        ),
        ({"who": "", "why": "balanced", "learner_waits_for": ""}, "balanced"),
        (None, ""),
    ],
)
def test_the_bottleneck_is_told_with_whom_the_learner_waits_for(found, sentence):
    assert bottleneck({"bottleneck": found}) == sentence
    assert not sentence or sentence in drawn({**SNAPSHOT, "bottleneck": found})


def test_a_run_is_a_row_of_a_table_and_what_is_unusual_stands_beside_its_state():
    row = row_of({**SNAPSHOT, "paused": True, "health": "degraded", "bottleneck": {"who": "operator"}})
    assert (
        row["state"]
        == "running, paused, degraded"
        == state_of({**SNAPSHOT, "paused": True, "health": "degraded"})
    )
    assert (row["step"], row["accuracy"], row["bottleneck"]) == ("12/300", "0.625", "operator")
    assert set(row_of({}).values()) == {"-", "-/-"}
