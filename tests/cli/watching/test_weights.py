"""`asyncrl inspect weights` on real coordinators, publishers and receivers, living and ended."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from asyncrl.cli.app import app
from asyncrl.control.api.server import ControlApi
from asyncrl.control.machine.processes import RUN_VARIABLE
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.record.syncing import weights_answer, weights_metrics
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.errors import ConfigError
from asyncrl.core.metrics import unknown_names
from asyncrl.core.staleness import PolicyVersion
from asyncrl.core.status.statuses import Statuses
from tests.cli.test_audit import make_config
from tests.statuses import statuses_of
from tests.weight_sync.cluster import (
    Child,
    Cluster,
    Fault,
    load,
    model,
    report_loaded,
    running_cluster,
    take,
    wait_until,
)


def ask(runs_dir: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["inspect", "weights", *words, "--dir", str(runs_dir)])


def told(children: Mapping[str, Child]) -> dict[str, object]:
    """Return what the run's supervisor would answer."""
    statuses = Statuses({name: child.status() for name, child in children.items()})
    found: dict[str, object] = msgspec.to_builtins(weights_answer(statuses))
    return found


@contextmanager
def reachable(cluster: Cluster, folder: Path) -> Iterator[None]:
    """The run's control API, as its supervisor opens it, answering from the services' statuses."""
    with subprocess.Popen(["sleep", "60"], env={RUN_VARIABLE: "told", "PATH": "/usr/bin:/bin"}) as head:
        children = {
            name: child for name, child in cluster.children.items() if not name.startswith("receiver")
        }
        api = ControlApi(
            0,
            "key",
            {"GET /weights": lambda _: told(children)},
        )
        live = {"url": api.url, "key": "key", "pid": head.pid, "run_id": "told"}
        write_json(RunDir(folder).live, live)
        try:
            yield
        finally:
            api.close()
            head.kill()


def sync_with_one_failure(cluster: Cluster) -> None:
    """Version 1 reaches both; version 2 comes to one with a flipped byte first."""
    fault = Fault("flip", number=2, bucket=1)
    bad, good = cluster.start("receiver.0", fault=fault), cluster.start("receiver.1")
    cluster.wait_for_members("receiver.0", "receiver.1")
    publisher_client = cluster.publisher_client()
    publisher_client.publish(PolicyVersion(1, 0), model(1))
    assert load(good).number == load(bad).number == 1
    publisher_client.publish(PolicyVersion(2, 1), model(2))
    assert load(good, 1).number == 2
    wait_until(lambda: "receiver.0" in cluster.coordinator.status().culprit, "the digest to be refused")
    wait_until(lambda: cluster.members()["receiver.1"].state == "READY", "receiver.1 to be ready")


def check_metrics(cluster: Cluster) -> None:
    names = ("weight_sync.0", "publisher.0")
    metrics = weights_metrics(Statuses({name: cluster.children[name].status() for name in names}))
    assert unknown_names(metrics) == {}
    assert metrics["weights/published"] == 2.0 and metrics["weights/culprits"] >= 1.0
    assert metrics["weights/failed/digest"] >= 1.0 and metrics["weights/fenced"] <= 1.0
    assert metrics["weights/transfer_s"] > 0.0 and metrics["weights/bytes"] > 0.0


def test_the_gap_of_each_replicas_probe_is_a_metric_and_of_a_large_fleet_the_largest_alone():
    def metrics_of(gaps: list[float | None]) -> dict[str, float]:
        replicas = {f"rollout.{index}": {"version": 1, "probe_gap": gap} for index, gap in enumerate(gaps)}
        return {name: gap for name, gap in weights_metrics(statuses_of(replicas)).items() if "gap" in name}

    assert metrics_of([None, None]) == {}
    few = metrics_of([1e-6, None, 3e-6])
    assert few == {
        "weights/probe_gap/0": 1e-6,
        "weights/probe_gap/2": 3e-6,
        "weights/probe_gap_max": 3e-6,
    }
    assert unknown_names(few) == {}
    assert metrics_of([1e-6] * 99 + [2e-6]) == {"weights/probe_gap_max": 2e-6}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "told"
    folder.mkdir()
    (folder / "resolved.yaml").write_text(dump_resolved(make_config(tmp_path, {"journal": "none"})))
    return folder


def test_a_living_run_is_told_by_its_coordinator_and_an_ended_one_by_the_journal(folder: Path):
    with running_cluster(socket_dir=folder, parallelism=2) as cluster:
        sync_with_one_failure(cluster)
        check_metrics(cluster)
        with reachable(cluster, folder):
            living = json.loads(ask(folder.parent, "told", "--json").stdout)
        for name in ("receiver.1", "receiver.0", "publisher.0", "weight_sync.0"):
            cluster.children[name].end()
    ended = json.loads(ask(folder.parent, "--json").stdout)
    assert (living["told_by"], ended["told_by"]) == ("coordinator", "journal")
    for report in (living, ended):
        assert report["version"] == [2, 1] and len(report["digest"]) == 32
        assert report["num_bytes"] == living["num_bytes"] > 0
        assert report["replicas"]["receiver.1"]["version"] == 2
        assert report["replicas"]["receiver.1"]["last_swap_s"] > 0.0
        assert report["failures"][0]["culprit"] == "receiver.0" and report["failures"][0]["cause"] == "digest"
        assert report["rounds"][0]["parts"] == {"receiver.0": "VERIFIED", "receiver.1": "VERIFIED"}
        assert report["membership"]["number"] and report["counters"]["rounds_failed"] >= 1
    assert living["replicas"]["receiver.1"]["state"] == "READY"
    assert ended["replicas"]["receiver.1"]["state"] == "RETIRED"
    assert living["digest"] == ended["digest"]
    text = ask(folder.parent, "told").stdout
    assert "version     2 (step 1)" in text and "digest" in text and "receiver.0 FAILED" in text


def test_a_version_that_an_engine_refused_counts_as_failed_though_its_bytes_arrived(folder: Path):
    with running_cluster(socket_dir=folder) as cluster:
        receiver = cluster.start("receiver.0")
        cluster.wait_for_members("receiver.0")
        cluster.publisher_client().publish(PolicyVersion(1, 0), model(1))
        staged = take(receiver, 0)
        assert staged is not None
        for _ in range(2):
            report_loaded(receiver, 1, ok=False, error="the probe does not match")
            assert take(receiver, 0) is not None, "it loads again from staging"
        wait_until(lambda: cluster.coordinator.status().counters.get("failed_loads") == 2, "two refusals")
        with reachable(cluster, folder):
            living = json.loads(ask(folder.parent, "told", "--json").stdout)
        for name in ("receiver.0", "publisher.0", "weight_sync.0"):
            cluster.children[name].end()
    ended = json.loads(ask(folder.parent, "--json").stdout)
    for report in (living, ended):
        assert (report["counters"]["rounds_failed"], report["counters"]["failed_loads"]) == (1, 2)
        (round_,) = report["rounds"]
        assert round_["parts"] == {"receiver.0": "REFUSED"}
        assert round_["cause"] == "load refused: the probe does not match"
    text = ask(folder.parent, "told").stdout
    assert "rounds_failed 1" in text and "receiver.0 REFUSED" in text


def test_a_run_without_weight_sync_and_a_folder_without_runs_are_said(folder: Path, tmp_path: Path):
    assert "has no weight_sync.jsonl" in str(ask(tmp_path, "told").exception)
    assert "no run 'other'" in str(ask(tmp_path, "other").exception)
    nothing = ask(tmp_path / "told").exception
    assert isinstance(nothing, ConfigError) and "there is no run in" in str(nothing)
