"""A fleet of any size as `asyncrl status`, its panel and the page show it: groups, and the worst first."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from asyncrl.cli.live import panel_of, text_of
from asyncrl.control.diagnosis.waits import FEW as FEW_NAMED
from asyncrl.control.diagnosis.waits import diagnose
from asyncrl.control.diagnosis.watchdog import FIRST_STEP_S, MAX_EDGES, Watchdog
from asyncrl.control.snapshot import ServiceView, Snapshot
from asyncrl.core.config.tree import Config
from asyncrl.core.states import ServiceState
from asyncrl.page.fleet import FEW, MAX_NODES, MAX_WORST
from asyncrl.page.http.routes import page_routes
from asyncrl.page.view import MAX_OBSTACLES, view_of
from tests.statuses import snapshot_of, statuses_of

LARGE = [FEW + 1, 256, 1024]
NEWEST = 1000
METRICS = {"weights/published": NEWEST}
READY, STARTING, DEAD = ServiceState.READY, ServiceState.STARTING, ServiceState.DEAD
CORE = ("learner.0", "buffer.0", "weight_sync.0", "publisher.0")


def fleet_of(num_replicas: int, **changes: dict[str, Any]) -> Snapshot:
    """Return a snapshot with eight replicas on a node; `changes`, by name, are of services."""
    services = {name: ServiceView(state=READY) for name in CORE}
    for index in range(num_replicas):
        one = ServiceView(state=READY, version=NEWEST, node=f"node{index // 8:04d}")
        services |= {f"rollout.{index}": one, f"receiver.{index}": one}
    services |= {name: replace(services[name], **changed) for name, changed in changes.items()}
    found = snapshot_of({"run": "large", "state": "running", "step": 3, "steps": 9}, metrics=METRICS)
    return replace(found, services=services)


def ill_fleet(num_replicas: int) -> Snapshot:
    """Return one in which a replica of each seven is dead, starts, or is behind, the last one by most."""
    ill: dict[str, dict[str, Any]] = {}
    for index in range(0, num_replicas - 1, 7):
        dead, starts, late = (
            {"state": DEAD},
            {"state": STARTING, "version": None},
            {"version": 998 - index % 9},
        )
        ill[f"rollout.{index}"] = (dead, starts, late)[index // 7 % 3]
    ill[f"rollout.{num_replicas - 1}"] = {"state": ServiceState.FAILED, "version": 1, "restarts": 4}
    ill[f"receiver.{num_replicas // 2}"] = {"state": ServiceState.SILENT}
    return fleet_of(num_replicas, **ill)


def groups_of(snapshot: Snapshot) -> dict[str, dict[str, int]]:
    """Return the counts of each grouping by name."""
    return {
        one["title"]: {group["name"]: int(re.sub(r"\D", "", group["count"])) for group in one["groups"]}
        for one in view_of(snapshot)["groupings"]
    }


@pytest.mark.parametrize("count", [0, 1, 8, FEW])
def test_a_small_fleet_has_a_row_for_each_service_and_no_groups(count: int) -> None:
    view = view_of(fleet_of(count))
    assert len(view["services"]) == 2 * count + len(CORE)
    assert (view["groupings"], view["num_hidden"]) == ([], 0)
    assert not any("have no line" in line for line in text_of(fleet_of(count)))


@pytest.mark.parametrize("count", LARGE)
@pytest.mark.parametrize("make", [fleet_of, ill_fleet])
def test_every_service_of_a_large_fleet_is_counted_once_in_each_grouping(count: int, make: Any) -> None:
    found = groups_of(make(count))
    titles = [*(f"rollout by {what}" for what in ("state", "version", "node")), "receiver by state"]
    assert list(found) == titles
    assert [sum(groups.values()) for groups in found.values()] == [count] * len(titles)


def test_a_replica_over_several_nodes_counts_on_each_of_them() -> None:
    over = {"node": "node0001,other", "state": DEAD}
    by_node = groups_of(fleet_of(FEW + 1, **{"rollout.0": over}))["rollout by node"]
    assert by_node["node0001, 1 unhealthy,"] == 9 and by_node["other, 1 unhealthy,"] == 1


@pytest.mark.parametrize("count", LARGE[1:])
def test_the_worst_of_a_large_fleet_have_rows_and_come_first(count: int) -> None:
    view = view_of(ill_fleet(count))
    replicas = [one for one in view["services"] if one["is_replica"]]
    assert replicas[0]["name"] == f"rollout.{count - 1}", "it failed, and is furthest behind"
    assert [one["tone"] for one in replicas] == ["bad"] * MAX_WORST
    assert [one["name"] for one in view["services"][MAX_WORST:]] == [*CORE, f"receiver.{count // 2}"]
    by_state, by_version, by_node, _ = (one["groups"] for one in view["groupings"])
    assert [one["name"] for one in by_state][:2] == ["DEAD", "FAILED"] and by_state[-1]["name"] == "READY"
    assert by_version[0]["name"] == "no version" and by_version[1]["name"].endswith("behind")
    assert by_version[-1]["name"] == "newest"
    assert "2 unhealthy" in by_node[0]["name"] and len(by_node) == MAX_NODES + 1


def test_a_replica_that_is_two_versions_behind_has_a_row_unless_it_is_pinned() -> None:
    late, held = {"version": NEWEST - 2}, {"version": NEWEST - 5, "state": ServiceState.PINNED}
    view = view_of(
        fleet_of(64, **{"rollout.7": late, "rollout.9": held, "rollout.30": {"version": NEWEST - 1}})
    )
    assert [one["name"] for one in view["services"] if one["is_replica"]] == ["rollout.7"]
    assert groups_of(fleet_of(64, **{"rollout.7": late}))["rollout by version"] == {
        "2 to 3 behind": 1,
        "newest": 63,
    }


def test_text_panel_and_payload_are_no_longer_for_a_thousand_replicas_than_for_hundreds() -> None:
    sizes = []
    for count in LARGE[1:]:
        snapshot = ill_fleet(count)
        console = Console(width=100, record=True, quiet=True)
        console.print(panel_of(snapshot))
        payload, panel = len(json.dumps(view_of(snapshot))), console.export_text().splitlines()
        sizes.append((len(text_of(snapshot)), len(panel), payload))
    (few_lines, few_panel, few_bytes), (many_lines, many_panel, many_bytes) = sizes
    assert many_lines == few_lines <= 45
    assert many_panel <= few_panel + 2 <= 40
    assert many_bytes <= few_bytes + 500 <= 10_000


def test_each_service_of_a_large_fleet_is_told_on_request(tmp_path: Any) -> None:
    snapshot = ill_fleet(256)
    lines = text_of(snapshot, is_whole=True)
    names = {line.split(" ")[0] for line in lines}
    assert {f"{kind}.{index}" for kind in ("rollout", "receiver") for index in range(256)} <= names
    assert "'asyncrl status --services' shows all" in "".join(text_of(snapshot))
    config = Config(model={"path": "m"}, data={"train": "t"}, reward={"fn": "f"}, buffer={"journal": "none"})
    answer: Any = page_routes(lambda: snapshot, config, tmp_path)["GET /services"]({})
    assert {one["name"] for one in json.loads(answer.body)} == {*snapshot.services}


@pytest.mark.parametrize("count", [MAX_OBSTACLES, MAX_OBSTACLES + 1, 200])
def test_of_many_obstacles_the_gravest_are_told_and_the_others_counted(count: int) -> None:
    told = [
        {"service": f"rollout.{index}", "cause": "service_down", "reason": "it is gone", "blocks": not index}
        for index in range(count)
    ]
    values = {"run": "large", "state": "running", "services": {}, "obstacles": told}
    obstacles = view_of(snapshot_of(values))["obstacles"]
    rest = count - MAX_OBSTACLES
    assert [one["service"] for one in obstacles[:MAX_OBSTACLES]] == [one["service"] for one in told][
        :MAX_OBSTACLES
    ]
    texts = [(one["service"], one["text"]) for one in obstacles[MAX_OBSTACLES:]]
    assert texts == ([(f"{rest} more", f"service_down {rest}")] if rest else [])


@pytest.mark.parametrize(
    ("count", "why"), [(2, "rollout.0 STARTING, rollout.1 STARTING"), (128, "128 STARTING")]
)
def test_a_bottleneck_counts_the_replicas_that_it_cannot_name(count: int, why: str) -> None:
    assert (count > FEW_NAMED) == ("rollout" not in why)
    told = {f"rollout.{index}": {"state": "STARTING"} for index in range(count)}
    assert diagnose({}, statuses_of(told)).why == f"no replica is READY: {why}"


def test_a_stall_of_a_large_fleet_names_some_waits_and_counts_the_others() -> None:
    core = {"learner.0": {"state": "READY", "step": 1}, "buffer.0": {"state": "READY", "leases": {}}}
    told = core | {f"rollout.{index}": {"state": "READY", "version": 1, "step": 1} for index in range(128)}
    watchdog, statuses = Watchdog(16), statuses_of(told)
    assert watchdog.look(0.0, statuses, is_meant_to_train=True) is None
    stall = watchdog.look(2 * FIRST_STEP_S, statuses, is_meant_to_train=True)
    assert stall is not None and len(stall.edges) == MAX_EDGES + 1
    assert stall.text.endswith(f"; {129 - MAX_EDGES} more waits")
