"""Requests of a learner that ask for more than a step has, and answers that are large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.buffer import service as service_module
from asyncrl.buffer.service import BufferService, RequestHandler
from asyncrl.core.errors import WireError
from asyncrl.core.experience import encode_group
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.buffer.parts import SETTINGS, make_group, make_store, serving
from tests.runtimes import ManualClock

SIZE = SETTINGS.groups_per_step
"""Groups of a step."""


@pytest.fixture
def running() -> Iterator[tuple[BufferService, dict[str, Any]]]:
    """A buffer with a reserved step and two more stored; the arguments that a learner needs."""
    store = make_store(ready_batches=10, max_lag=10, memory_bytes=1 << 20)
    token = store.ledger.open("learner")
    store.ledger.describe_data(100, "d")
    store.ledger.register_version(token, 0)
    grants = store.ledger.lease("a", 1, 3 * SIZE, 0.0)
    assert len(grants) == 3 * SIZE
    for grant in grants:
        store.push("a", grant.ticket, grant.attempt, encode_group(make_group(grant.ticket)))
    reserved = store.ledger.reserve(token, 0, 0.0)
    assert reserved is not None
    with serving(store) as service:
        yield service, {"token": token, "tickets": [ticket.id for ticket in reserved]}


TOO_MUCH = {
    "fetch": lambda found: found | {"tickets": found["tickets"][:1] * SIZE},
    "fetch of more than a step": lambda found: found | {"tickets": list(range(1, SIZE + 2))},
    "reserve": lambda found: {"step": 0, "wait_s": 0.0, "have": found["tickets"][:1] * 2},
    "reserve of more than a step": lambda found: {
        "step": 0, "wait_s": 0.0, "have": list(range(1, SIZE + 2)),
    },
    "resume": lambda found: {"step": 0, "is_fork": False, "note": {}, "refused": found["tickets"][:1] * 2},
    "checkpointed": lambda found: {"step": 0, "digest": "d", "kept": [0, 0]},
}  # fmt: skip


@pytest.mark.parametrize("what", TOO_MUCH)
def test_ids_that_come_twice_or_are_more_than_a_step_has_are_refused(
    running: tuple[BufferService, dict[str, Any]], what: str
) -> None:
    service, found = running
    client = Client(ThreadRuntime(), service.address)
    with pytest.raises(WireError, match=r"each once|allowed are"):
        client.call(what.split()[0], deadline_s=60.0, **{"token": found["token"], **TOO_MUCH[what](found)})
    assert len(client.call("fetch", deadline_s=60.0, **found).args["frames_per_group"]) == SIZE
    client.close()


def test_no_more_than_a_step_of_groups_travels_ahead(running: tuple[BufferService, dict[str, Any]]) -> None:
    service, found = running
    client = Client(ThreadRuntime(), service.address)
    reply = client.call("prefetch", deadline_s=60.0, token=found["token"], num_groups=4096)
    assert len(reply.args["groups"]) == SIZE
    client.close()


LONG = "x" * 100_000
TOO_LONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("describe_data", {"num_prompts": 100, "digest": LONG}),
    ("checkpointed", {"step": 0, "digest": LONG, "kept": [0]}),
    ("trained", {"step": 0, "dropped": [[1, LONG]], "lag_max": 0}),
    ("evaluated", {"replica": "a", "id": 1, "version": 1, "metrics": {"val-aux/" + LONG: 1.0}}),
    ("evaluated", {"replica": "a", "id": 1, "version": 1, "metrics": {"any": 1.0}}),
    ("evaluated", {"replica": "a", "id": 1, "version": 1, "metrics": {"val-aux/\x1b[2J": 1.0}}),
)


@pytest.mark.parametrize(("op", "args"), TOO_LONG, ids=lambda value: str(value)[:30])
def test_texts_that_are_kept_or_come_back_are_short_and_metrics_have_known_names(
    running: tuple[BufferService, dict[str, Any]], op: str, args: dict[str, Any]
) -> None:
    service, found = running
    client = Client(ThreadRuntime(), service.address)
    with pytest.raises(WireError) as caught:
        client.call(op, deadline_s=60.0, **{"token": found["token"], **args})
    assert len(str(caught.value)) < 400
    client.close()


class Asked:
    """A request that keeps its answer."""

    patience_s, client, id = 1e9, b"a", 1

    def __init__(self, op: str, **args: Any) -> None:
        self.op, self.args, self.frames, self.replies = op, args, [], 0

    def reply(self, frames: Any = (), **args: Any) -> None:
        self.replies += 1


def test_a_turn_ends_where_its_answers_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_OUTBOX_BYTES", 500)
    store = make_store()
    token = store.ledger.open("learner")
    store.ledger.describe_data(100, "d")
    store.ledger.register_version(token, 0)
    for grant in store.ledger.lease("a", 1, SIZE, 0.0):
        store.push("a", grant.ticket, grant.attempt, encode_group(make_group(grant.ticket)))
    reserved = store.ledger.reserve(token, 0, 0.0)
    assert reserved is not None
    handler, asked = RequestHandler(store, ManualClock()), []
    while not handler.is_full():
        asked.append(Asked("fetch", token=token, tickets=[reserved[0].id]))
        handler.handle(asked[-1])  # type: ignore[arg-type]
        assert len(asked) <= 3, "one payload has about 250 bytes"
    handler.end_turn()
    assert not handler.is_full() and [one.replies for one in asked] == [1] * len(asked)


def test_only_replicas_that_evaluate_are_remembered_whatever_names_are_used() -> None:
    store, clock = make_store(lease_s=10.0), ManualClock()
    handler = RequestHandler(store, clock)
    store.ledger.register_version(store.ledger.open("learner"), 0)
    store.ledger.describe_data(100, "d")
    store.ledger.request_evaluation(1, 0)
    ask = {"version": 1, "want": 0, "wait_s": 0.0, "evaluating": None}
    for name in ("evaluates", *map(str, range(10))):
        handler.handle(Asked("lease", replica=name, **ask))  # type: ignore[arg-type]
        handler.tick(0.0)
    assert list(handler._replicas._last_seen) == ["evaluates"]
    clock.advance(9.0)
    handler.handle(Asked("renew", replica="evaluates", tickets=[]))  # type: ignore[arg-type]
    clock.advance(9.0)
    handler.tick(0.0)
    assert store.ledger.state.evaluations[1].holders == {0: "evaluates"}
    clock.advance(2.0)
    handler.tick(0.0)
    assert store.ledger.state.evaluations[1].holders == {}, "it has fallen silent"
