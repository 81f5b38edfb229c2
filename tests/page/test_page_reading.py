"""Reading of a run's folder by the page."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from page_runs import make_config, make_group, write_groups

from asyncrl.buffer.journals.kind import NUM_NEWEST, journal_kind
from asyncrl.buffer.journals.records import make_record
from asyncrl.buffer.journals.redis.past import asking, keys_of
from asyncrl.buffer.journals.redis.place import run_key
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.journals.segment_payloads import SegmentPayloads
from asyncrl.buffer.journals.segments import SegmentFolder
from asyncrl.control.rows.row_files import compress
from asyncrl.core.errors import ConfigError
from asyncrl.core.experience import encode_group
from asyncrl.page.reading import NUM_SAMPLES, RowTail
from asyncrl.page.rollouts import decoder_of


def add(path: Path, *steps: int, end: str = "\n") -> None:
    with path.open("a") as file:
        for step in steps:
            file.write(json.dumps({"training/global_step": step, "filler": "x" * 100}) + end)


def steps_of(tail: RowTail) -> list[int]:
    return [row["training/global_step"] for row in tail.read()]


def test_each_row_is_read_once_and_torn_ones_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = RowTail(path)
    assert steps_of(tail) == []
    add(path, 1, 2)
    add(path, 3, end="")
    assert steps_of(tail) == [1, 2]
    with path.open("a") as file:
        file.write("\nnot json\n")
    add(path, 4)
    assert steps_of(tail) == [3, 4]
    assert steps_of(tail) == []


def test_a_torn_line_that_a_restart_cut_does_not_stop_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    add(path, 1, 2)
    tail = RowTail(path)
    tail.read()
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert steps_of(tail) == []
    add(path, 2, 3)
    assert steps_of(tail) == [2, 3]


def test_of_a_long_file_a_sample_is_read_and_all_that_is_new(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    add(path, *range(1, 20_001))
    tail = RowTail(path, whole_file_bytes=100_000)
    found = steps_of(tail)
    assert found == sorted(found) and found[-1] == 20_000 and found[0] < 100
    assert len(found) < NUM_SAMPLES + 1000
    assert max(later - before for before, later in itertools.pairwise(found)) < 200
    add(path, 20_001)
    assert steps_of(tail) == [20_001]


def test_of_files_that_were_compressed_a_sample_is_read_and_all_that_comes_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for first in range(1, 30_001, 500):
        add(path, *range(first, first + 500))
        compress(path)
    add(path, 30_001)
    tail = RowTail(path)
    found = steps_of(tail)
    assert found == sorted(found) and found[0] == 1 and found[-1] == 30_001
    assert NUM_SAMPLES / 2 < len(found) < 2 * NUM_SAMPLES
    add(path, 30_002)
    assert steps_of(tail) == [30_002]
    compress(path)
    add(path, 30_003)
    assert steps_of(tail) == [30_003]


def test_the_newest_groups_are_found_while_a_buffer_writes_and_segments_change(tmp_path: Path) -> None:
    folder = tmp_path / "payloads"
    payloads = SegmentPayloads(folder)
    assert payloads.newest() == []
    segments = SegmentFolder(folder, segment_bytes=2000)
    for ticket in range(1, 31):
        segments.append(ticket, 1, encode_group(make_group(ticket)))
        if ticket in (2, 3, 29):
            newest = [group.ticket for group in payloads.newest()]
            assert newest == list(range(ticket, max(0, ticket - NUM_NEWEST), -1))
    for ticket in range(1, 30):
        segments.release(ticket)  # and with them all files but the newest
    assert [group.ticket for group in payloads.newest()] == [30, 29]
    segments.close()


def test_a_record_that_is_half_written_is_left_for_later(tmp_path: Path) -> None:
    write_groups(tmp_path, 2)
    (path,) = (tmp_path / "buffer" / "payloads").glob("*.segment")
    whole = path.read_bytes()
    payloads = SegmentPayloads(path.parent)
    path.write_bytes(whole[:-10])
    assert [group.ticket for group in payloads.newest()] == [1]
    path.write_bytes(whole)
    assert [group.ticket for group in payloads.newest()] == [2, 1]


def test_a_payload_with_a_flipped_bit_is_not_shown(tmp_path: Path) -> None:
    write_groups(tmp_path, 2)
    (path,) = (tmp_path / "buffer" / "payloads").glob("*.segment")
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    assert [group.ticket for group in SegmentPayloads(path.parent).newest()] == [1]


def test_the_newest_groups_come_out_of_redis_too_and_its_end_is_an_error(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "buffer" / "redis")
    server.ensure()
    config = make_config(tmp_path, journal="redis")
    newest = journal_kind("redis").newest(config.buffer, tmp_path)
    assert newest is not None
    try:
        with asking(server.url) as (ask, _):
            for ticket in range(5, 13):
                record = make_record(ticket, 1, encode_group(make_group(ticket)))
                ask("HSET", keys_of(run_key(tmp_path))["payloads"], f"{ticket}:1:1", record)
        assert [group.ticket for group in newest()] == [12, 11, 10, 9, 8, 7]
    finally:
        server.stop()
    with pytest.raises(ConfigError, match="does not run"):
        newest()


@pytest.mark.parametrize(("has_tokenizer", "text"), [(True, "51937="), (False, "<7><3><11><5><9><12>")])
def test_ids_are_shown_where_the_model_has_no_tokenizer(
    tmp_path: Path, has_tokenizer: bool, text: str
) -> None:
    if has_tokenizer:
        write_groups(tmp_path, 1)
    assert decoder_of(tmp_path / "model", print)(make_group(1).prompt_ids.tolist()) == text


def test_a_tokenizer_that_cannot_be_read_leaves_the_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "9"}')
    assert decoder_of(tmp_path, print)([5, 1]) == "<5><1>"
