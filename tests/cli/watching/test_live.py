"""A run's snapshot as lines, text, a row and a panel."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from asyncrl.cli.live import fields_of, panel_of, row_of, state_line_of, state_of, table_of, text_of
from asyncrl.control.snapshot import Snapshot
from asyncrl.page.view import view_of
from tests.page.page_runs import make_snapshot
from tests.statuses import snapshot_of

ESCAPE_OR_BOX = re.compile(r"[\x1b\u2500-\u257f]")


def drawn(snapshot: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(panel_of(snapshot_of(snapshot), 120))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def words_of(value: Any) -> list[str]:
    """Return all that a view says, without what only a drawing needs."""
    if isinstance(value, dict):
        hidden = ("tone", "kind", "id", "node", "time", "edges", "progress", "fill", "is_replica", "share")
        return [word for key, one in value.items() if key not in hidden for word in words_of(one)]
    if isinstance(value, list):
        return [word for one in value for word in words_of(one)]
    return [str(value)] if isinstance(value, str) and value else []


def test_a_line_holds_step_reward_lag_rates_idle_shares_and_the_time_left() -> None:
    assert fields_of(snapshot_of(make_snapshot())) == {
        "step": "step 231/600",
        "reward": "reward 0.921",
        "lag": "lag 1.30/3",
        "rates": "tokens/s 12,228/16,817",
        "idle": "idle 4%/31%",
        "seconds": "0.09 s",
        "accuracy": "accuracy 0.812",
        "left": "12 min 14 s left",
        "bottleneck": "Bottleneck: the replicas",
    }


def test_the_text_says_every_word_and_figure_of_the_page_without_colours_or_boxes() -> None:
    snapshot = make_snapshot() | {
        "torn": ["step 240 is torn: x; going on from step 230"],
        "resumed_step": 230,
    }
    text = "\n".join(text_of(snapshot_of(snapshot)))
    view = view_of(snapshot_of(snapshot))
    missing = {word for word in words_of(view) if word not in text and word not in ("ok", "rollout.0")}
    assert missing <= {"0 %"}, "a bar of lag without tokens is not printed"
    assert not ESCAPE_OR_BOX.search(text)


def test_a_resumed_run_says_where_it_goes_on_and_that_a_newer_checkpoint_was_torn() -> None:
    torn = ["step 8 is torn: the file rank-00000.safetensors is torn or altered; going on from step 5"]
    snapshot = make_snapshot() | {"resumed_step": 5, "torn": torn}
    said = f"resumed at step 5, residue 0; {torn[0]}"
    assert said in text_of(snapshot_of(snapshot))
    assert "step 8 is torn" in drawn(snapshot)
    assert "resumed" not in "\n".join(text_of(snapshot_of(make_snapshot())))


@pytest.mark.parametrize("snapshot", [{"state": "starting"}, {"state": "stopping", "metrics": {}}, {}])
def test_a_snapshot_without_metrics_shows_its_state(snapshot: dict[str, Any]) -> None:
    state = snapshot.get("state", "\u2013")
    assert state_line_of(snapshot_of(snapshot)) == f"run: {state}"
    assert state in drawn(snapshot) and text_of(snapshot_of(snapshot))[0].startswith(f"run: {state}")


def test_the_first_step_says_nothing_of_the_learners_pace_since_its_time_holds_the_start() -> None:
    snapshot = make_snapshot()
    snapshot["metrics"]["training/is_first_after_start"] = 1.0
    assert fields_of(snapshot_of(snapshot))["rates"] == "tokens/s 12,228/\u2013"
    assert fields_of(snapshot_of(snapshot))["idle"] == "idle 4%/\u2013"


def test_the_panel_shows_progress_what_is_left_and_each_service_with_its_state() -> None:
    text = drawn(make_snapshot())
    assert "step 231/600" in text and "about 12 min 14 s left" in text
    assert "rollout.0 READY v232" in text and "rollout.1 SYNCING v230" in text
    assert "replicas 12,228, learner 16,817" in text, "the legend stands beside the figures"


def test_the_panel_shows_text_as_it_is_and_not_as_markup() -> None:
    assert "bad [red]path[/]" in drawn(make_snapshot() | {"state": "failed", "error": "bad [red]path[/]"})


def test_where_agents_reach_a_gateway_is_shown_if_there_is_one() -> None:
    snapshot = make_snapshot()
    assert "gateway" not in "\n".join([drawn(snapshot), *text_of(snapshot_of(snapshot))])
    snapshot["services"]["rollout.0"]["gateway"] = "http://127.0.0.1:8100"
    assert "http://127.0.0.1:8100" in drawn(snapshot)
    assert "http://127.0.0.1:8100" in "\n".join(text_of(snapshot_of(snapshot)))


def test_a_table_is_aligned_and_shows_nothing_as_a_dash() -> None:
    values = {"a": 1.23456789, "long": None, "d": {}}
    assert table_of(values) == [
        "a     1.235",
        "long  \u2013",
        "d     \u2013",
    ]


def test_a_run_is_a_row_of_a_table_and_what_is_unusual_stands_beside_its_state() -> None:
    unusual = make_snapshot() | {"paused": True, "health": "degraded", "bottleneck": {"who": "operator"}}
    row = row_of(snapshot_of(unusual))
    assert row["state"] == "running, paused, degraded" == state_of(snapshot_of(unusual))
    assert (row["step"], row["accuracy"], row["bottleneck"]) == ("231/600", "0.812", "operator")
    assert set(row_of(Snapshot()).values()) == {"\u2013", "\u2013/\u2013"}


def test_what_keeps_a_run_from_its_next_step_comes_right_after_its_state() -> None:
    away = {"service": "buffer.0", "reason": "Redis is away", "count": 3, "blocks": True}
    text = text_of(snapshot_of(make_snapshot() | {"obstacles": [away]}))
    assert text[0].startswith("quickstart: running, step 231 of 600")
    assert text[1] == "! buffer.0: Redis is away. (3 times in a row)"
