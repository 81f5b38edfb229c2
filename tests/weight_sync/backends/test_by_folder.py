"""Versions through a folder, to real processes: beside gloo, with members and with folders that fail."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.cluster import (
    HASTY,
    Cluster,
    Fault,
    files_under,
    load,
    model,
    running_cluster,
    take,
    wait_until,
)
from weight_sync.publisher_client import PublisherClient


def objects(folder: Path) -> dict[str, list[Path]]:
    """Return the stored objects by version."""
    found: dict[str, list[Path]] = {}
    for path in (path for path in files_under(folder) if path.match("asyncrl-*/*/*/*")):
        found.setdefault(path.parent.name, []).append(path)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    with running_cluster(parallelism=4, folder=f"file://{folder}", **HASTY) as started:
        yield started


def start(cluster: Cluster, *names: str, gloo: tuple[str, ...] = ()) -> None:
    for name in names:
        cluster.start(name, by_folder=name not in gloo)
    cluster.wait_for_members(*names)


def publish(client: PublisherClient, number: int) -> None:
    assert client.publish(PolicyVersion(number, number - 1), model(number))


def test_versions_reach_members_in_a_group_and_through_the_folder_and_are_stored_once(cluster, folder):
    names = ("receiver.0", "receiver.1", "receiver.2")
    start(cluster, *names, gloo=names[:1])
    client = cluster.publisher_client()
    for number in (1, 2):
        publish(client, number)
        for name in names:
            assert load(cluster.children[name], serving=number - 1).number == number
    wait_until(lambda: list(objects(folder)) == ["2"], "the older version to be removed")
    stored = {path: path.stat().st_mtime_ns for path in objects(folder)["2"]}
    assert len(stored) == 3
    start(cluster, "receiver.3")
    assert load(cluster.children["receiver.3"]).number == 2
    assert stored == {path: path.stat().st_mtime_ns for path in objects(folder)["2"]}
    cluster.publisher.end()
    assert not list(folder.glob("asyncrl-*/*"))


@pytest.mark.long
def test_of_three_readers_one_is_killed_one_is_late_one_finds_another_object_and_none_holds_up_another(
    cluster, folder
):
    gate = folder.parent / "gate"
    cluster.start("receiver.0", Fault("kill", 2), by_folder=True)
    cluster.start("receiver.1", Fault("slow", 2, None, seconds=1.0), by_folder=True)
    cluster.start("receiver.2", Fault("hold", 2, gate=gate), by_folder=True)
    start(cluster, "receiver.3", gloo=("receiver.3",))
    names = [f"receiver.{n}" for n in range(4)]
    cluster.wait_for_members(*names)
    client = cluster.publisher_client()
    publish(client, 1)
    assert [load(cluster.children[name]).number for name in names] == [1] * 4
    publish(client, 2)
    wait_until(gate.exists, "the third to have read its first bucket")
    assert load(cluster.children["receiver.3"], serving=1).number == 2
    for path in objects(folder)["2"]:
        path.write_bytes(bytes(path.stat().st_size))
    gate.unlink()
    wait_until(lambda: "digest" in cluster.members()["receiver.2"].error, "the wrong object to be blamed")
    wait_until(gate.exists, "the next try")
    gate.unlink()
    assert load(cluster.children["receiver.2"], serving=1).number == 2, "it was stored afresh"
    assert load(cluster.children["receiver.1"], serving=1).number == 2
    wait_until(lambda: "silent" in cluster.members()["receiver.0"].error, "the dead one to be blamed")
    assert cluster.members()["receiver.1"].error == cluster.members()["receiver.3"].error == ""
    publish(client, 3)
    assert [load(cluster.children[name], serving=2).number for name in names[1:]] == [3] * 3


@pytest.mark.long
def test_without_its_folder_a_run_goes_on_over_gloo_and_readers_catch_up_when_it_is_back(cluster, folder):
    start(cluster, "receiver.0", "receiver.1", gloo=("receiver.0",))
    client = cluster.publisher_client()
    publish(client, 1)
    assert [load(cluster.children[name]).number for name in ("receiver.0", "receiver.1")] == [1, 1]
    shutil.rmtree(folder)
    folder.write_text("no folder any more")
    for number in (2, 3, 4):
        publish(client, number)
        assert load(cluster.children["receiver.0"], serving=number - 1).number == number
    said = "store: file://"
    wait_until(lambda: cluster.members()["receiver.1"].error.startswith(said), "the reader to say why")
    assert cluster.coordinator.status().culprit.startswith(f"publisher: {said}")
    assert "NotADirectoryError" in cluster.coordinator.status().culprit
    assert take(cluster.children["receiver.1"], serving=1, wait_s=0.2) is None
    folder.unlink()
    assert load(cluster.children["receiver.1"], serving=1).number == 4
    assert cluster.members()["receiver.0"].error == ""


@pytest.mark.long
def test_what_a_publisher_that_was_killed_has_stored_is_removed_by_the_next_one(cluster, folder):
    start(cluster, "receiver.0")
    publish(cluster.publisher_client(), 1)
    assert load(cluster.children["receiver.0"]).number == 1
    (left,) = folder.glob("asyncrl-*/*")
    (left / "notes.txt").write_text("of somebody else")
    cluster.publisher.kill()
    cluster.start("publisher.0")
    wait_until(lambda: not any(left in path.parents for path in objects(folder).get("1", [])), "the removal")
    start(cluster, "receiver.1")
    assert load(cluster.children["receiver.1"]).number == 1
    assert (left / "notes.txt").exists()


@pytest.mark.long
def test_differences_go_through_the_folder(folder):
    with running_cluster(parallelism=4, folder=f"file://{folder}", encoding="delta", **HASTY) as cluster:
        start(cluster, "receiver.0", "receiver.1")
        client = cluster.publisher_client()
        for number in (1, 2, 3):
            tensors = model(1)
            tensors[0][1][0, number] += 1.0
            assert client.publish(PolicyVersion(number, number - 1), tensors)
            for name in ("receiver.0", "receiver.1"):
                staged = take(cluster.children[name], serving=number - 1)
                assert staged is not None and staged.version.number == number
                cluster.children[name].client.call("loaded", deadline_s=60, number=number, ok=True, error="")
        assert cluster.publisher.status().counters["deltas"] > 0
        sizes = sum(path.stat().st_size for path in objects(folder)["3"])
    assert sizes < 2000, "a version takes 12 KiB"
