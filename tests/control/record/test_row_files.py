"""Files of metric rows: compressed as they grow, and read as if they were one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from asyncrl.control.rows.recorder import Recorder
from asyncrl.control.rows.row_files import (
    RowWriter,
    compress,
    iterate_rows,
    keep_rows,
    load_rows,
    newest_rows,
    older_files,
    remove_rows,
)
from asyncrl.core.errors import DataError
from asyncrl.core.metrics.run_names import FIRST_AFTER_START
from tests.threads import RUNTIME

STEP = "training/global_step"
SEGMENT_BYTES = 2000


def line(step: int, **values: object) -> str:
    return json.dumps({STEP: step, "reward": 0.123456789, **values}) + "\n"


def write(path: Path, steps: range) -> RowWriter:
    writer = RowWriter(path, SEGMENT_BYTES)
    for step in steps:
        writer.append(line(step))
    return writer


def steps_of(path: Path) -> list[int]:
    return [row[STEP] for row in iterate_rows(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_row_of_an_older_asyncrl_tells_a_start_by_todays_name(path: Path) -> None:
    path.write_text(line(1, **{"training/is_first_of_life": 1.0}) + line(2, **{FIRST_AFTER_START: 0.0}))
    assert [row[FIRST_AFTER_START] for row in load_rows(path)] == [1.0, 0.0]


def test_a_long_record_is_compressed_and_no_row_is_lost(path: Path) -> None:
    write(path, range(1, 1001))
    assert len(older_files(path)) > 10
    assert path.stat().st_size < SEGMENT_BYTES
    assert sum(one.stat().st_size for one in older_files(path)) < 1000 * len(line(1)) / 3
    assert steps_of(path) == list(range(1, 1001))
    assert load_rows(path, lambda row: row[STEP] > 998)[0][STEP] == 999


def test_a_writer_of_the_next_life_goes_on_after_the_files_of_the_last(path: Path) -> None:
    write(path, range(1, 101))
    num_files = len(older_files(path))
    with path.open("a") as file:
        file.write('{"training/global_step": 101, "torn')
    write(path, range(101, 201))
    assert steps_of(path) == list(range(1, 201))
    assert len(older_files(path)) > num_files
    write(path, range(150, 161))  # it resumed from a checkpoint: these steps were taken again
    assert [row[STEP] for row in load_rows(path)] == list(range(1, 201))


def test_a_process_that_dies_while_it_compresses_leaves_every_row_once_or_twice(path: Path) -> None:
    write(path, range(1, 11))
    data = path.read_bytes()
    compress(path)
    path.write_bytes(data)  # it died between the two
    assert [row[STEP] for row in load_rows(path)] == list(range(1, 11))


def test_rows_that_cannot_be_compressed_yet_are_written_on(path: Path) -> None:
    obstacle = path.with_name(".metrics.000001.jsonl.gz.partial")
    obstacle.mkdir()  # as a disk that has room for a row, and none for a file
    writer = write(path, range(1, 101))
    assert not older_files(path) and steps_of(path) == list(range(1, 101))
    obstacle.rmdir()
    for step in range(101, 111):
        writer.append(line(step))
    assert older_files(path) and steps_of(path) == list(range(1, 111))


def test_the_newest_rows_are_there_right_after_they_were_compressed(path: Path) -> None:
    write(path, range(1, 31))
    compress(path)
    assert path.stat().st_size == 0
    assert [row[STEP] for row in newest_rows(path, 300)][-1] == 30
    assert newest_rows(path.with_name("other.jsonl")) == []


def test_rows_of_later_steps_are_dropped_from_every_file(path: Path) -> None:
    write(path, range(1, 101))
    keep_rows(path, lambda row: row[STEP] <= 20)
    assert steps_of(path) == list(range(1, 21))
    remove_rows(path)
    assert not list(path.parent.iterdir())


def test_a_line_that_is_no_row_is_told_with_its_file_and_line(path: Path) -> None:
    write(path, range(1, 101))
    first = older_files(path)[0]
    first.write_bytes(gzip.compress(line(1).encode() + b"nonsense\n"))
    with pytest.raises(DataError, match=rf"{first.name}:2: this line is not a metrics row"):
        load_rows(path)


def test_a_metric_that_the_table_lacks_is_recorded_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "metrics.jsonl", RUNTIME)
    for step in (1, 2):
        recorder.record({STEP: step, "critic/rewards/meen": 0.5})
    recorder.close()
    warning = "the metric critic/rewards/meen is not in the table of metrics (similar: critic/rewards/mean"
    assert caplog.text.count(warning) == 1
    assert [row["critic/rewards/meen"] for row in iterate_rows(tmp_path / "metrics.jsonl")] == [0.5, 0.5]
