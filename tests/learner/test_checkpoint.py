"""Checkpoints: one atomic cut, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.errors import CheckpointError
from learner.checkpoint import CheckpointStore, Commit


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def write(store: CheckpointStore, step: int) -> Commit:
    folder = store.prepare(step)
    (folder / "rank0.bin").write_bytes(bytes([step]) * 5000)
    return Commit(token=1, step=step, digest=store.seal(step, token=1))


def test_a_committed_checkpoint_is_valid(store: CheckpointStore) -> None:
    store.verify(write(store, 3))


def test_the_newest_valid_one_is_chosen(store: CheckpointStore) -> None:
    commits = [write(store, 3), write(store, 6)]
    assert store.newest_valid(commits, print) == commits[1]


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "rank0.bin").read_bytes())
    data[4321] ^= 1
    (folder / "rank0.bin").write_bytes(data)


def tear(folder: Path) -> None:
    (folder / "rank0.bin").write_bytes((folder / "rank0.bin").read_bytes()[:4000])


def add_a_file(folder: Path) -> None:
    (folder / "rank1.bin").write_bytes(b"x")


def remove_a_file(folder: Path) -> None:
    (folder / "rank0.bin").unlink()


def change_the_manifest(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 6', '"step": 7'))


def remove_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    "harm", [flip_a_byte, tear, add_a_file, remove_a_file, change_the_manifest, remove_the_manifest]
)
def test_a_torn_or_altered_one_is_never_loaded_and_the_one_before_is(
    store: CheckpointStore, harm: Callable[[Path], None]
) -> None:
    older, newer = write(store, 3), write(store, 6)
    harm(store.folder(6))
    warnings: list[str] = []
    assert store.newest_valid([older, newer], warnings.append) == older
    assert len(warnings) == 1 and "step-00000006" in warnings[0]
    with pytest.raises(CheckpointError):
        store.verify(newer)


def test_one_that_the_journal_does_not_know_is_not_used(store: CheckpointStore) -> None:
    known = write(store, 3)
    write(store, 6)
    assert store.newest_valid([known], print) == known


def test_the_newest_are_kept_and_a_later_abandoned_branch_is_not(store: CheckpointStore) -> None:
    for step in (3, 6, 9):
        write(store, step)
    assert store.kept_after(6) == [3, 6]
    store.remove_all_but(store.kept_after(6))
    assert store.steps() == [3, 6]


def test_what_an_interrupted_write_left_is_removed(store: CheckpointStore, tmp_path: Path) -> None:
    write(store, 3)
    store.prepare(6)
    store.remove_all_but([3])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
