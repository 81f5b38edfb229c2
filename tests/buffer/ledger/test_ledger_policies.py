"""Policies `mask`, `drop` and `wait` for a group with a token over the bound; and partial rollouts."""

from __future__ import annotations

import msgpack
import pytest

from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.events import (
    Dropped,
    PartialDropped,
    PartialStored,
    Reissued,
    Trained,
    pack,
    unpack,
)
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import Grant, State
from asyncrl.core.errors import LedgerError, WireError
from tests.buffer.ledger.parts.ledger_runs import GROUP_BYTES, SETTINGS, Run


def late(policy: str, **changes: object) -> tuple[Run, Grant]:
    """A run at step 2 whose ticket 1 has been in work since step 0: one step over the bound of 1."""
    run = Run(policy=policy, **changes)
    (slow,) = run.lease(replica="slow")
    run.train(), run.train()
    return run, slow


def reserve(run: Run, now: float = 0.0) -> list[int] | None:
    batch = run.ledger.reserve(run.token, run.state.steps_trained, now)
    return None if batch is None else [ticket.id for ticket in batch]


# mask


def test_mask_hands_a_late_group_to_the_learner_which_masks_it() -> None:
    run, slow = late("mask")
    run.store(slow, version=1)
    run.fill(1)
    batch = reserve(run)
    assert batch is not None and slow.ticket in batch
    counted = dict(run.ledger.counted_versions([run.state.tickets[slow.ticket]]))
    assert run.state.steps_trained - counted[1] > SETTINGS.max_lag


# drop


def test_drop_drops_a_group_with_an_over_age_token_and_takes_the_next_oldest() -> None:
    run, slow = late("drop")
    run.store(slow, version=1)
    run.fill(1)
    assert reserve(run) is None, "one fresh group is not a batch"
    dropped = run.state.tickets[slow.ticket]
    assert (dropped.state, dropped.is_given_up) == (State.DROPPED, False)
    assert take_census(run.state).dropped == {"stale": 1}
    (child,) = [ticket for ticket in run.state.tickets.values() if ticket.parent == slow.ticket]
    assert (child.state, child.generation, child.index) == (State.ISSUED, 1, slow.index)
    fresh = run.fill(1)
    assert fresh == [child.id], "the child is leased before new prompts"
    assert run.residue == 0
    batch = reserve(run)
    assert batch is not None and slow.ticket not in batch


def test_drop_looks_at_every_token_not_at_the_youngest() -> None:
    run, slow = late("drop")
    run.ledger.store(slow.ticket, 10, 100, (1, run.version))
    assert reserve(run) is None
    assert run.state.tickets[slow.ticket].state is State.DROPPED


def test_drop_judges_what_comes_while_the_learner_waits() -> None:
    run, slow = late("drop")
    assert reserve(run) is None
    run.store(slow, version=1)
    run.fill(1)
    assert reserve(run) is None
    assert run.state.tickets[slow.ticket].state is State.DROPPED


def test_drop_finds_what_a_new_step_made_over_age() -> None:
    run = Run(policy="drop", max_lag=1, groups_per_step=1, ready_batches=2)
    (first, second) = run.lease(want=2)
    run.store(first), run.store(second)
    assert run.train() == [first.ticket]
    (third,) = run.lease()
    run.store(third, version=1)
    assert run.train() == [second.ticket], "all are in bound at step 1"
    assert reserve(run) is None, "what stayed is not at step 2"
    assert run.state.tickets[third.ticket].state is State.DROPPED


def test_a_dropped_group_leaves_no_gap_in_the_order() -> None:
    run, slow = late("drop")
    positions = sorted(ticket.position for ticket in run.state.tickets.values() if ticket.step < 0)
    run.store(slow, version=1)
    reserve(run)
    (grant,) = run.lease()
    assert run.state.tickets[grant.ticket].position == 2 * SETTINGS.groups_per_step + len(positions) - 1


def test_a_prompt_in_its_last_generation_is_not_dropped_but_masked() -> None:
    run = Run(policy="drop", groups_per_step=1, max_lag=0, max_attempts=2)
    run.train()
    (old,) = run.lease()
    run.store(old, version=1)
    assert reserve(run) is None, "over age at step 1: dropped"
    (child,) = run.lease()
    assert run.state.tickets[child.ticket].generation == 1
    run.store(child, version=1)
    assert reserve(run) == [child.ticket], "the last generation is left to the mask"
    assert run.residue == 0


def test_a_replayed_step_keeps_its_tickets_under_drop() -> None:
    run = Run(policy="drop", max_lag=0)
    batches = [run.train(), run.train()]
    run.reopen(0)
    assert [run.train(), run.train()] == batches


# wait


def in_flight(**changes: object) -> tuple[Run, Grant]:
    """A run at step 1: ticket 1 is in work at the weights of step 0, and the batch is complete."""
    run = Run(policy="wait", max_wait_s=5.0, lease_s=100.0, **changes)
    (slow,) = run.lease(replica="slow")
    run.train()
    run.fill(2)
    return run, slow


def test_wait_holds_a_step_back_while_it_would_push_a_group_in_flight_over_the_bound() -> None:
    run, slow = in_flight()
    assert reserve(run, now=1.0) is None
    run.store(slow, version=1)
    batch = reserve(run, now=1.5)
    assert batch is not None and slow.ticket in batch, "it is trained in bound"


def test_wait_ends_after_max_wait_s_and_goes_on_as_mask() -> None:
    run, slow = in_flight()
    assert reserve(run, now=1.0) is None
    assert reserve(run, now=5.9) is None
    batch = reserve(run, now=6.0)
    assert batch is not None and slow.ticket not in batch


def test_wait_does_not_wait_for_groups_that_stay_in_bound() -> None:
    run, _ = in_flight(max_lag=2)
    assert reserve(run, now=1.0) is not None


def test_wait_does_not_wait_for_a_group_that_the_batch_would_not_take() -> None:
    run = Run(policy="wait", max_lag=0, ready_batches=2, groups_per_step=1)
    (first,) = run.lease()
    run.store(first)
    state = run.state
    assert state.counts[State.STORED] == 1
    assert reserve(run) == [first.ticket]


def test_a_new_batch_may_wait_as_long_as_the_one_before() -> None:
    run = Run(policy="wait", max_wait_s=5.0, lease_s=1e6, groups_per_step=1, max_lag=2)
    run.lease(replica="slow")
    run.train()
    run.lease(replica="slow")
    run.train()
    for began in (10.0, 100.0):
        run.fill(1)
        assert reserve(run, began) is None, "the older, then the younger group in flight is at the bound"
        assert reserve(run, began + 4.9) is None
        assert reserve(run, began + 5.0) is not None
        run.ledger.trained(run.token, run.state.steps_trained)
        run.version = run.ledger.register_version(run.token, run.state.steps_trained)


def test_wait_does_not_wait_for_a_group_that_is_over_age_already() -> None:
    run, _ = in_flight()
    assert reserve(run, now=0.0) is None
    assert reserve(run, now=5.0) is not None
    run.ledger.trained(run.token, 1)
    run.version = run.ledger.register_version(run.token, 2)
    run.fill(2)
    assert reserve(run, now=6.0) is not None


def test_a_learner_that_resumes_begins_to_wait_anew() -> None:
    run, _ = in_flight()
    assert reserve(run, now=0.0) is None
    run.ledger.checkpointed(run.token, 1, "d", [1])
    run.reopen(1)
    assert reserve(run, now=4.9) is None
    assert reserve(run, now=5.0) is None
    assert reserve(run, now=9.9) is not None


# The bound on what is trained


def test_the_largest_lag_that_was_trained_is_remembered() -> None:
    run = Run()
    run.fill(2)
    reserve(run)
    run.ledger.trained(run.token, 0, lag_max=1)
    assert Trained(0, 1) in run.ledger.drain_events()


def test_a_step_that_trained_a_token_over_the_bound_is_not_booked() -> None:
    run = Run()
    run.fill(2)
    reserve(run)
    with pytest.raises(LedgerError, match="of lag 2, the bound is 1"):
        run.ledger.trained(run.token, 0, lag_max=2)
    assert run.state.steps_trained == 0


# Partial rollouts


def store_partial(run: Run, grant: Grant, num_bytes: int = 100) -> str:
    number = run.version
    return run.ledger.store_partial("a", grant.ticket, grant.attempt, 5, num_bytes, (number, number))


def test_a_partial_rollout_comes_with_the_next_attempt_and_counts_as_memory() -> None:
    run = Run()
    (grant,) = run.lease()
    assert store_partial(run, grant) == "stored"
    assert (run.state.held_bytes, run.state.partial_bytes) == (100, 100)
    (again,) = run.lease(replica="b")
    assert (again.ticket, again.attempt, again.partial_attempt) == (grant.ticket, 2, 1)
    run.store(again)
    assert (run.state.held_bytes, run.state.partial_bytes) == (100, 0), "the group takes its place"
    assert run.state.tickets[grant.ticket].partial is None


def test_a_partial_rollout_survives_an_attempt_that_fails() -> None:
    run = Run()
    (grant,) = run.lease()
    store_partial(run, grant)
    (again,) = run.lease()
    run.ledger.fail("a", again.ticket, again.attempt)
    assert run.lease()[0].partial_attempt == 1


def test_a_partial_rollout_that_would_be_over_age_in_its_turn_is_generated_again() -> None:
    run = Run(max_lag=0, groups_per_step=1)
    (grant,) = run.lease()
    store_partial(run, grant)
    run.train()
    (late_grant,) = run.lease()
    assert run.ledger.store_partial("a", late_grant.ticket, late_grant.attempt, 5, 100, (1, 2)) == "stored"
    (again,) = run.lease()
    assert (again.ticket, again.partial_attempt) == (late_grant.ticket, 0)
    assert run.state.partial_bytes == 0
    assert again.ticket in run.state.released, "the journal may forget it"


def test_carries_never_take_the_memory_that_groups_need() -> None:
    run = Run(memory_bytes=5 * GROUP_BYTES)
    first, second = run.lease(want=2)
    assert store_partial(run, first, GROUP_BYTES) == "stored"
    assert store_partial(run, second, 1) == "released", "two batches of groups must always fit"
    assert run.state.tickets[second.ticket].attempt == 2


def test_a_second_carry_replaces_the_first() -> None:
    run = Run()
    (grant,) = run.lease()
    store_partial(run, grant, 100)
    (again,) = run.lease()
    store_partial(run, again, 300)
    assert (run.state.partial_bytes, run.lease()[0].partial_attempt) == (300, 2)


def test_a_dropped_ticket_carries_nothing() -> None:
    run = Run(max_attempts=1)
    (grant,) = run.lease()
    store_partial(run, grant)
    (again,) = run.lease()
    run.ledger.fail("a", again.ticket, again.attempt)
    assert (run.state.held_bytes, run.state.partial_bytes) == (0, 0)


# Records of turns


def store_turns(run: Run, grant: Grant, number: int, num_bytes: int = 50, version: int = 1) -> str:
    key = grant.ticket, grant.attempt, number
    return run.ledger.store_turns("a", *key, num_bytes, (version, version))


def test_records_of_turns_are_kept_while_the_lease_goes_on_and_come_with_the_next_attempt() -> None:
    run = Run()
    (grant,) = run.lease()
    assert [store_turns(run, grant, number) for number in (1, 2)] == ["stored", "stored"]
    assert run.ledger.holds_lease("a", grant.ticket, 1)
    assert (run.state.held_bytes, run.state.partial_bytes) == (100, 100)
    run.ledger.deregister("a")
    (again,) = run.lease()
    assert (again.ticket, again.attempt, again.partial_attempt) == (grant.ticket, 2, 1)
    assert store_turns(run, again, 3) == "stored"
    assert run.state.tickets[grant.ticket].partial == (2, 0, 150, (1, 1), 3)
    run.store(again)
    assert (run.state.held_bytes, run.state.partial_bytes) == (100, 0), "the group takes their place"


def test_a_record_counts_once_and_none_may_be_left_out() -> None:
    run = Run()
    (grant,) = run.lease()
    assert [store_turns(run, grant, number) for number in (1, 1, 2, 1)] == [
        *("stored", "duplicate", "stored", "duplicate")
    ]
    with pytest.raises(LedgerError, match="record 4 of ticket 1 does not follow record 2"):
        store_turns(run, grant, 4)
    assert run.state.partial_bytes == 100


def test_an_older_attempt_may_add_no_record_and_a_newer_one_takes_none_for_its_own() -> None:
    run = Run()
    (old,) = run.lease()
    store_turns(run, old, 1)
    run.ledger.deregister("a")
    (new,) = run.lease()
    assert store_turns(run, old, 2) == "late"
    with pytest.raises(LedgerError, match="record 1 of ticket 1 does not follow record 1"):
        store_turns(run, new, 1)


def test_records_that_would_be_over_age_are_let_go_and_the_next_one_is_the_first() -> None:
    run = Run(max_lag=0, groups_per_step=1)
    (first,) = run.lease()
    run.store(first)
    (grant,) = run.lease(want=1) or (None,)
    assert grant is None
    run.train()
    (grant,) = run.lease()
    store_turns(run, grant, 1, version=1)
    run.ledger.deregister("a")
    (again,) = run.lease()
    assert (again.ticket, again.partial_attempt, run.state.partial_bytes) == (grant.ticket, 0, 0)
    assert store_turns(run, again, 1, version=2) == "stored"


def test_records_are_as_old_as_their_oldest_token_and_as_new_as_their_newest() -> None:
    run = Run()
    (grant,) = run.lease()
    newest = run.ledger.register_version(run.token, 0)
    for number, version in enumerate((newest, 1, newest), 1):
        store_turns(run, grant, number, version=version)
    partial = run.state.tickets[grant.ticket].partial
    assert partial is not None and partial.versions == (1, newest)


def test_a_ticket_s_records_are_never_larger_than_a_group() -> None:
    run = Run()
    (grant,) = run.lease()
    assert store_turns(run, grant, 1, GROUP_BYTES - 1) == "stored"
    assert [store_turns(run, grant, 2, num_bytes) for num_bytes in (2, 1)] == ["full", "stored"]


def test_records_never_take_the_memory_that_groups_need() -> None:
    run = Run(memory_bytes=5 * GROUP_BYTES)
    first, second = run.lease(want=2)
    assert store_turns(run, first, 1, GROUP_BYTES) == "stored"
    assert store_turns(run, second, 1, 1) == "full", "two batches of groups must always fit"
    assert run.ledger.holds_lease("a", second.ticket, 1), "its work goes on"
    run.ledger.fail("a", first.ticket, 1)
    assert run.state.partial_bytes == GROUP_BYTES, "a failed attempt's records stay for the next one"


def test_a_drained_group_takes_the_place_of_records() -> None:
    run = Run()
    (grant,) = run.lease()
    store_turns(run, grant, 1, 70)
    store_partial(run, grant, 30)
    assert (run.state.partial_bytes, run.state.held_bytes) == (30, 30)
    (again,) = run.lease()
    assert store_turns(run, again, 1, 20) == "stored"
    assert run.state.partial_bytes == 20


def test_a_group_that_goes_on_from_old_work_is_waited_for_by_its_oldest_token() -> None:
    run = Run(policy="wait", max_wait_s=5.0, lease_s=100.0)
    (slow,) = run.lease(replica="slow")
    run.train()
    run.ledger.store_partial("slow", slow.ticket, 1, 5, 100, (1, 1))
    (again,) = run.lease(replica="slow")
    assert (again.partial_attempt, run.state.tickets[slow.ticket].version) == (1, 1)
    run.fill(2)
    assert reserve(run, now=0.0) is None


# Journals


def test_a_reason_of_an_older_journal_is_read_as_zero_variance() -> None:
    for word in ("zero_std", "uniform"):
        assert unpack(["Dropped", 7, word, True]) == Dropped(7, "zero_variance", True)


def test_partial_rollouts_and_deregistered_replicas_of_an_older_journal_keep_their_meaning() -> None:
    assert unpack(["Carried", 7, 5, 50, [1, 2]]) == PartialStored(7, 5, 50, (1, 2))
    assert unpack(["CarryDropped", 7, "stale"]) == PartialDropped(7, "stale")
    assert unpack(["Reissued", 7, "retired"]) == Reissued(7, "deregistered")


def test_events_of_an_older_journal_have_defaults() -> None:
    assert unpack(["Trained", 3]) == Trained(3, -1)
    assert unpack(["Leased", 1, "a", 9.0, 0]).version == 0


def test_a_ledger_goes_on_from_a_snapshot() -> None:
    run, slow = late("drop")
    partial, recorded = run.lease(want=2)
    store_partial(run, partial)
    store_turns(run, recorded, 1)
    run.ledger.drain_events()
    snapshot = msgpack.unpackb(msgpack.packb(run.state.as_snapshot()), strict_map_key=False)
    run.store(slow, version=1)
    reserve(run)
    events = [unpack(pack(event)) for event in run.ledger.drain_events()]
    again = Ledger.replay(run.ledger.settings, events, snapshot)
    assert again.state.as_values() == run.state.as_values()
    assert again.lease("a", run.version, 3, 0.0) == run.lease(want=3)


def test_a_snapshot_with_the_names_of_an_older_asyncrl_is_the_same_ledger() -> None:
    run, _ = late("drop")
    first, second = run.lease(want=2)
    store_partial(run, first)
    run.ledger.deregister("a")
    run.ledger.drop_zero_variance(run.lease()[0].ticket)
    new = msgpack.packb(run.state.as_snapshot())
    renamed = {"partial": "carry", "partial_bytes": "carry_bytes", "zero_variance": "uniform"}
    renamed["deregistered"] = "retired"

    def older(value: object) -> object:
        if isinstance(value, dict):
            return {older(key): older(item) for key, item in value.items()}
        if isinstance(value, list):
            return [older(item) for item in value]
        return renamed.get(value, value) if isinstance(value, str) else value

    old = older(msgpack.unpackb(new, strict_map_key=False)) | {"snapshot_version": 2}
    old["mappings"]["reissues"] = [
        ["carried" if reason == "carry" else reason, count] for reason, count in old["mappings"]["reissues"]
    ]
    assert second.attempt == 1 and b"uniform" in msgpack.packb(old) and b"partial" not in msgpack.packb(old)
    again = Ledger.replay(run.ledger.settings, [], old)
    assert again.state.as_values() == run.state.as_values()
    old["mappings"]["folded_dropped"] = [["zero_std", 2], ["uniform", 3]]
    again = Ledger.replay(run.ledger.settings, [], old)
    assert again.state.folded_dropped == {"zero_variance": 5}, "two older names of one reason"


@pytest.mark.parametrize("damage", ["version", "fields", "row", "row's fields"])
def test_a_snapshot_that_is_none_is_refused(damage: str) -> None:
    run = Run()
    run.fill(1)
    snapshot = run.state.as_snapshot()
    if damage == "version":
        snapshot["snapshot_version"] = 99
    elif damage == "fields":
        del snapshot["by_step"]
    elif damage == "row's fields":
        snapshot["ticket_fields"] = snapshot["ticket_fields"][::-1]
    else:
        snapshot["tickets"][0] = snapshot["tickets"][0][:3]
    with pytest.raises(WireError, match="snapshot"):
        LedgerState.from_snapshot(run.ledger.settings, snapshot)


# After a resume: steps with gaps


def test_a_step_that_lost_all_its_groups_gets_new_ones_although_later_steps_are_full() -> None:
    run = Run(max_lag=0)
    run.train(dropped=((1, "guard"), (2, "guard")))
    run.fill(2)
    reserve(run)
    run.reopen(0)
    assert reserve(run) is None
    grants = run.lease(want=9)
    assert [run.state.tickets[grant.ticket].position for grant in grants] == [0, 1]
    for grant in grants:
        run.store(grant)
    assert reserve(run) == [grant.ticket for grant in grants]


def test_places_of_last_steps_that_lost_all_their_groups_are_taken_as_if_they_were_never_reserved() -> None:
    run = Run()
    run.train()
    last = run.train()
    run.reopen(0, tuple(last))
    assert run.state.num_missing == 0
    assert [run.state.tickets[grant.ticket].position for grant in run.lease(want=2)] == [2, 3]


def test_a_replay_with_more_open_groups_than_the_bound_admits_nothing_new() -> None:
    run = Run(max_lag=1)
    for _ in range(3):
        run.train()
    abandoned, _ = run.version, run.reopen(0)
    assert run.state.versions.counted_step(abandoned) == 3, "its weights come again"
    assert run.lease(version=abandoned) == []


def test_a_late_ticket_takes_its_place_behind_the_replay() -> None:
    run = Run(max_lag=1)
    (slow,) = run.lease(replica="slow")
    for _ in range(3):
        run.train()
    run.reopen(0)
    run.ledger.release("slow", [(slow.ticket, 1)])
    assert run.lease() == [], "its turn is step 3, and the weights are those of step 0"
    run.train(), run.train()
    (again,) = run.lease()
    assert (again.ticket, run.state.tickets[slow.ticket].position) == (slow.ticket, 6)


def test_what_later_steps_hold_in_memory_is_left_to_the_journal_where_it_takes_more_than_a_batch() -> None:
    run = Run(memory_bytes=4 * GROUP_BYTES)
    batches = [run.train()]
    run.ledger.checkpointed(run.token, 0, "d", [0])
    run.ledger.checkpointed(run.token, 1, "d", [0, 1])
    batches += [run.train(), run.fill(2)]
    reserve(run)
    run.reopen(1, missing=tuple(batches[1]))
    for grant in run.lease(want=2):
        run.ledger.store(grant.ticket, 10, GROUP_BYTES, (run.version, run.version))
    assert reserve(run) == batches[1], "step 1 is held beside step 2"
    run.state.freed.clear()
    run.reopen(0, missing=tuple(batches[0]))
    assert run.state.freed == batches[2], "step 1 is held, step 2 is in the journal"
    run.fill(2)
    assert reserve(run) == batches[0], "so there was room for step 0"


def test_after_a_resume_stored_groups_are_judged_anew_before_they_are_reserved():
    run = Run(policy="drop", ready_batches=2)
    run.checkpoint()
    run.train()
    run.train()
    run.fill(1)
    assert run.ledger.reserve(run.token, 2, 0.0) is None, "judged, in bound, too few"
    run.token = run.ledger.open("successor")
    run.ledger.resume(run.token, 0, is_fork=True)  # what is stored is now of an abandoned branch
    run.version = run.ledger.register_version(run.token, 0)
    for step in range(2):
        run.ledger.reserve(run.token, step, 0.0)
        run.ledger.trained(run.token, step)
        run.version = run.ledger.register_version(run.token, step + 1)
    run.ledger.drain_events()
    run.fill(1)
    assert run.ledger.reserve(run.token, 2, 0.0) is None
    dropped = [event for event in run.ledger.drain_events() if isinstance(event, Dropped)]
    assert [event.reason for event in dropped] == ["stale"]


def test_a_step_that_dropped_a_stale_group_makes_other_weights_when_it_is_replayed():
    run = Run()
    run.checkpoint()
    batch = run.fill(2)
    run.train(dropped=((batch[1], "stale"),))
    old = run.version
    assert run.state.versions.counted_step(old) == 1
    run.reopen(0)
    assert run.state.versions.counted_step(old) == -1, "one step back to the fork and one forth"
