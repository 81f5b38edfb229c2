"""The buffer service over real sockets: replicas and a learner in threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.buffer.composition import build, ledger_settings, max_group_bytes
from asyncrl.buffer.journals.kinds.none import MemoryJournal
from asyncrl.buffer.ledger.events import Event, Opened
from asyncrl.buffer.messages import EvaluationOrder
from asyncrl.buffer.service import BufferService, RequestHandler
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import AsyncrlError, ConfigError, DataError, FencedError, LedgerError, WireError
from asyncrl.core.experience import encode_group
from asyncrl.core.metrics.tallies import tally_values
from asyncrl.core.rpc import Client, Request
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.service_command import Drain
from asyncrl.core.status.service import FinishedEvaluation
from tests.buffer.parts import SETTINGS, make_group, make_store, serving
from tests.runtimes import ManualRuntime

WAIT_S = 20.0


def lease_one(raw: Client, replica: str = "a", wait_s: float = 0.0) -> tuple[int, int]:
    grants = raw.call("lease", replica=replica, version=1, want=1, wait_s=wait_s).args["grants"]
    return grants[0]["ticket"], grants[0]["attempt"]


def push_one(raw: Client, replica: str = "a") -> int:
    ticket, attempt = lease_one(raw, replica)
    frames = encode_group(make_group(ticket, attempt))
    assert (
        raw.call("push", frames, replica=replica, ticket=ticket, attempt=attempt).args["result"] == "stored"
    )
    return ticket


def test_a_replica_and_a_learner_pass_groups_until_the_weights_are_too_old(service: BufferService) -> None:
    async def generate(replica: ReplicaClient) -> None:
        await replica.describe_data(10, "d")
        num_stored = 0
        while num_stored < 4:
            reply = await replica.lease(version=1, want=2, wait_s=WAIT_S)
            for grant in reply.grants:
                assert await replica.renew([grant.key]) == ()
                num_stored += await replica.push(make_group(grant.ticket, grant.attempt)) == "stored"
        assert not (await replica.lease(version=1, want=2, wait_s=0.1)).grants, "step 2 is beyond version 1"
        results.append("done")

    async def work() -> None:
        with contextlib.closing(ReplicaClient(service.address, "rollout.0")) as replica:
            await generate(replica)

    learner = LearnerClient(service.address)
    opening = learner.open("learner.0")
    assert (opening.checkpoints, opening.steps_trained) == ((), 0)
    assert learner.register_version(0) == 1
    results: list[str] = []
    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    for step in range(2):
        batch = learner.reserve(step, WAIT_S)
        assert batch is not None
        assert dict(batch.step_of_version) == {1: 0}
        groups = learner.fetch([ticket.ticket for ticket in batch.tickets])
        assert [group.ticket for group in groups] == [2 * step + 1, 2 * step + 2]
        np.testing.assert_array_equal(groups[0].prompt_ids, [1, 2, 3])
        learner.trained(step)
        learner.register_version(step + 1)
        learner.checkpointed(step + 1, f"digest-{step}", kept=[step + 1])
    thread.join(2 * WAIT_S)
    assert results == ["done"]
    status = learner.status()
    assert (status.residue, status.trained, status.open) == (0, 4, 0)
    assert learner.reserve(2, 0.1) is None
    learner.close()


def test_a_lease_before_the_data_is_described_is_refused(
    service: BufferService, learner: LearnerClient
) -> None:
    raw = Client(ThreadRuntime(), service.address)
    with pytest.raises(DataError, match="described"):
        raw.call("lease", replica="a", version=1, want=1, wait_s=0.0)
    raw.close()


def test_other_data_than_the_run_began_with_is_refused(raw: Client) -> None:
    raw.call("describe_data", num_prompts=10, digest="d")
    with pytest.raises(DataError, match="began with"):
        raw.call("describe_data", num_prompts=10, digest="e")


@contextlib.contextmanager
def in_background(service: BufferService, call: Callable[[Client], object]) -> Iterator[list[object]]:
    """Make a call from another thread, wait until it is parked, and wait for its end on leaving."""
    results: list[object] = []

    def work() -> None:
        client = Client(ThreadRuntime(), service.address)
        try:
            results.append(call(client))
        except AsyncrlError as error:
            results.append(error)
        client.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    observer = Client(ThreadRuntime(), service.address)
    pause, end = ThreadEvent(), time.monotonic() + WAIT_S
    while observer.call("status").args["parked"] == 0 and time.monotonic() < end:
        pause.wait(0.01)
    observer.close()
    yield results
    thread.join(WAIT_S)
    assert not thread.is_alive()


def ask_lease(client: Client) -> object:
    reply = client.call("lease", replica="b", version=1, want=1, wait_s=WAIT_S, deadline_s=2 * WAIT_S)
    return [grant["ticket"] for grant in reply.args["grants"]]


def test_a_parked_lease_is_answered_when_the_ledger_allows_it(
    service: BufferService, raw: Client, learner: LearnerClient
) -> None:
    push_one(raw), push_one(raw)
    with in_background(service, ask_lease) as results:
        assert learner.reserve(0, WAIT_S), "the batch leaves, so new tickets may be started"
    assert results == [[3]]


def test_a_parked_lease_ends_empty_handed_after_its_wait(raw: Client) -> None:
    push_one(raw), push_one(raw)
    reply = raw.call("lease", replica="a", version=1, want=1, wait_s=0.15).args
    assert reply == {"grants": [], "evaluate": None}


def test_a_restarted_replica_takes_the_place_of_its_parked_predecessor(
    service: BufferService, raw: Client, learner: LearnerClient
) -> None:
    push_one(raw), push_one(raw)
    with in_background(service, ask_lease) as results:
        assert raw.call("lease", replica="b", version=1, want=1, wait_s=0.1).args["grants"] == []
        assert learner.status().parked == 0
    assert results == [[]]


def test_requests_beyond_the_parking_room_are_answered_at_once(
    service: BufferService, raw: Client, learner: LearnerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_one(raw), push_one(raw)
    with in_background(service, ask_lease) as results:
        monkeypatch.setattr("asyncrl.buffer.service.MAX_PARKED", 1)
        args = {"replica": "c", "version": 1, "want": 1, "wait_s": 500.0}
        assert raw.call("lease", deadline_s=WAIT_S, **args).args["grants"] == []
        assert learner.reserve(0, WAIT_S)
    assert results == [[3]]


def test_a_parked_reserve_is_answered_by_the_push_that_completes_the_batch(
    service: BufferService, raw: Client, learner: LearnerClient
) -> None:
    def reserve(client: Client) -> object:
        args = {"token": learner.token, "step": 0, "wait_s": WAIT_S}
        return [
            row["ticket"] for row in client.call("reserve", deadline_s=2 * WAIT_S, **args).args["tickets"]
        ]

    push_one(raw)
    with in_background(service, reserve) as results:
        push_one(raw)
    assert results == [[1, 2]]


def test_a_new_learner_fences_the_old_one_even_while_it_waits(
    service: BufferService, raw: Client, learner: LearnerClient
) -> None:
    def reserve(client: Client) -> object:
        return client.call("reserve", deadline_s=2 * WAIT_S, token=learner.token, step=0, wait_s=WAIT_S)

    successor = LearnerClient(service.address)
    with in_background(service, reserve) as results:
        successor.open("learner.1")
    assert isinstance(results[0], FencedError)
    for act in (
        lambda: learner.register_version(0),
        lambda: learner.reserve(0, 0.0),
        lambda: learner.fetch([]),
        lambda: learner.trained(0),
        lambda: learner.checkpointed(0, "d", [0]),
        lambda: learner.request_evaluation(0),
        lambda: learner.resume(0),
    ):
        with pytest.raises(FencedError):
            act()
    successor.close()


def test_no_answer_leaves_before_its_events_are_in_the_journal() -> None:
    class FullDisk(MemoryJournal):
        def commit(self, events: Sequence[Event], now: float) -> None:
            if any(isinstance(event, Opened) for event in events):
                raise OSError("no space left on device")

    handler = RequestHandler(ExperienceStore(SETTINGS, FullDisk(), 2, True, now=0.0), ThreadRuntime())
    request = Request("open", {"holder": "learner"}, [], b"client", 1, lambda parts: None)
    handler.handle(request)
    with pytest.raises(OSError, match="no space left"):
        handler.end_turn()
    assert not request.is_answered


def test_a_learner_that_dies_is_followed_by_one_that_replays(raw: Client, learner: LearnerClient) -> None:
    first = [push_one(raw), push_one(raw)]
    learner.reserve(0, WAIT_S)
    opening = learner.open("learner.1")
    assert opening.steps_trained == 0
    batch = learner.reserve(0, WAIT_S)
    assert batch is not None
    assert [ticket.ticket for ticket in batch.tickets] == first


def test_leases_of_a_replica_that_vanished_expire(learner: LearnerClient) -> None:
    clock = ManualRuntime()
    with serving(make_store(lease_s=3.0), clock) as service:
        client = Client(ThreadRuntime(), service.address)
        client.call("describe_data", num_prompts=10, digest="d")
        token = client.call("open", holder="learner").args["token"]
        client.call("register_version", token=token, step=0)
        assert lease_one(client, "vanished") == (1, 1)
        clock.advance(2.0)
        for ticket in range(2, 5):
            assert lease_one(client, "alive") == (ticket, 1)
        clock.advance(1.5)
        assert lease_one(client, "alive", wait_s=WAIT_S) == (1, 2)
        client.close()


def test_an_evaluation_of_a_replica_that_a_restarted_buffer_never_hears_of_is_handed_on() -> None:
    async def ask(address: str) -> EvaluationOrder | None:
        with contextlib.closing(ReplicaClient(address, "b")) as client:
            return (await client.lease(version=1, want=0, wait_s=WAIT_S)).evaluate

    store = make_store(lease_s=0.3)
    store.ledger.describe_data(10, "d")
    store.ledger.register_version(store.ledger.open("learner"), 0)
    store.ledger.evaluations.request(0)
    assert store.ledger.evaluations.give("a", 1, None) is not None
    with serving(store) as service:
        assert asyncio.run(ask(service.address)) == EvaluationOrder(1, 0)


def test_an_evaluation_is_handed_to_another_replica_when_the_first_falls_silent() -> None:
    clock = ManualRuntime()

    async def hand_over(address: str) -> list[EvaluationOrder | None]:
        with (
            contextlib.closing(ReplicaClient(address, "a")) as first,
            contextlib.closing(ReplicaClient(address, "b")) as second,
        ):
            orders = [(await first.lease(version=1, want=0, wait_s=1.0)).evaluate]
            orders.append((await first.lease(version=1, want=0, wait_s=0.0)).evaluate)
            clock.advance(3.5)
            orders.append((await second.lease(version=1, want=0, wait_s=WAIT_S)).evaluate)
            assert orders[2] is not None
            await second.evaluated(orders[2], 1, {"accuracy": 0.5})
            orders.append((await second.lease(version=1, want=0, wait_s=0.0)).evaluate)
            status = await second.status()
        assert status.evaluations == (FinishedEvaluation(1, 0, 1, {"accuracy": 0.5}),)
        return orders

    with serving(make_store(lease_s=3.0), clock) as service:
        learner = LearnerClient(service.address)
        learner.open("learner")
        learner.register_version(0)
        assert learner.request_evaluation(0) == learner.request_evaluation(0) == 1
        client = Client(ThreadRuntime(), service.address)
        client.call("describe_data", num_prompts=10, digest="d")
        assert asyncio.run(hand_over(service.address)) == [
            EvaluationOrder(1, 0),
            None,
            EvaluationOrder(1, 0),
            None,
        ]
        client.close()
        learner.close()


@pytest.mark.parametrize("total", [float("nan"), float("inf"), 1e200])
def test_an_evaluation_whose_result_is_refused_ends(
    raw: Client, learner: LearnerClient, total: float
) -> None:
    learner.request_evaluation(0)
    assert raw.call("lease", replica="a", version=1, want=0, wait_s=1.0).args["evaluate"] is not None
    with pytest.raises(WireError, match="evaluation 1: a metric is refused"):
        raw.call("evaluated", replica="a", id=1, version=1, metrics={"accuracy": [1, total, 0.0, 0]})
    status = learner.status()
    assert (status.evaluations_pending, status.counters["evaluations_refused"]) == (0, 1)
    assert status.evaluations[0].metrics == {"val-aux/num_refused": 1.0}


def test_rewards_of_any_size_that_a_group_may_have_can_be_evaluated(
    raw: Client, learner: LearnerClient
) -> None:
    learner.request_evaluation(0)
    raw.call("lease", replica="a", version=1, want=0, wait_s=1.0)
    sums = list(tally_values([3.4e38, 3.4e38]))
    raw.call("evaluated", replica="a", id=1, version=1, metrics={"accuracy": sums})
    assert learner.status().evaluations[0].metrics["accuracy"] == 3.4e38


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("steal", {}),
        ("lease", {}),
        ("lease", {"replica": "a", "version": 1, "want": -1, "wait_s": 0.0}),
        ("lease", {"replica": "a", "version": 1, "want": 1 << 40, "wait_s": 0.0}),
        ("lease", {"replica": "a", "version": 1, "want": 1, "wait_s": 1e9}),
        ("lease", {"replica": "a", "version": 1, "want": 1, "wait_s": float("nan")}),
        ("lease", {"replica": "", "version": 1, "want": 1, "wait_s": 0.0}),
        ("lease", {"replica": "a" * 1000, "version": 1, "want": 1, "wait_s": 0.0}),
        ("lease", {"replica": "a", "version": 1, "want": 1, "wait_s": 0.0, "evaluating": "x"}),
        ("renew", {"replica": "a", "tickets": [1, 2]}),
        ("renew", {"replica": "a", "tickets": [[1, "x"]]}),
        ("release", {"replica": "a", "tickets": {"1": 2}}),
        ("push", {"replica": "a", "ticket": "1", "attempt": 1}),
        ("evaluated", {"replica": "a", "id": 1, "version": 1, "metrics": {"accuracy": "high"}}),
        ("evaluated", {"replica": "a", "id": 1, "version": 1, "metrics": {"accuracy": float("inf")}}),
        ("evaluated", {"replica": "a", "id": 1, "version": 1, "metrics": {"accuracy": [1, 0.5]}}),
        ("evaluated", {"replica": "a", "id": 1, "version": 1, "metrics": {"accuracy": [-1, 0.5, 0.5, 1]}}),
        ("evaluated", {"replica": "a", "id": 1, "version": 1, "metrics": {"accuracy": [1, 1e300, 0.0, 1]}}),
        ("evaluated", {"replica": "a", "id": 1, "version": 1, "part": "x", "metrics": {}}),
        ("describe_data", {"num_prompts": 10, "digest": "d", "sources": [[10]]}),
        ("describe_data", {"num_prompts": 10, "digest": "d", "sources": [[5, "x"], [5, 1.0]]}),
        ("open", {}),
        ("open", {"holder": 3}),
    ],
    ids=str,
)
def test_a_malformed_request_is_refused_and_the_service_goes_on(
    raw: Client, op: str, args: dict[str, object]
) -> None:
    with pytest.raises(WireError):
        raw.call(op, **args)
    assert raw.call("status").args["residue"] == 0


@pytest.mark.parametrize("rows", [[[1]], [[1, 2]], [["1", "stale"]], "stale"], ids=str)
def test_malformed_drops_are_refused(raw: Client, learner: LearnerClient, rows: object) -> None:
    with pytest.raises(WireError):
        raw.call("trained", token=learner.token, step=0, dropped=rows)


def test_a_malformed_push_is_refused_and_counted(raw: Client) -> None:
    ticket, attempt = lease_one(raw)
    with pytest.raises(WireError):
        raw.call("push", [b"garbage"] * 7, replica="a", ticket=ticket, attempt=attempt)
    status = raw.call("status").args
    assert (status["counters"]["malformed"], status["pending"]["issued"]) == (1, 1)


def test_only_reserved_groups_are_fetched(raw: Client, learner: LearnerClient) -> None:
    ticket = push_one(raw)
    with pytest.raises(LedgerError, match="not reserved"):
        learner.fetch([ticket])


def test_a_replica_that_drains_returns_its_leases(raw: Client) -> None:
    held = [list(lease_one(raw)), list(lease_one(raw))]
    raw.call("release", replica="a", tickets=held[:1])
    assert raw.call("status").args["leases"] == {"a": 1}
    raw.call("deregister", replica="a")
    status = raw.call("status").args
    assert (status["leases"], status["reissues"]) == ({}, {"released": 1, "deregistered": 1})


def test_a_failed_group_is_counted_by_its_reason(raw: Client) -> None:
    ticket, attempt = lease_one(raw)
    raw.call("fail", replica="a", ticket=ticket, attempt=attempt, reason="timeout")
    raw.call("fail", replica="a", ticket=ticket, attempt=attempt, reason="timeout")
    counters = raw.call("status").args["counters"]
    assert (counters["failed/timeout"], counters["late"]) == (1, 1)


def test_build_makes_a_service_that_reports_itself(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}})
    service = build(ServiceContext(config, "buffer.0", tmp_path, "id"))
    assert (tmp_path / "buffer" / "events.sqlite").exists()
    stop = ThreadEvent()
    thread = threading.Thread(target=service.run, args=(stop,), daemon=True)
    thread.start()
    client = Client(ThreadRuntime(), service.status().address)
    status = client.call("status").args
    assert {
        "residue",
        "issued",
        "trained",
        "dropped",
        "pending",
        "prompts_drawn",
        "given_up",
        "open",
    } <= {*status}
    assert service.status().state == "READY"
    with pytest.raises(ConfigError, match="no command"):
        service.command(Drain())
    stop.set()
    thread.join(WAIT_S)
    client.close()
    assert service.status().state == "ENDED"


def test_the_room_promised_for_a_group_fits_the_largest_one() -> None:
    values = {
        "model": {"path": "m"},
        "data": {"train": "t", "max_prompt_tokens": 3},
        "reward": {"fn": "f"},
        "rollout": {"group_size": 2, "max_tokens": 5},
    }
    frames = encode_group(make_group(1 << 60, 1 << 30, 1 << 60))
    assert sum(len(frame) for frame in frames) <= max_group_bytes(Config.model_validate(values))


@pytest.mark.parametrize(
    ("order", "is_shuffled", "is_ascending"),
    [("shuffled", True, False), ("sequential", False, False), ("extra_info.level", True, True)],
)
def test_the_ledger_orders_prompts_as_the_configuration_says(
    order: str, is_shuffled: bool, is_ascending: bool
) -> None:
    data = {"train": "t", "order": order}
    settings = ledger_settings(
        Config.model_validate({"model": {"path": "m"}, "data": data, "reward": {"fn": "f"}})
    )
    assert (settings.is_shuffled, settings.is_ascending) == (is_shuffled, is_ascending)
