"""Prometheus metrics, health checks, and the dashboard that is drawn of the metrics."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.core.metrics import METRICS, find
from asyncrl.page.http.prometheus import CONTENT_TYPE, health_answer, prometheus_name, prometheus_text
from tests.statuses import snapshot_of

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())
EXAMPLES = {
    "number": "3",
    "stage": "fetch",
    "option": "token_k1",
    "source": "openai/gsm8k",
    "metric": "mean@4/low",
}
SNAPSHOT = {
    "run": "quick",
    "state": "running",
    "health": "ok",
    "step": 7,
    "steps": 100,
    "resumed_step": 2,
    "accuracy": 0.25,
    "error": None,
    "services": {
        "rollout.0": {"state": "READY", "version": 8, "heartbeat_age_s": 0.1, "restarts": 1, "pid": 1},
        "rollout.1": {"state": "DEAD", "version": None, "heartbeat_age_s": 61.0, "restarts": 0},
        "weight_sync.0": {"state": "READY", "version": [8, 7]},
    },
    "ledger": {
        "issued": 12, "trained": 6, "dropped": {"stale": 1}, "pending": {"stored": 3, "leased": 2},
        "prompts_drawn": 11, "given_up": 0, "open": 5, "residue": 0, "stored_groups": 3,
        "journal": {"kind": "file"},
    },
}  # fmt: skip


def example_of(name: str) -> str:
    return re.sub(r"<(\w+)>", lambda word: EXAMPLES.get(word[1], "this"), name)


ROW = {example_of(metric.name): float(number) for number, metric in enumerate(METRICS)}


def scrape(snapshot, row):
    """Return {(name, labels without the run's): value}, as Prometheus reads it."""
    found = {}
    for family in text_string_to_metric_families(prometheus_text(snapshot_of(snapshot), row)):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "quick"
            key = (sample.name, frozenset(labels.items()))
            assert key not in found, "one value each"
            found[key] = sample.value
    return found


def test_every_registered_metric_of_a_row_is_there_with_its_value_meaning_and_unit():
    text = prometheus_text(snapshot_of(SNAPSHOT), ROW)
    found = scrape(SNAPSHOT, ROW)
    for number, metric in enumerate(METRICS):
        name = prometheus_name(metric.name)
        words = re.findall(r"<(\w+)>", metric.name)
        labels = frozenset((word, EXAMPLES.get(word, "this")) for word in words)
        assert found[(name, labels)] == number, metric.name
        assert re.search(rf"^# HELP {name} .*\(unit: {re.escape(metric.unit)}\)$", text, re.MULTILINE), name


def test_of_two_names_that_become_the_same_one_the_first_is_scraped():
    found = scrape(SNAPSHOT, {"mine/a b": 1.0, "mine/a_b": 2.0})
    assert found[("asyncrl_mine_a_b", frozenset())] == 1.0


def test_no_two_metrics_share_a_name():
    names = [prometheus_name(metric.name) for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(find(name) is metric for name, metric in zip(ROW, METRICS, strict=True))


def test_the_run_its_services_and_its_ledger_are_there():
    found = {(name, *sorted(labels)): value for (name, labels), value in scrape(SNAPSHOT, {}).items()}
    assert found[("asyncrl_run_state", ("state", "running"))] == 1
    assert found[("asyncrl_run_healthy",)] == 1
    assert found[("asyncrl_run_step",)] == 7
    assert found[("asyncrl_service_up", ("service", "rollout.0"))] == 1
    assert found[("asyncrl_service_up", ("service", "rollout.1"))] == 0
    assert found[("asyncrl_service_version", ("service", "weight_sync.0"))] == 8
    assert found[("asyncrl_service_restarts_total", ("service", "rollout.0"))] == 1
    assert found[("asyncrl_ledger_pending", ("state", "stored"))] == 3
    assert found[("asyncrl_ledger_dropped", ("reason", "stale"))] == 1
    assert ("asyncrl_service_version", ("service", "rollout.1")) not in found


def test_a_run_that_has_said_nothing_yet_can_be_scraped():
    found = scrape({"run": "quick", "state": "starting", "services": {}, "ledger": {}, "metrics": {}}, {})
    assert found[("asyncrl_run_healthy", frozenset())] == 1


def test_a_metric_of_a_users_own_is_there_too_and_what_is_no_number_is_not():
    found = scrape({"run": "quick"}, {"mine/my reward": 2.0, "time": 3.0, "mine/text": "x"})
    assert found[("asyncrl_mine_my_reward", frozenset())] == 2.0
    assert not any("time" in name or "text" in name for name, _ in found)


def test_the_newest_evaluation_is_there_beside_the_newest_step():
    evaluation = {"training/global_step": 4, "val-core/held_out/acc/mean@4": 0.25}
    found = scrape(SNAPSHOT | {"evaluation": evaluation}, {"training/global_step": 7})
    labels = {"source": "held_out", "variable": "acc", "metric": "mean@4"}
    assert found[("asyncrl_val_core_source_variable_metric", frozenset(labels.items()))] == 0.25
    assert found[("asyncrl_training_global_step", frozenset())] == 7


def test_a_label_may_hold_what_the_text_format_quotes():
    found = scrape(SNAPSHOT | {"services": {'a"b\\c\nd': {"state": "READY"}}}, {})
    assert ("asyncrl_service_up", frozenset({("service", 'a"b\\c\nd')})) in found


@pytest.mark.parametrize(
    ("state", "health", "expected"),
    [
        ("running", "ok", (200, "ok")),
        ("starting", "ok", (200, "ok")),
        ("running", "degraded", (503, "degraded")),
        ("failed", "ok", (503, "failed")),
        ("failed", "degraded", (503, "failed")),
        ("finished", "ok", (200, "ok")),
    ],
)
def test_health_is_200_while_the_run_is_well_and_503_otherwise(state, health, expected):
    code, body = health_answer(snapshot_of(SNAPSHOT | {"state": state, "health": health}))
    assert (code, body["status"]) == expected
    assert set(body) == {"status", "run", "state", "step", "error"}


def test_a_run_that_has_failed_is_not_well_while_it_is_being_ended():
    assert health_answer(snapshot_of(SNAPSHOT | {"state": "stopping", "error": "no memory"}))[0] == 503


def queries():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def test_every_metric_that_the_dashboard_queries_is_scraped():
    names = {name for name, _ in scrape(SNAPSHOT, ROW)}
    asked = {(title, name) for title, expr in queries() for name in re.findall(r"asyncrl_\w+", expr)}
    assert len(asked) > 30
    assert {(title, name) for title, name in asked if name not in names} == set()


def test_every_label_that_the_dashboard_names_exists():
    labels = {"run"}
    for family in text_string_to_metric_families(prometheus_text(snapshot_of(SNAPSHOT), ROW)):
        labels |= {label for sample in family.samples for label in sample.labels}
    for title, expr in queries():
        used = set(re.findall(r"(\w+)\s*=~?\s*\"", expr))
        assert used <= labels, title
        assert re.findall(r"asyncrl_\w+(?!\w|\{)", expr) == [], f"{title}: not of one run"


def test_the_panels_of_the_dashboard_have_titles_units_and_room():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = set()
    for panel in panels:
        where = panel["gridPos"]
        columns = range(where["x"], where["x"] + where["w"])
        cells = set(itertools.product(columns, range(where["y"], where["y"] + where["h"])))
        assert not cells & places, panel["title"]
        assert where["x"] + where["w"] <= 24
        places |= cells
        assert panel["title"]
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
