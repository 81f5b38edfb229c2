"""The recount of a journal: it agrees with a sound ledger, and finds what a forged past hides."""

import pytest

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.cli.audit.account import TimedEvent, describe_account
from asyncrl.cli.audit.recount import Recount
from asyncrl.cli.timeline.ticket import trace_ticket
from tests.buffer.ledger.parts.ledger_runs import SETTINGS, Run


def make_past() -> tuple[Run, list[ev.Event]]:
    """A run with a resume, a failure, a drop that is repeated and one that is given up."""
    run = Run()
    run.train()
    run.checkpoint(0)
    (grant,) = run.lease()
    run.ledger.fail("a", grant.ticket, grant.attempt)
    run.train()
    batch = run.fill(1)
    run.train(dropped=((batch[0], "stale"),))
    run.reopen(1)
    run.train()
    run.train()
    (grant,) = run.lease()
    run.ledger.drop_zero_variance(grant.ticket)
    run.fill(1)
    return run, run.ledger.drain_events()


def recount(events: list[ev.Event]) -> Recount:
    found = Recount(max_lag=SETTINGS.max_lag)
    found.take_all(events)
    return found


def laws_broken_by(events: list[ev.Event]) -> set[str]:
    return {finding.law for finding in recount(events).conclude()}


def index_of(events: list[ev.Event], kind: type) -> int:
    return next(at for at, event in enumerate(events) if isinstance(event, kind))


def test_a_sound_past_has_no_findings_and_the_ledgers_own_numbers():
    run, events = make_past()
    found = recount(events)
    assert found.conclude() == []
    assert found.account() == take_census(run.state).as_values()
    assert found.steps_trained == run.state.steps_trained
    assert found.num_lineages == 2


def test_a_ticket_that_vanishes_is_found():
    _, events = make_past()
    del events[index_of(events, ev.Issued)]
    assert "S1" in laws_broken_by(events)


def test_a_group_of_a_ticket_that_is_not_leased_is_called_what_it_is():
    _, events = make_past()
    del events[index_of(events, ev.Leased)]
    assert "is stored while it is issued" in str(recount(events).conclude()[0])


def test_a_prompt_that_is_drawn_twice_is_found():
    _, events = make_past()
    first = events[index_of(events, ev.Issued)]
    second = index_of(events[events.index(first) + 1 :], ev.Issued) + events.index(first) + 1
    events[second] = first._replace(ticket=events[second].ticket, position=events[second].position)
    assert "S1" in laws_broken_by(events)


def test_a_dropped_prompt_that_nobody_repeats_is_found():
    run = Run()
    batch = run.fill(2)
    run.train(dropped=((batch[0], "stale"),))
    events = run.ledger.drain_events()
    assert laws_broken_by(events) == set()
    (child,) = [event for event in events if isinstance(event, ev.Issued) and event.parent]
    events.remove(child)
    assert laws_broken_by(events) == {"S1"}


def test_a_prompt_that_is_given_up_and_repeated_all_the_same_is_found():
    _, events = make_past()
    at = index_of(events, ev.Dropped)
    assert not events[at].is_given_up
    events[at] = events[at]._replace(is_given_up=True)
    assert "S1" in laws_broken_by(events)


def test_a_group_that_is_stored_without_a_lease_is_found():
    _, events = make_past()
    del events[index_of(events, ev.Leased)]
    assert "S1" in laws_broken_by(events)


def test_a_group_trained_at_two_steps_of_one_lineage_is_found():
    run = Run()
    run.train()
    events = run.ledger.drain_events()
    (reserved,) = [event for event in events if isinstance(event, ev.Reserved)]
    forged = [*events, reserved._replace(step=1), ev.Trained(1)]
    assert laws_broken_by(forged) & {"S1", "S2"}
    found = recount(events)
    found._batches[1] = list(reserved.tickets)  # as if the reservation had passed unseen
    found.take(ev.Trained(1))
    assert "S2" in {finding.law for finding in found.conclude()}


def test_a_step_trained_twice_without_a_resume_is_found():
    _, events = make_past()
    at = index_of(events, ev.Trained)
    assert "S2" in laws_broken_by([*events[: at + 1], events[at], *events[at + 1 :]])


def test_a_token_over_the_bound_is_found():
    _, events = make_past()
    at = index_of(events, ev.Trained)
    events[at] = events[at]._replace(lag_max=SETTINGS.max_lag)
    assert laws_broken_by(events) == set()
    events[at] = events[at]._replace(lag_max=SETTINGS.max_lag + 1)
    assert laws_broken_by(events) == {"S3"}


def test_a_group_too_old_for_any_mask_is_found_whatever_the_learner_said():
    run = Run(max_lag=3)
    for _ in range(4):
        run.train()
    events = run.ledger.drain_events()
    assert laws_broken_by(events) == set()
    stored = [at for at, event in enumerate(events) if isinstance(event, ev.Stored)][-1]
    events[stored] = events[stored]._replace(versions=(1, 1))
    assert laws_broken_by(events) == {"S3"}


@pytest.mark.parametrize("kind", [ev.Resumed, ev.Checkpointed])
def test_an_old_fencing_token_is_found(kind: type):
    _, events = make_past()
    at = index_of(events, kind)
    events[at] = events[at]._replace(token=events[at].token + 1)
    assert "S5" in laws_broken_by(events)


def test_a_version_number_that_does_not_rise_by_one_is_found():
    _, events = make_past()
    at = index_of(events, ev.VersionRegistered)
    assert "S4" in laws_broken_by([*events[: at + 1], *events[at:]])


def timed(events: list[ev.Event]) -> list[TimedEvent]:
    return [TimedEvent(float(second), event) for second, event in enumerate(events)]


def test_the_life_of_a_ticket_is_told_in_order():
    run = Run()
    run.checkpoint()
    (first,) = run.lease()
    run.ledger.fail("a", first.ticket, first.attempt)
    run.train()
    run.checkpoint(0)
    run.reopen(0)
    moments = trace_ticket(timed(run.ledger.drain_events()), first.ticket)
    assert [moment.what.split(":")[0].split(",")[0] for moment in moments] == [
        "issued",
        "attempt 1 leased to a at position 0",
        "issued again (failed)",
        "attempt 2 leased to a at position 0",
        "stored",
        "reserved for step 0",
        "trained at step 0",
        "in the checkpoint of step 1",
        "reserved for step 0 again",
    ]
    times = [moment.time_s for moment in moments]
    assert times == sorted(times)


def test_the_life_of_a_dropped_ticket_names_the_one_that_repeats_it():
    run = Run()
    batch = run.fill(2)
    run.train(dropped=((batch[0], "stale"),))
    past = timed(run.ledger.drain_events())
    whats = [moment.what for moment in trace_ticket(past, batch[0])]
    assert whats[-2:] == ["dropped (stale)", "its prompt is repeated by ticket 3"]
    assert trace_ticket(past, 3)[0].what.endswith(f"repeating ticket {batch[0]}")
    assert trace_ticket(past, 99) == []


def test_the_account_counts_lags_of_trained_groups_and_ages_of_open_tickets():
    run = Run()
    run.train()
    for _ in range(2):  # generated by the first version, trained one step later
        (grant,) = run.lease(version=1)
        run.store(grant, version=1)
    run.train()
    run.lease()
    events = run.ledger.drain_events()
    told = describe_account([TimedEvent(100.0, event) for event in events], max_lag=1)
    assert told["lag"] == {0: 2, 1: 2}
    assert told["age_s"]["under 1 s"] == told["account"]["pending"]["leased"] == 1
    late = [*(TimedEvent(100.0, event) for event in events), TimedEvent(170.0, ev.Renewed((), 0.0))]
    assert describe_account(late, max_lag=1)["age_s"]["under 600 s"] == 1
    assert (
        describe_account([TimedEvent(None, event) for event in events], max_lag=1)["account"]["issued"] == 5
    )


def test_a_recount_from_a_snapshot_ends_with_the_same_account():
    run = Run()
    run.checkpoint()
    for _ in range(3):
        run.train()
    run.checkpoint()  # folds what was trained before
    batch = run.fill(2)
    run.train(dropped=((batch[0], "stale"),))
    run.ledger.drain_events()
    values = run.state.as_snapshot()
    run.train()
    (grant,) = run.lease()
    run.ledger.drop_zero_variance(grant.ticket)
    found = Recount(max_lag=SETTINGS.max_lag)
    found.begin_at(LedgerState.from_snapshot(SETTINGS, values))
    found.take_all(run.ledger.drain_events())
    assert found.conclude() == []
    assert found.account() == take_census(run.state).as_values()
    found.num_issued += 1
    assert {finding.law for finding in found.conclude()} == {"S1"}


def test_a_ticket_that_the_snapshot_knows_may_be_dropped_and_repeated_later():
    run = Run()
    batch = run.fill(2)
    run.ledger.drain_events()
    values = run.state.as_snapshot()
    run.train(dropped=((batch[0], "stale"),))
    found = Recount(max_lag=SETTINGS.max_lag)
    found.begin_at(LedgerState.from_snapshot(SETTINGS, values))
    found.take_all(run.ledger.drain_events())
    assert found.conclude() == []


def test_a_ticket_that_was_settled_before_the_journal_begins_is_not_called_unknown():
    run, _ = make_past()
    state = run.state
    settled = next(number for number in range(1, state.num_issued + 1) if number not in state.tickets)
    (moment,) = trace_ticket([], settled, state)
    assert "settled before the snapshot" in moment.what
    assert trace_ticket([], state.num_issued + 1, state) == []
