"""Files that are written whole, and survive the machine's death where that is asked for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from asyncrl.core.files.durable import append_lines, replace_text
from asyncrl.core.runtime.threads import ThreadEvent
from tests.small_disk import fill


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was forced to the disk, and which names were given, in order."""
    done: list[str] = []
    fsync, rename = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_replace(self: Path, target: Path) -> Path:
        done.append(f"-> {target.name}")
        rename(self, target)
        return target

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    return done


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_this_returns(
    tmp_path: Path, synced: list[str]
) -> None:
    replace_text(tmp_path / "run.json", "{}", 0o600, is_synced=True)
    assert synced == [f".run.json.{os.getpid()}.{threading.get_native_id()}", "-> run.json", tmp_path.name]


def test_nobody_waits_for_the_disk_who_does_not_ask_for_it(tmp_path: Path, synced: list[str]) -> None:
    replace_text(tmp_path / "phase.json", "{}")
    assert synced == ["-> phase.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "new \ud800")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_the_mode_is_the_one_asked_for_whatever_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    replace_text(path, "old", 0o644)
    (tmp_path / f".key.json.{os.getpid()}.{threading.get_native_id()}").touch(0o644)
    replace_text(path, "new", 0o600)
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == "new"


def test_two_threads_write_the_same_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, inside, met = tmp_path / "a.json", ThreadEvent(), ThreadEvent()
    rename = os.replace

    def replace_late(self: Path, target: Path) -> Path:
        if threading.current_thread() is slow:
            inside.set()
            assert met.wait(60.0)
        rename(self, target)
        return target

    monkeypatch.setattr(Path, "replace", replace_late)
    slow = threading.Thread(target=replace_text, args=(path, "slow"))
    slow.start()
    assert inside.wait(60.0)
    replace_text(path, "fast")
    assert path.read_text() == "fast"
    met.set()
    slow.join(60.0)
    assert path.read_text() == "slow" and os.listdir(tmp_path) == ["a.json"]


def test_of_lines_that_a_full_disk_takes_a_part_of_nothing_is_kept(small_disk: Path) -> None:
    path = small_disk / "rows.jsonl"
    assert append_lines(path, "first\n") == 6
    fill(small_disk / "ballast")  # the page that the file has is still to be filled
    with pytest.raises(OSError, match="No space left"):
        append_lines(path, "x" * 8192 + "\n")
    assert path.read_text() == "first\n"
    (small_disk / "ballast").unlink()
    append_lines(path, "second\n")
    assert path.read_text() == "first\nsecond\n"


def test_a_line_that_a_dead_writer_tore_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("first\nsec")
    append_lines(path, "third\n")
    assert path.read_text().splitlines() == ["first", "sec", "third"]
