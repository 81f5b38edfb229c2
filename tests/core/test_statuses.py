"""Statuses on their way across the edge of a process."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.errors import WireError
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import BufferStatus, LearnerStatus, ServiceStatus
from asyncrl.core.status.statuses import KINDS, Statuses, pack_status, read_status
from tests.statuses import filled, status_of


def whole(kind: str) -> ServiceStatus:
    """Return a status of a service that has spoken."""
    form = KINDS[kind]
    return msgspec.convert(filled(form, {"state": "READY", "pid": 7}), form)


@pytest.mark.parametrize("kind", KINDS)
def test_a_status_arrives_as_the_struct_of_its_kind(kind: str) -> None:
    told = whole(kind)
    found = read_status(kind, pack_status(told))
    assert found == told and type(found) is KINDS[kind] is not ServiceStatus


@pytest.mark.parametrize("kind", [*KINDS, "a"])
def test_a_service_that_has_not_spoken_arrives_as_one(kind: str) -> None:
    away = Obstacle("", Cause.JOURNAL_AWAY, "Redis is away")
    told = ServiceStatus(state=ServiceState.STARTING, obstacles=(away,))
    assert read_status(kind, pack_status(told)) == told


def test_a_status_of_another_kind_is_refused() -> None:
    assert status_of("learner.0", step=1) != status_of("buffer.0", issued=1)
    with pytest.raises(WireError, match="no status of a buffer"):
        read_status("buffer", pack_status(whole("learner")))


@pytest.mark.parametrize(
    "change",
    [
        {"state": "ok"},
        {"step": "seven"},
        {"stpe": 7},
        {"obstacles": [{"service": "", "cause": "new", "reason": ""}]},
        {"obstacles": "words"},
    ],
    ids=str,
)
def test_a_status_with_a_word_or_a_field_that_nobody_knows_is_refused(change: dict[str, object]) -> None:
    fields = msgspec.to_builtins(whole("learner")) | change
    data = msgspec.msgpack.encode((True, msgspec.Raw(msgspec.msgpack.encode(fields))))
    with pytest.raises(WireError, match="no status of a learner"):
        read_status("learner", data)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_status_are_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(WireError, match="no status of a receiver"):
        read_status("receiver", data)


def test_half_a_character_in_a_text_does_not_cost_the_status() -> None:
    told = msgspec.structs.replace(whole("learner"), error="no file \udc9b", torn=("\ud800",))
    found = read_status("learner", pack_status(told))
    assert isinstance(found, LearnerStatus) and (found.error, found.torn) == ("no file ?", ("?",))


def test_a_reason_is_cut_also_where_it_arrives() -> None:
    told = ServiceStatus(state=ServiceState.READY, obstacles=(Obstacle("", Cause.STALL, "x" * 5000),))
    (found,) = read_status("a", pack_status(told)).obstacles
    assert len(found.reason) == 1000


def test_of_a_run_only_who_has_spoken_is_known() -> None:
    buffer = whole("buffer")
    assert isinstance(buffer, BufferStatus)
    statuses = Statuses({"buffer.0": buffer, "learner.0": ServiceStatus(state=ServiceState.SILENT)})
    assert statuses.buffer is buffer and statuses.learner is None
    assert (statuses.state("learner.0"), statuses.state("publisher.0")) == (ServiceState.SILENT, None)
    assert (statuses | {"buffer.0": statuses["learner.0"]}).buffer is None and statuses.buffer is buffer
