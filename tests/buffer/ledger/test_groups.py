"""A group is trained whole or not at all: failed trajectories, short groups, groups without a spread."""

from __future__ import annotations

import dataclasses

import pytest

from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.tickets import Grant, State
from asyncrl.buffer.store import ExperienceStore
from asyncrl.control.rows.metering import Meter
from asyncrl.core.errors import WireError
from asyncrl.core.experience import UNFINISHED, Group, Trajectory, encode_group
from tests.buffer.parts import GROUP_SIZE, make_group, make_store
from tests.statuses import statuses_of

SAME, DIFFERENT = (0.5,) * GROUP_SIZE, (0.0, 1.0)


def begin(**changes: object) -> tuple[ExperienceStore, int]:
    store = make_store(None, True, **changes)
    store.ledger.describe_data(100, "digest")
    token = store.ledger.open("learner")
    store.ledger.register_version(token, 0)
    return store, token


def lease(store: ExperienceStore) -> Grant:
    (grant,) = store.ledger.lease("a", 1, 1, 0.0)
    return grant


def push(store: ExperienceStore, grant: Grant, rewards: tuple[float, ...] = DIFFERENT) -> str:
    return store.push(
        "a",
        grant.ticket,
        grant.attempt,
        encode_group(make_group(grant.ticket, grant.attempt, rewards=rewards)),
    )


@pytest.mark.parametrize("num_trajectories", [1, 3])
def test_a_short_or_long_group_is_refused_loudly_and_tried_again(num_trajectories: int) -> None:
    store, token = begin()
    grant = lease(store)
    with pytest.raises(WireError, match=f"has {GROUP_SIZE} trajectories, not {num_trajectories}"):
        push(store, grant, rewards=(0.0, 1.0, 0.5)[:num_trajectories])
    assert store.counters["malformed"] == 1
    again = lease(store)
    assert (again.ticket, again.attempt, again.index) == (grant.ticket, 2, grant.index)
    assert store.ledger.reserve(token, 0, 0.0) is None


def test_a_group_of_forked_samples_is_stored_by_their_number_not_by_that_of_its_rows() -> None:
    store, _ = begin()
    grant = lease(store)
    group = make_group(grant.ticket, grant.attempt, rewards=DIFFERENT)
    rows = (group.trajectories[0], *group.trajectories)
    samples = (0, *range(GROUP_SIZE))
    forked = dataclasses.replace(group, trajectories=rows, forked=samples)
    assert store.push("a", grant.ticket, grant.attempt, encode_group(forked)) == "stored"


def test_a_trajectory_without_a_sampled_token_does_not_count_as_one() -> None:
    store, _ = begin()
    grant = lease(store)
    group = make_group(grant.ticket, grant.attempt)
    empty = dataclasses.replace(group.trajectories[0], loss_mask=group.trajectories[0].loss_mask * 0)
    short = dataclasses.replace(group, trajectories=(empty, *group.trajectories[1:]))
    with pytest.raises(WireError, match="no sampled token"):
        store.push("a", grant.ticket, grant.attempt, encode_group(short))


def test_a_group_with_a_failed_trajectory_is_retried_and_in_the_end_dropped_with_a_reason() -> None:
    store, _ = begin()
    for attempt in (1, 2, 3):
        grant = lease(store)
        assert (grant.ticket, grant.attempt) == (1, attempt)
        store.fail("a", grant.ticket, grant.attempt, "EnvironmentDied: no answer")
    census = take_census(store.ledger.state)
    assert (census.dropped, census.given_up, census.residue) == ({"poison": 1}, 1, 0)
    assert store.counters["failed/EnvironmentDied: no answer"] == 3
    assert lease(store).ticket == 2


def test_groups_without_a_spread_of_rewards_are_rejected_and_their_places_filled() -> None:
    store, token = begin()
    for number in range(4):
        verdict = push(store, lease(store), rewards=SAME if number % 3 else DIFFERENT)
        assert verdict == ("dropped" if number % 3 else "stored")
    batch = store.ledger.reserve(token, 0, 0.0)
    assert batch is not None and [ticket.id for ticket in batch] == [1, 4], (
        "a whole batch of groups with a spread"
    )
    positions = [ticket.position for ticket in batch]
    assert positions == [0, 1], "what was dropped leaves no gap"
    census = take_census(store.ledger.state)
    assert (census.dropped, census.prompts_drawn, census.residue) == ({"zero_variance": 2}, 4, 0)


def test_what_was_dropped_is_counted_by_reason_in_the_metrics() -> None:
    store, _ = begin()
    push(store, lease(store), rewards=SAME)
    census = take_census(store.ledger.state).as_values()
    row = Meter().update(1.0, statuses_of({"buffer.0": census}))
    assert row["buffer/dropped/zero_variance"] == 1
    assert [row[f"buffer/dropped/{reason}"] for reason in ("stale", "poison", "guard")] == [0, 0, 0]


def test_a_partial_rollout_is_kept_for_the_next_attempt_and_never_trained_as_it_is() -> None:
    store, token = begin()
    grant = lease(store)
    frames = encode_group(make_group(grant.ticket, grant.attempt))
    assert store.store_partial("a", grant.ticket, grant.attempt, frames) == "stored"
    store.commit(0.0)
    assert store.ledger.state.counts[State.STORED] == 0
    again = lease(store)
    assert (again.ticket, again.attempt, again.partial_attempt) == (grant.ticket, 2, 1)
    found = store.fetch_partial("a", again.ticket, again.attempt)
    assert found is not None and [bytes(frame) for frame in found] == [bytes(frame) for frame in frames]
    assert store.fetch_partial("b", again.ticket, again.attempt) is None, "only for who holds the lease"
    assert store.store_partial("a", grant.ticket, grant.attempt, frames) == "late"
    assert push(store, again) == "stored"
    store.commit(0.0)
    push(store, lease(store))
    batch = store.ledger.reserve(token, 0, 0.0)
    assert batch is not None
    payloads, lost = store.fetch([ticket.id for ticket in batch])
    assert (len(payloads), lost) == (2, [])


def with_first(group: Group, first: Trajectory) -> Group:
    return dataclasses.replace(group, trajectories=(first, *group.trajectories[1:]))


def begun(trajectory: Trajectory, num_tokens: int) -> Trajectory:
    """Return the first tokens of a trajectory, as a draining replica hands them back."""
    columns = {
        name: getattr(trajectory, name)[:num_tokens] for name in ("response_ids", "loss_mask", "logprobs")
    }
    spans = trajectory.spans[:num_tokens]
    spans = tuple(dataclasses.replace(span, end=num_tokens) for span in spans)
    return dataclasses.replace(trajectory, **columns, spans=spans, finish_reason=UNFINISHED)


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_unfinished_work_may_be_pushed_as_partial_and_never_as_whole(num_tokens: int) -> None:
    store, _ = begin()
    grant = lease(store)
    whole = make_group(grant.ticket, grant.attempt)
    frames = encode_group(with_first(whole, begun(whole.trajectories[0], num_tokens)))
    with pytest.raises(WireError, match="unfinished trajectories are for partial rollouts only"):
        store.push("a", grant.ticket, grant.attempt, frames)
    again = lease(store)
    whole = make_group(again.ticket, again.attempt)
    frames = encode_group(with_first(whole, begun(whole.trajectories[0], num_tokens)))
    assert store.store_partial("a", again.ticket, again.attempt, frames) == "stored"
    assert lease(store).partial_attempt == again.attempt


def test_a_partial_rollout_without_any_token_is_refused() -> None:
    store, _ = begin()
    grant = lease(store)
    whole = make_group(grant.ticket, grant.attempt)
    nothing = dataclasses.replace(whole, trajectories=tuple(begun(one, 0) for one in whole.trajectories))
    with pytest.raises(WireError, match="the group has no token"):
        store.store_partial("a", grant.ticket, grant.attempt, encode_group(nothing))


@pytest.mark.parametrize(
    ("finish", "is_right"), [("length", True), ("turns", True), ("stop", False), ("done", False)]
)
def test_an_answer_that_was_cut_may_be_masked_whole_and_no_other(finish: str, is_right: bool) -> None:
    store, _ = begin()
    grant = lease(store)
    group = make_group(grant.ticket, grant.attempt)
    first = group.trajectories[0]
    masked = dataclasses.replace(first, loss_mask=first.loss_mask * 0, finish_reason=finish)
    frames = encode_group(with_first(group, masked))
    if is_right:
        assert store.push("a", grant.ticket, grant.attempt, frames) == "stored"
        return
    with pytest.raises(WireError, match="no sampled token"):
        store.push("a", grant.ticket, grant.attempt, frames)


def test_a_group_whose_answers_are_all_masked_is_dropped_with_a_reason_of_its_own() -> None:
    store, _ = begin()
    grant = lease(store)
    group = make_group(grant.ticket, grant.attempt)
    masked = [
        dataclasses.replace(one, loss_mask=one.loss_mask * 0, finish_reason="length")
        for one in group.trajectories
    ]
    frames = encode_group(dataclasses.replace(group, trajectories=tuple(masked)))
    assert store.push("a", grant.ticket, grant.attempt, frames) == "dropped"
    census = take_census(store.ledger.state)
    assert (census.dropped, census.given_up, census.residue) == ({"masked": 1}, 1, 0)
