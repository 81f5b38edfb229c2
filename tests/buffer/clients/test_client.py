"""The learner's client: payloads that travel ahead, and in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from asyncrl.buffer.client import FETCHED_AT_ONCE, LearnerClient, ReplicaClient, read_fetched, split_frames
from asyncrl.buffer.messages import Fetched
from asyncrl.buffer.service import BufferService, RequestHandler
from asyncrl.core.errors import FencedError, LedgerError, WireError
from asyncrl.core.experience import encode_group
from asyncrl.core.metrics.tallies import Tally
from asyncrl.core.rpc import Client
from asyncrl.core.rpc.message import Answer
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.buffer.parts import SETTINGS, make_group, make_store, serving
from tests.runtimes import ManualClock

NUM_GROUPS = 2 * FETCHED_AT_ONCE + 1


@pytest.fixture
def service() -> Iterator[BufferService]:
    store = make_store(groups_per_step=NUM_GROUPS, memory_bytes=4 * NUM_GROUPS * SETTINGS.max_group_bytes)
    with serving(store) as running:
        yield running


def push(raw: Client, num_groups: int) -> list[int]:
    grants = raw.call("lease", replica="a", version=1, want=num_groups, wait_s=0.0).args["grants"]
    for grant in grants:
        ticket, attempt = grant["ticket"], grant["attempt"]
        frames = encode_group(make_group(ticket, attempt, num_tokens=ticket))
        raw.call("push", frames, replica="a", ticket=ticket, attempt=attempt)
    return [grant["ticket"] for grant in grants]


def reserve(learner: LearnerClient) -> list[int]:
    batch = learner.reserve(0, 10.0)
    assert batch is not None
    return [ticket.ticket for ticket in batch.tickets]


def test_a_batch_larger_than_one_answer_comes_whole_and_in_order(raw: Client, learner: LearnerClient) -> None:
    tickets = push(raw, NUM_GROUPS)
    assert reserve(learner) == tickets
    wanted = tickets[::-1]
    groups = learner.fetch(wanted)
    assert [group.ticket for group in groups] == wanted
    assert [group.trajectories[0].num_tokens for group in groups] == wanted


def test_what_was_prefetched_is_not_sent_again(raw: Client, learner: LearnerClient) -> None:
    tickets = push(raw, NUM_GROUPS)
    learner.prefetch(3)
    assert learner.status().pending.reserved == 0, "prefetching reserves nothing"
    reserve(learner)
    groups = learner.fetch(tickets)
    assert [group.ticket for group in groups] == tickets
    np.testing.assert_array_equal(groups[0].prompt_ids, [1, 2, 3])
    args = {"token": learner.token, "tickets": tickets[:3], "have": [[tickets[0], 1], [tickets[1], 7]]}
    assert raw.call("fetch", **args).args["frames_per_group"] == [0, 7, 7], "only the right attempt counts"


def test_a_prefetch_before_anything_is_complete_brings_nothing_and_harms_nothing(
    raw: Client, learner: LearnerClient
) -> None:
    learner.prefetch(3)
    tickets = push(raw, NUM_GROUPS)
    assert reserve(learner) == tickets
    assert [group.ticket for group in learner.fetch(tickets)] == tickets


def test_a_newer_prefetch_takes_the_place_of_an_older_one(raw: Client, learner: LearnerClient) -> None:
    learner.prefetch(3)
    tickets = push(raw, NUM_GROUPS)
    learner.prefetch(NUM_GROUPS)
    assert reserve(learner) == tickets
    assert [group.ticket for group in learner.fetch(tickets)] == tickets


def test_prefetching_is_refused_beyond_its_bound_and_to_an_older_learner(
    raw: Client, learner: LearnerClient
) -> None:
    with pytest.raises(WireError, match="num_groups"):
        raw.call("prefetch", token=learner.token, num_groups=1 << 30)
    with pytest.raises(FencedError):
        raw.call("prefetch", token=learner.token - 1, num_groups=1)


def test_a_fetch_of_more_parts_than_a_service_keeps_replies_loses_none() -> None:
    num_groups = 1200  # in 300 parts
    store = make_store(groups_per_step=num_groups, memory_bytes=4 * num_groups * SETTINGS.max_group_bytes)

    async def fill(address: str) -> None:
        replica = ReplicaClient(address, "a")
        await replica.describe_data(10_000, "d")
        # A turn's replies leave at once, and half of `UNSENT_REPLIES` is what is kept for sure.
        while grants := (await replica.lease(1, 250, 0.0)).grants:
            await asyncio.gather(*(replica.push(make_group(one.ticket, one.attempt)) for one in grants))
        replica.close()

    with serving(store) as service:
        learner = LearnerClient(service.address, deadline_s=60.0)
        learner.open("learner.0")
        learner.register_version(0)
        asyncio.run(fill(service.address))
        reserved = learner.reserve(0, wait_s=5.0)
        assert reserved is not None
        tickets = [one.ticket for one in reserved.tickets]
        assert [group.ticket for group in learner.fetch(tickets)] == tickets
        learner.close()


def test_a_status_tells_the_newest_evaluations_only() -> None:
    store = make_store()
    evaluations, ledger = store.ledger.evaluations, store.ledger
    ledger.register_version(ledger.open("learner"), 0)
    for step in range(100):
        evaluations.finish(evaluations.request(step), 1, {"accuracy": Tally(1, 0.5)})
    told = RequestHandler(store, ManualClock()).status()
    assert [one.step for one in told.evaluations] == list(range(36, 100))
    assert told.evaluations_pending == 0


def test_a_status_with_many_metrics_per_evaluation_tells_fewer_and_at_least_one() -> None:
    store = make_store()
    evaluations, ledger = store.ledger.evaluations, store.ledger
    ledger.register_version(ledger.open("learner"), 0)
    for step, num_metrics in enumerate((1500, 1500, 1500, 5000)):
        tallies = {f"m{number}": Tally(1, 0.5) for number in range(num_metrics)}
        evaluations.finish(evaluations.request(step), 1, tallies)
        told = RequestHandler(store, ManualClock()).status().evaluations
        first = {0: 0, 1: 0, 2: 1, 3: 3}[step]
        assert [one.step for one in told] == list(range(first, step + 1))


def test_a_call_that_was_made_again_changes_nothing_if_it_comes_late(
    service: BufferService, learner: LearnerClient, raw: Client
) -> None:
    late = Client(
        ThreadRuntime(), service.address
    )  # a connection that broke, whose learner went on over another one
    args = {"step": 0, "is_fork": False, "note": {}, "refused": []}
    learner.resume(0)
    number = learner.register_version(0)
    with pytest.raises(LedgerError, match="behind a later call"):
        late.call("resume", token=learner.token, **args)
    late.close()
    grants = raw.call("lease", replica="a", version=number, want=1, wait_s=0.0).args["grants"]
    assert len(grants) == 1, "the version that is published is not abandoned"


def test_an_answer_whose_frames_do_not_fit_what_was_fetched_is_refused() -> None:
    frames = encode_group(make_group(1))
    with pytest.raises(WireError, match="the groups that it names"):
        split_frames(Answer(Fetched((len(frames) + 1,)), frames))
    with pytest.raises(WireError, match="the tickets that were fetched"):
        read_fetched([1, 2], Answer(Fetched((len(frames),)), frames), {})
    with pytest.raises(WireError, match="left out groups"):
        read_fetched([1, 2], Answer(Fetched((len(frames), 0)), frames), {})
    assert list(read_fetched([1, 2], Answer(Fetched((len(frames), 0)), frames), {2: make_group(2)})) == [1]
