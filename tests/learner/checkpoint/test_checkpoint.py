"""Checkpoints: one atomic cut, or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.core.errors import CheckpointError
from learner.checkpoint import CheckpointStore, Commit, Cut
from learner.checkpoint.pieces import whole
from learner.checkpoint.snapshot import KINDS, PieceState, Snapshot
from learner.checkpoint.store import FORMAT, MANIFEST, ForeignFormatError, _digest

PAGE_BYTES = 4096
FILES = ("rank-00000.safetensors", "rank-00000.json", "critic/rank-00000.safetensors", MANIFEST)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def snapshot(fill: float, rank: int = 0, num_rows: int = 16) -> Snapshot:
    pieces = tuple(
        PieceState(
            whole(f"layer.{i}.weight", (num_rows, 8)),
            {kind: torch.full((num_rows * 8,), fill) for kind in KINDS},
            fill,
        )
        for i in range(9)
    )
    return Snapshot(rank, {"world_size": 1}, pieces, {"cpu": torch.get_rng_state()}, {"lr": 0.1})


def write(store: CheckpointStore, step: int, cut: Cut | None = None) -> Commit:
    folder = store.prepare(step)
    for part in (folder, folder / "critic"):
        snapshot(float(step)).write(part)
    return Commit(token=1, step=step, digest=store.seal(step, 1, cut))


def test_a_committed_checkpoint_is_valid(store: CheckpointStore) -> None:
    store.verify(write(store, 3))


def test_the_newest_valid_one_is_chosen(store: CheckpointStore) -> None:
    commits = [write(store, 3), write(store, 6)]
    assert store.newest_valid(commits, print) == commits[1]


def refuses(store: CheckpointStore, commits: list[Commit]) -> bool:
    """Whether the newest is refused, for its commit and by itself, and the one before is chosen."""
    warnings: list[str] = []
    chosen = store.newest_valid(commits, warnings.append)
    with pytest.raises(CheckpointError):
        store.verify_whole(commits[-1].step)
    return chosen == commits[-2] and len(warnings) == 1 and "step-00000006" in warnings[0]


@pytest.mark.parametrize("name", FILES)
def test_one_torn_at_any_page_is_never_loaded_and_the_one_before_is(
    store: CheckpointStore, name: str
) -> None:
    commits = [write(store, 3), write(store, 6)]
    path = store.folder(6) / name
    data = path.read_bytes()
    for end in range(0, len(data), PAGE_BYTES):
        path.write_bytes(data[:end])
        assert refuses(store, commits), f"{name} of {len(data)} bytes torn at {end}"
    path.write_bytes(data)
    assert store.newest_valid(commits, print) == commits[1]


@pytest.mark.parametrize("name", FILES)
def test_one_with_a_flipped_bit_is_never_loaded_and_the_one_before_is(
    store: CheckpointStore, name: str
) -> None:
    commits = [write(store, 3), write(store, 6)]
    path = store.folder(6) / name
    data = path.read_bytes()
    for at in {*range(0, len(data), max(1, len(data) // 60)), len(data) - 1}:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert refuses(store, commits), f"bit {at % 8} of byte {at} of {name}"


def add_a_file(folder: Path) -> None:
    (folder / "rank-00001.json").write_bytes(b"x")


def remove_a_file(folder: Path) -> None:
    (folder / "rank-00000.json").unlink()


def add_to_a_file(folder: Path) -> None:
    with (folder / "rank-00000.safetensors").open("ab") as file:
        file.write(b"\0")


def remove_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize("harm", [add_a_file, remove_a_file, add_to_a_file, remove_the_manifest])
def test_one_with_more_or_less_than_was_committed_is_never_loaded(
    store: CheckpointStore, harm: Callable[[Path], None]
) -> None:
    commits = [write(store, 3), write(store, 6)]
    harm(store.folder(6))
    assert refuses(store, commits)


def test_one_that_the_journal_does_not_know_is_not_used(store: CheckpointStore) -> None:
    known = write(store, 3)
    write(store, 6)
    assert store.newest_valid([known], print) == known


def test_one_of_another_write_than_the_committed_is_not_used(store: CheckpointStore) -> None:
    commits = [write(store, 3), write(store, 6)]
    write(store, 6, Cut(version=8))
    store.verify_whole(6)
    assert store.newest_valid(commits, lambda text: None) == commits[0]


@pytest.mark.parametrize(("found", "advice"), [(FORMAT + 1, "A newer asyncrl 0"), (1, "An older asyncrl 0")])
def test_another_format_is_refused_and_no_older_checkpoint_stands_in(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, found: int, advice: str
) -> None:
    older = write(store, 3)
    monkeypatch.setattr("learner.checkpoint.store.FORMAT", found)
    newer = write(store, 6)
    monkeypatch.undo()
    with pytest.raises(
        ForeignFormatError, match=f"format {found}, this asyncrl reads 2 to {FORMAT}. {advice}"
    ):
        store.newest_valid([older, newer], print)


@pytest.mark.parametrize(
    ("field", "message"), [("format", "torn or altered"), ("controllers", "is not understood")]
)
def test_a_manifest_whose_fields_are_of_other_types_is_refused(
    store: CheckpointStore, field: str, message: str
) -> None:
    write(store, 3)
    path = store.folder(3) / MANIFEST
    body = json.loads(path.read_text())["body"] | {field: "3"}
    path.write_text(json.dumps({"body": body, "digest": _digest(body)}))
    with pytest.raises(CheckpointError, match=message):
        store.verify_whole(3)


def test_the_shapes_of_a_checkpoint_are_those_that_its_rank_wrote(store: CheckpointStore) -> None:
    write(store, 3)
    assert store.shapes(3) == {f"layer.{i}.weight": (16, 8) for i in range(9)}
    (store.folder(3) / "rank-00000.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"rank-00000\.json cannot be read"):
        store.shapes(3)


def test_the_manifest_of_the_first_format_is_known_as_such(store: CheckpointStore) -> None:
    write(store, 3)
    (store.folder(3) / MANIFEST).write_text(json.dumps({"step": 3, "token": 1, "files": {}}))
    with pytest.raises(ForeignFormatError, match="format 1"):
        store.verify_whole(3)


def test_a_checkpoint_that_format_2_wrote_is_resumed_from_and_stays_byte_for_byte(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "stored", tmp_path / "old")
    store = CheckpointStore(tmp_path / "old", keep=3)
    commit = Commit(2, 4, "a0412707e398cea5794569f5881d4897")
    assert store.newest_valid([commit], pytest.fail) == commit
    assert store.cut(4) == Cut(7, {"guard": {"lr_scale": 0.5}})
    store.verify(commit)


def test_version_and_controllers_belong_to_the_cut(store: CheckpointStore) -> None:
    cut = Cut(version=7, controllers={"kl": {"coefficient": 0.001}})
    write(store, 3, cut)
    assert store.cut(3) == cut


def test_the_newest_are_kept_and_a_later_abandoned_branch_is_not(store: CheckpointStore) -> None:
    for step in (3, 6, 9):
        write(store, step)
    assert store.kept_after(6, store.steps()) == [3, 6]
    store.remove_all_but(store.kept_after(6, store.steps()))
    assert store.steps() == [3, 6]


def test_one_that_the_journal_does_not_know_takes_no_place_of_those_to_resume_from(
    store: CheckpointStore,
) -> None:
    for step in (2, 4, 5):  # the learner died before 4 was committed
        write(store, step)
    assert store.kept_after(5, committed=[2]) == [2, 5]


def test_the_best_are_kept_besides_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_best=2)
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.7), (5, float("nan"))):
        write(store, step)
        store.note_score(step, score)
        store.remove_all_but(store.kept_after(step, store.steps()))
    assert store.best() == [2, 4]
    assert store.steps() == [2, 4, 5]
    assert store.kept_after(5, store.steps()) == [5], "the journal needs the groups after the newest only"


def test_a_better_one_of_an_abandoned_branch_is_not_kept_nor_is_its_score(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, keep_best=1)
    for step, score in ((2, 0.3), (4, 0.9)):
        write(store, step)
        store.note_score(step, score)
    write(store, 3)
    store.remove_all_but(store.kept_after(3, store.steps()))
    assert store.steps() == [2, 3]
    write(store, 4)
    assert store.best() == [2]


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"a": 1}', '{"3": null}'])
def test_damaged_scores_are_no_scores(store: CheckpointStore, tmp_path: Path, text: str) -> None:
    write(store, 3)
    (tmp_path / "checkpoints" / "scores.json").write_text(text)
    assert store.scores() == {}
    store.note_score(3, 0.5)
    assert store.scores() == {3: 0.5}


def test_what_an_interrupted_write_left_is_removed(store: CheckpointStore, tmp_path: Path) -> None:
    write(store, 3)
    store.prepare(6)
    store.remove_all_but([3])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
