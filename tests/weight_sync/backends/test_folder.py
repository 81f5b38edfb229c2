"""Objects in a folder: what others can do to them, stores that fail, and how long an object stays."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError, DeadlineExceeded, SyncError
from asyncrl.core.files.private import make_secret
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.planner.plan import choose_backend
from asyncrl.planner.plan.checks import check_folder
from tests.weight_sync.cluster import WAIT_S, files_under, wait_until
from weight_sync.backends import folder as folder_module
from weight_sync.backends.contract import DigestMismatch, Group
from weight_sync.backends.folder import FolderTransport, Shelf
from weight_sync.backends.store import MAX_CALLS, Store, StoreError, open_files
from weight_sync.composition import is_here

RUNTIME = ThreadRuntime()
SECRET = make_secret()
NUM_BYTES = 5000
PASSWORD = "hunter2"
REQUIRED = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}


def until(seconds: float = WAIT_S) -> float:
    return RUNTIME.now() + seconds


def bucket_of(value: int) -> torch.Tensor:
    return torch.full((NUM_BYTES,), value, dtype=torch.uint8)


class Ends:
    """A publisher's folder at a URL, and its readers."""

    def __init__(self, url: str, secret: str = SECRET) -> None:
        self.store, self.secret = Store(RUNTIME, url), secret
        self.shelf = Shelf(RUNTIME, self.store, secret, "run")

    def transport(self, rank: int, number: int = 1) -> FolderTransport:
        made = FolderTransport(RUNTIME, self.store, self.secret, None if rank else self.shelf)
        made.form(Group(1, rank, 2, "", 0, f"{self.shelf.place}/{number}"), until())
        return made

    def store_buckets(self, *values: int, number: int = 1) -> None:
        transport = self.transport(0, number)
        for waiting in [transport.start(bucket_of(value), until(), f"digest{value}") for value in values]:
            waiting.wait()

    def read(self, value: int, number: int = 1) -> torch.Tensor:
        bucket = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        self.transport(1, number).broadcast(bucket, until(), f"digest{value}")
        return bucket


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(f"file://{tmp_path}/shared")


@pytest.mark.parametrize("url", ["file://{}/shared", "memory://{}/shared"])
def test_every_reader_reads_every_bucket_whatever_the_order(url: str, tmp_path: Path) -> None:
    ends = Ends(url.format(tmp_path))
    ends.store_buckets(1, 2, 3)
    for value in (3, 1, 2, 1):
        assert torch.equal(ends.read(value), bucket_of(value))
    ends.shelf.close()
    assert not files_under(tmp_path)


def test_who_reads_the_folder_learns_no_weight_and_no_digest(ends: Ends, tmp_path: Path) -> None:
    ends.store_buckets(7)
    (path,) = files_under(tmp_path)
    assert bytes([7] * 16) not in path.read_bytes() and "digest" not in str(path.relative_to(tmp_path))
    assert path.stat().st_mode & 0o077 == 0 or path.parents[2].stat().st_mode & 0o077 == 0


def swap(one: Path, other: Path) -> None:
    """Put each of two objects into the other's place: both are of the publisher."""
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def flip(one: Path, other: Path) -> None:
    data = bytearray(one.read_bytes())
    data[-1] ^= 1
    one.write_bytes(data)


def cut(one: Path, other: Path) -> None:
    one.write_bytes(one.read_bytes()[:100])


def inflate(one: Path, other: Path) -> None:
    """A terabyte, of which nothing is on the disk: who reads it whole has no memory left."""
    os.truncate(one, 1 << 40)


@pytest.mark.parametrize("change", [swap, flip, cut, inflate])
def test_an_object_that_is_not_the_one_that_was_stored_is_refused(
    change: Callable[[Path, Path], None], ends: Ends, tmp_path: Path
) -> None:
    ends.store_buckets(1, 2)
    one, other = files_under(tmp_path)
    change(one, other)
    refused = 0
    for value in (1, 2):
        try:
            assert torch.equal(ends.read(value), bucket_of(value))
        except DigestMismatch:
            refused += 1
    assert refused == (2 if change is swap else 1)


def test_an_object_of_another_version_or_of_who_lacks_the_secret_is_refused(
    ends: Ends, tmp_path: Path
) -> None:
    ends.store_buckets(1)
    ends.store_buckets(1, number=2)
    older, newer = files_under(tmp_path)
    newer.write_bytes(older.read_bytes())
    with pytest.raises(DigestMismatch, match="is not what the publisher stored"):
        ends.read(1, number=2)
    forged = folder_module.Seal(make_secret()).close(f"{ends.shelf.place}/2/{newer.name}", bucket_of(1))
    newer.write_bytes(forged)
    with pytest.raises(DigestMismatch):
        ends.read(1, number=2)


def test_an_object_that_somebody_has_removed_is_a_failure_of_the_store_and_is_stored_afresh(
    ends: Ends, tmp_path: Path
) -> None:
    ends.shelf.hold(1, 1, is_afresh=False)
    ends.store_buckets(1)
    files_under(tmp_path)[0].unlink()
    with pytest.raises(StoreError, match="is gone"):
        ends.read(1)
    ends.store_buckets(1)
    assert not files_under(tmp_path), "it is thought to be there"
    ends.shelf.hold(2, 1, is_afresh=True)
    ends.store_buckets(1)
    assert torch.equal(ends.read(1), bucket_of(1))


class FailingFiles(MemoryFileSystem):
    """A scripted store, which fails as it is told to; its errors hold a password."""

    protocol = "failing"
    store: dict[str, Any] = {}
    failure: Exception | None = None
    gate: ThreadEvent | None = None

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        super().pipe_file(path, value[:10])
        self._strike()
        super().pipe_file(path, value)

    def cat_file(self, path: str, **kwargs: Any) -> Any:
        self._strike()
        return super().cat_file(path, **kwargs)

    def _strike(self) -> None:
        if FailingFiles.gate is not None:
            FailingFiles.gate.wait(WAIT_S)
        if FailingFiles.failure is not None:
            raise FailingFiles.failure


@pytest.fixture
def failing() -> Iterator[type[FailingFiles]]:
    fsspec.register_implementation("failing", FailingFiles, clobber=True)
    yield FailingFiles
    if FailingFiles.gate is not None:
        FailingFiles.gate.set()
    FailingFiles.failure, FailingFiles.gate = None, None
    FailingFiles.store.clear()


FAILURES = {
    "OSError (No space left on device)": OSError(28, PASSWORD),
    "PermissionError (Permission denied)": PermissionError(13, f"https://user:{PASSWORD}@store"),
    "ValueError": ValueError(f"signature {PASSWORD} has expired"),
}


@pytest.mark.parametrize("words", FAILURES)
def test_a_store_that_refuses_is_told_in_words_without_those_of_its_driver_and_leaves_no_draft(
    words: str, failing: type[FailingFiles]
) -> None:
    ends = Ends("failing://bucket")
    ends.shelf.claim().wait(until(), WAIT_S)
    failing.failure = FAILURES[words]
    with pytest.raises(StoreError) as found:
        ends.store_buckets(1)
    assert found.value.message == f"failing://bucket: {words}"
    assert not failing.store
    failing.failure = None
    ends.store_buckets(1)
    failing.failure = FAILURES[words]
    with pytest.raises(StoreError) as found:
        ends.read(1)
    assert words in str(found.value) and PASSWORD not in str(found.value)


def test_a_store_that_does_not_answer_is_given_up_and_is_asked_only_so_much(
    failing: type[FailingFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends("failing://bucket")
    ends.store_buckets(1)
    monkeypatch.setattr(folder_module, "PATIENCE_S", 0.05)
    failing.gate = ThreadEvent()
    with pytest.raises(StoreError, match=r"did not give an object within 0\.1 s"):
        ends.read(1)
    reader = ends.transport(1)
    waiting = [reader.start(bucket_of(0), until(), "digest1") for _ in range(MAX_CALLS - 1)]
    with pytest.raises(StoreError, match=f"{MAX_CALLS} calls have no answer"):
        reader.start(bucket_of(0), until(), "digest1")
    monkeypatch.setattr(folder_module, "PATIENCE_S", WAIT_S)
    reader.abort()
    began = RUNTIME.now()
    with pytest.raises(SyncError, match="was aborted"):
        waiting[0].wait()
    assert RUNTIME.now() - began < WAIT_S / 4
    failing.gate.set()
    failing.gate = None
    wait_until(lambda: ends.store._num_calls == 0, "the calls to end")
    assert torch.equal(ends.read(1), bucket_of(1))


def test_a_transfer_without_time_or_after_its_end_is_refused(ends: Ends) -> None:
    reader = ends.transport(1)
    with pytest.raises(DeadlineExceeded):
        reader.start(bucket_of(0), until(-1.0), "digest1")
    reader.close()
    with pytest.raises(SyncError, match="not usable"):
        reader.start(bucket_of(0), until(), "digest1")


def test_a_version_is_stored_once_and_stays_while_a_round_reads_it_or_it_is_the_newest(
    ends: Ends, tmp_path: Path
) -> None:
    def stored() -> set[str]:
        return {path.parent.name for path in files_under(tmp_path)}

    for round_id, number in ((1, 1), (2, 1), (3, 2)):
        ends.shelf.hold(round_id, number, is_afresh=False)
        ends.store_buckets(number, number=number)
    first = min(files_under(tmp_path))
    written = first.stat().st_mtime_ns
    ends.store_buckets(1, number=1)
    assert first.stat().st_mtime_ns == written
    ends.shelf.release(1)
    ends.shelf.release(3)
    assert stored() == {"1", "2"}
    ends.shelf.release(2)
    wait_until(lambda: stored() == {"2"}, "the older version to be removed")


def test_a_version_that_was_removed_is_not_stored_again_by_a_thread_that_comes_late(
    ends: Ends, tmp_path: Path
) -> None:
    for number in (1, 2):
        ends.shelf.hold(number, number, is_afresh=False)
        ends.store_buckets(number, number=number)
    ends.shelf.release(1)
    wait_until(lambda: {path.parent.name for path in files_under(tmp_path)} == {"2"}, "the removal")
    with pytest.raises(SyncError, match="version 1 is needed no more"):
        ends.store_buckets(3, number=1)


def test_the_service_does_not_wait_while_a_bucket_is_sealed(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_sealing, goes_on, close = threading.Event(), threading.Event(), ends.shelf._seal.close

    def close_slowly(name: str, bucket: torch.Tensor) -> bytes:
        is_sealing.set()
        assert goes_on.wait(WAIT_S)
        return close(name, bucket)

    monkeypatch.setattr(ends.shelf._seal, "close", close_slowly)
    ends.shelf.hold(1, 1, is_afresh=False)
    storing = threading.Thread(target=ends.store_buckets, args=(1,))
    storing.start()
    assert is_sealing.wait(WAIT_S)
    other = threading.Thread(target=ends.shelf.hold, args=(2, 2), kwargs={"is_afresh": False})
    other.start()
    other.join(WAIT_S / 4)
    has_ended = not other.is_alive()
    goes_on.set()
    storing.join(WAIT_S)
    other.join(WAIT_S)
    assert has_ended


def test_the_next_publisher_removes_what_one_that_died_has_left_and_nothing_else(
    ends: Ends, tmp_path: Path
) -> None:
    ends.store_buckets(1)
    draft = files_under(tmp_path)[0].with_suffix(".0a1b2c3d.part")
    draft.write_bytes(b"half")
    notes = tmp_path / "shared/run/notes.txt"
    notes.write_text("of somebody else")
    Ends(f"file://{tmp_path}/shared").store_buckets(2)
    (kept,) = (path for path in files_under(tmp_path) if path != notes)
    assert notes.exists() and ends.shelf.place.rpartition("/")[2] not in str(kept)


def test_a_folder_that_others_could_write_to_is_not_used(ends: Ends, tmp_path: Path) -> None:
    ends.store_buckets(1)
    (tmp_path / "shared/run").chmod(0o777)
    with pytest.raises(StoreError, match="is no folder private to this user"):
        Ends(f"file://{tmp_path}/shared").store_buckets(1)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nowhere://bucket", "nowhere:// is no scheme that fsspec knows"),
        (f"unpackaged://user:{PASSWORD}@bucket", "the fsspec package for unpackaged:// is not installed"),
    ],
)
def test_a_url_that_cannot_be_opened_here_is_a_config_error_in_words(url: str, words: str) -> None:
    fsspec.register_implementation("unpackaged", "nobodys_package.Files", clobber=True, errtxt=PASSWORD)
    with pytest.raises(ConfigError) as found:
        open_files(url)
    assert words in found.value.message and PASSWORD not in f"{found.value} {found.value.hint}"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"backend": "folder"}, "weight_sync.backend: folder needs weight_sync.folder"),
        (
            {"backend": "gloo", "folder": "file:///x"},
            "backend: gloo does not use weight_sync.folder",
        ),
        ({"folder": f"s3://user:{PASSWORD}@bucket"}, "weight_sync.folder holds a password"),
        ({"folder": "s3://bucket?secret_key=1"}, "weight_sync.folder"),
        ({"folder": "/shared"}, "weight_sync.folder"),
    ],
)
def test_a_folder_that_nobody_uses_or_with_a_secret_in_its_url_is_refused(
    section: dict[str, str], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    sections = {**REQUIRED, "weight_sync": section}
    file.write_text(json.dumps(sections))
    with pytest.raises(ConfigError) as found:
        load_config(file)
    assert words in str(found.value) and PASSWORD not in str(found.value)


def test_a_plan_says_which_package_the_folder_lacks_here_and_who_reads_it() -> None:
    fsspec.register_implementation("unpackaged", "nobodys_package.Files", clobber=True)
    config = Config.model_validate({**REQUIRED, "weight_sync": {"folder": "unpackaged://bucket"}})
    (line,) = check_folder(config)
    assert line.startswith(
        "weight_sync.folder: the fsspec package for unpackaged:// is not installed; install"
    )
    assert choose_backend(config).why == "replicas on other hosts than this read unpackaged://bucket"


@pytest.mark.parametrize(("address", "is_read"), [("tcp://127.0.0.1:1", False), ("tcp://192.0.2.1:1", True)])
def test_a_receiver_on_another_host_than_the_publisher_reads_the_folder(address: str, is_read: bool) -> None:
    assert is_here(address) is not is_read
