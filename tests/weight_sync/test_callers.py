"""Claims of a holder of the run's keys about itself to the coordinator, and their traces there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import WireError
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.protocol.test_protocol_peer import INFO, TIMING, WAIT_S
from tests.weight_sync.protocol.test_turns import Asked, serving
from tests.weight_sync.sides import manifest_of
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.coordination.journal import JOURNAL_FILE, MAX_BYTES, Journal
from weight_sync.protocol.messages import MAX_TEXT
from weight_sync.protocol.protocol import Coordination
from weight_sync.sync_records import BlameRecord, LoadFailureRecord

WHO = {"name": "receiver.0", "incarnation": "1"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    service = CoordinatorService(Coordination(TIMING, token=5), ThreadRuntime(), run_dir=tmp_path)
    stop = ThreadEvent()
    thread = threading.Thread(target=service.run, args=(stop,))
    thread.start()
    made = Client(ThreadRuntime(), str(service.status().address))
    yield made
    made.close()
    stop.set()
    thread.join(WAIT_S)


TOO_MUCH: tuple[dict[str, Any], ...] = (
    {"name": "receiver.0" + "n" * 20_000},
    {"name": "receiver.10000"},
    {"name": "receiver.99999"},
    {"name": "receiver.00"},
    {"name": "receiver.٣"},
    {"name": "receiver"},
    {"name": ""},
    {"name": "x\x1b[2J\n"},
    {"incarnation": "i" * (MAX_TEXT + 1)},
    {"name": "publisher"},
)
PUBLISHER = {
    "name": "publisher",
    "incarnation": "1",
    "store_host": "127.0.0.1",
    "store_port": 9,
}


@pytest.mark.parametrize("changes", TOO_MUCH, ids=lambda changes: str(list(changes.items())[-1])[:40])
def test_a_peer_whose_name_or_incarnation_is_none_is_refused_and_not_remembered(
    client: Client, changes: dict[str, Any]
) -> None:
    with pytest.raises(WireError):
        client.call("hello", deadline_s=30.0, **{**INFO, **WHO, "seq": 1, **changes})
    assert client.call("status", deadline_s=30.0).args["members"] == {}
    assert client.call("hello", deadline_s=30.0, **INFO, **WHO).args["accepted"]


@pytest.mark.parametrize(
    "changes",
    [{"store_host": "h" * (MAX_TEXT + 1)}, {"name": "receiver.0"}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_publisher_whose_name_or_address_is_none_is_refused(
    client: Client, changes: dict[str, Any]
) -> None:
    with pytest.raises(WireError):
        client.call("publisher_hello", deadline_s=30.0, **PUBLISHER | changes)
    assert client.call("publisher_hello", deadline_s=30.0, **PUBLISHER).args["accepted"]


def test_deadlines_know_the_size_of_a_version_by_a_hello_and_by_a_report(tmp_path: Path) -> None:
    size = manifest_of(1).total_bytes
    reported = {"name": "publisher", "incarnation": "1", "event": "published", "fields": {}}
    with serving(tmp_path) as (service, coordination, _):
        for number, operation, said in ((1, "publisher_hello", PUBLISHER), (2, "report", reported)):
            asked = Asked(operation, **said)
            asked.frames = [manifest_of(number).to_bytes()]
            coordination._state.num_bytes = 0
            service.handle(asked)
            assert coordination.current == PolicyVersion(number, number), operation
            assert coordination._state.num_bytes == size > 0, operation


@pytest.mark.parametrize("name", ["serving", "staged", "attended", "pinned", "store_host", "store_port"])
def test_a_hello_that_leaves_out_what_counts_is_refused(client: Client, name: str) -> None:
    operation, said = ("publisher_hello", PUBLISHER) if name in PUBLISHER else ("hello", {**INFO, **WHO})
    with pytest.raises(WireError, match=name):
        client.call(operation, deadline_s=30.0, **{key: value for key, value in said.items() if key != name})
    assert client.call(operation, deadline_s=30.0, **said).args["accepted"]


def test_a_reason_that_a_peer_reports_is_cut(client: Client, tmp_path: Path) -> None:
    client.call("hello", deadline_s=30.0, **INFO, **WHO)
    fields = {"number": 1, "ok": False, "error": "e" * 100_000}
    client.call("report", deadline_s=30.0, **WHO, event="loaded", fields=fields)
    with pytest.raises(WireError, match="which is unknown here"):
        client.call("report", deadline_s=30.0, **WHO, event="x" * 100_000, fields={})
    assert (tmp_path / JOURNAL_FILE).stat().st_size < 10_000


def test_the_journal_stays_within_its_bytes_whatever_its_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    journal.note_fences({"receiver.1": 7})
    for number in range(40):
        journal.note(LoadFailureRecord("receiver.0", number, "e" * (MAX_BYTES // 3)))
        journal.note(LoadFailureRecord("receiver.0", number, "e" * MAX_BYTES))
        journal.note(BlameRecord("a", "silent", number))
        assert (tmp_path / JOURNAL_FILE).stat().st_size <= MAX_BYTES
    text = (tmp_path / JOURNAL_FILE).read_text()
    assert '"number": 39' in text and '"receiver.1": 7' in text


def test_a_line_that_does_not_fit_the_journal_drives_no_other_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1, max_bytes=4000)
    journal.note(BlameRecord("a", "silent", 17))
    journal.note(LoadFailureRecord("receiver.0", 18, "e" * 4000))
    assert '"number": 17' in (tmp_path / JOURNAL_FILE).read_text()
