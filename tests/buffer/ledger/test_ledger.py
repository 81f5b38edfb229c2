"""The ledger's rules, one sentence each."""

from __future__ import annotations

import pytest

from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.events import pack, unpack
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.state import MAX_DROPPED_TICKETS
from asyncrl.buffer.ledger.tickets import GIVEN_UP_LOST_LEASES, State
from asyncrl.core.errors import ConfigError, DataError, FencedError, LedgerError
from asyncrl.core.metrics.tallies import Tally
from tests.buffer.ledger.parts.ledger_runs import GROUP_BYTES, SETTINGS, Run

# Admission


def test_no_lease_before_the_data_is_described() -> None:
    with pytest.raises(DataError, match="described"):
        Ledger(SETTINGS).lease("a", 0, 1, 0.0)


def test_a_replica_that_has_loaded_nothing_gets_no_lease() -> None:
    run = Run()
    assert run.ledger.lease("a", 0, 1, 0.0) == []


def test_a_version_that_was_never_registered_gets_no_lease() -> None:
    with pytest.raises(LedgerError, match="never registered"):
        Run().lease(version=9)


def test_open_tickets_never_exceed_the_lag_bound() -> None:
    assert len(Run().lease(want=100)) == 4  # (max_lag 1 + 1) * 2 groups
    run = Run()
    run.fill(2)
    run.ledger.reserve(run.token, 0, 0.0)
    assert len(run.lease(want=100)) == 2


def test_a_ticket_beyond_the_served_versions_reach_is_not_leased() -> None:
    run = Run()
    run.train(), run.train()
    assert run.lease(version=1) == []  # the next ticket belongs to step 2, version 1 has seen none
    assert len(run.lease(version=2)) == 1


def test_ready_groups_hold_back_new_tickets_but_not_old_ones() -> None:
    run = Run()
    first, second, third = run.lease(want=3)
    run.store(second), run.store(third)
    assert run.lease() == [], "a batch is stored, so nothing new is started"
    run.ledger.release("a", [(first.ticket, first.attempt)])
    (again,) = run.lease()
    assert (again.ticket, again.attempt) == (first.ticket, 2)


def test_leases_and_groups_never_promise_more_than_the_memory() -> None:
    run = Run(max_lag=4, memory_bytes=4 * GROUP_BYTES)
    assert len(run.lease(want=100)) == 4
    assert run.state.memory_bytes == 4 * GROUP_BYTES


def test_memory_for_less_than_two_batches_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="two batches"):
        Run(memory_bytes=4 * GROUP_BYTES - 1)


def test_a_group_dropped_from_a_batch_leaves_no_room_for_older_weights() -> None:
    run = Run(max_lag=0, max_attempts=1)
    run.train(dropped=((1, "stale"), (2, "stale")))
    assert run.lease(version=1) == [], "the step used up its places although nothing was trained"
    assert len(run.lease(version=2)) == 1


def test_dropped_groups_leave_no_gap_in_the_order() -> None:
    run = Run(max_lag=0)
    first, second = run.lease(want=2)
    run.ledger.drop_zero_variance(first.ticket)
    (third,) = run.lease()
    assert run.state.tickets[third.ticket].position == 1
    run.ledger.drop_zero_variance(second.ticket)
    run.ledger.release("a", [(third.ticket, 1)])
    (again,) = run.lease()
    assert run.state.tickets[again.ticket].position == 0, "it moved forward"


def test_a_late_ticket_is_not_given_to_weights_too_old_for_the_next_step() -> None:
    run = Run(max_lag=1)
    (slow,) = run.lease(replica="slow")
    run.train(), run.train()
    run.ledger.release("slow", [(slow.ticket, 1)])
    assert run.lease(version=1) == []
    assert [grant.ticket for grant in run.lease(version=2)] == [slow.ticket]


def test_reissued_tickets_are_leased_before_new_ones_oldest_first() -> None:
    run = Run()
    first, second = run.lease(want=2)
    run.ledger.release("a", [(second.ticket, 1), (first.ticket, 1)])
    assert [grant.ticket for grant in run.lease(want=3)] == [1, 2, 3]


def test_every_pass_draws_every_prompt_once() -> None:
    run = Run(groups_per_step=5, memory_bytes=1 << 20)
    drawn = []
    for _ in range(40):
        run.train()
    drawn = [(ticket.pass_number, ticket.index) for ticket in run.state.tickets.values()]
    for number in range(2):
        assert sorted(row for at, row in drawn if at == number) == list(range(100))


# Leases


def test_an_expired_lease_goes_back_as_the_next_attempt_at_the_same_prompt() -> None:
    run = Run()
    (grant,) = run.lease()
    assert run.ledger.expire(9.9) == 0
    assert run.ledger.expire(10.0) == 1
    run.now = 10.0
    (again,) = run.lease(replica="b")
    assert (again.ticket, again.attempt, again.index, again.seed) == (
        grant.ticket,
        2,
        grant.index,
        grant.seed,
    )


def test_a_renewed_lease_does_not_expire() -> None:
    run = Run()
    (grant,) = run.lease()
    assert run.ledger.renew("a", [(grant.ticket, 1)], 9.0) == []
    assert run.ledger.expire(18.9) == 0
    assert run.ledger.expire(19.0) == 1


def test_a_replica_learns_which_leases_it_lost() -> None:
    run = Run()
    (grant,) = run.lease()
    run.ledger.expire(10.0)
    run.now = 10.0
    run.lease()
    assert run.ledger.renew("a", [(grant.ticket, 1), (grant.ticket, 2)], 11.0) == [(grant.ticket, 1)]


def test_a_deregistered_replica_holds_nothing() -> None:
    run = Run()
    run.lease(want=2)
    run.lease(replica="b")
    run.ledger.deregister("a")
    assert list(run.state.leases) == ["b"]


def test_a_replica_cannot_push_what_another_one_holds() -> None:
    run = Run()
    (grant,) = run.lease(replica="a")
    assert run.ledger.judge_push("b", grant.ticket, grant.attempt) == "late"


def test_a_second_push_is_a_duplicate_in_every_later_state() -> None:
    run = Run()
    for state in (State.STORED, State.RESERVED, State.TRAINED, State.ACKED):
        if state is State.STORED:
            run.fill(2)
        elif state is State.RESERVED:
            run.ledger.reserve(run.token, 0, 0.0)
        elif state is State.TRAINED:
            run.ledger.trained(run.token, 0)
        else:
            run.checkpoint()
        found = run.state.tickets.get(1)
        if found is not None:
            assert found.state is state
            assert run.ledger.judge_push("a", 1, 1) == "duplicate"
    assert run.ledger.judge_push("a", 1, 1) == "late", "folded tickets are remembered as a number only"


def test_a_push_of_a_lost_attempt_is_late() -> None:
    run = Run()
    (grant,) = run.lease()
    run.ledger.expire(10.0)
    assert run.ledger.judge_push("a", grant.ticket, 1) == "late"


@pytest.mark.parametrize(("ticket", "attempt"), [(0, 1), (99, 1), (1, 2), (1, 3)])
def test_a_push_that_nobody_was_asked_for_is_refused(ticket: int, attempt: int) -> None:
    run = Run()
    run.lease()
    run.ledger.release("a", [(1, 1)])
    with pytest.raises(LedgerError, match="never"):
        run.ledger.judge_push("a", ticket, attempt)


def test_only_a_leased_ticket_can_be_stored_or_dropped_as_constant() -> None:
    run = Run()
    run.fill(1)
    with pytest.raises(LedgerError, match="not leased"):
        run.store(type("G", (), {"ticket": 1})())
    with pytest.raises(LedgerError, match="not leased"):
        run.ledger.drop_zero_variance(1)


def test_a_group_of_an_unknown_version_is_not_stored() -> None:
    run = Run()
    (grant,) = run.lease()
    with pytest.raises(LedgerError, match="never registered"):
        run.store(grant, version=5)


def test_a_prompt_that_fails_every_attempt_is_given_up() -> None:
    run = Run()
    for attempt in (1, 2, 3):
        (grant,) = run.lease()
        assert (grant.ticket, grant.attempt) == (1, attempt)
        run.ledger.fail("a", 1, attempt)
    assert take_census(run.state).dropped == {"poison": 1}
    assert take_census(run.state).given_up == 1


def test_a_prompt_that_kills_every_replica_is_given_up_in_the_end() -> None:
    run = Run()
    for _ in range(3 * GIVEN_UP_LOST_LEASES):
        assert run.lease()[0].ticket == 1
        run.now += 10.0
        run.ledger.expire(run.now)
    assert run.lease()[0].ticket == 2


def test_draining_replicas_never_cost_a_prompt() -> None:
    run = Run()
    for _ in range(100):
        (grant,) = run.lease()
        run.ledger.release("a", [(grant.ticket, grant.attempt)])
    assert run.lease()[0].attempt == 101


# Steps


def test_the_oldest_complete_groups_are_reserved_sorted() -> None:
    run = Run()
    first, second, third = run.lease(want=3)
    run.store(third), run.store(second)
    run.store(first)
    assert [ticket.id for ticket in run.ledger.reserve(run.token, 0, 0.0) or []] == [1, 2]


def test_a_step_is_reserved_once() -> None:
    run = Run()
    run.fill(2)
    batch = run.ledger.reserve(run.token, 0, 0.0)
    run.fill(2)
    assert run.ledger.reserve(run.token, 0, 0.0) == batch


@pytest.mark.parametrize("step", [-1, 1, 2])
def test_only_the_next_step_can_be_reserved(step: int) -> None:
    run = Run()
    run.fill(2)
    with pytest.raises(LedgerError, match="cannot be reserved"):
        run.ledger.reserve(run.token, step, 0.0)


def test_a_step_that_is_not_reserved_cannot_be_trained() -> None:
    run = Run()
    run.fill(2)
    with pytest.raises(LedgerError, match="not reserved"):
        run.ledger.trained(run.token, 0)


def test_training_a_step_twice_counts_once() -> None:
    run = Run()
    run.train()
    run.ledger.trained(run.token, 0)
    assert (run.state.steps_trained, take_census(run.state).trained) == (1, 2)


@pytest.mark.parametrize("drop", [(3, "stale"), (2, "bored"), (1, "stale")])
def test_a_drop_that_does_not_fit_the_batch_is_refused_whole(drop: tuple[int, str]) -> None:
    run = Run()
    run.fill(2)
    run.ledger.reserve(run.token, 0, 0.0)
    with pytest.raises(LedgerError, match="cannot be dropped"):
        run.ledger.trained(run.token, 0, [(1, "stale"), drop])
    assert run.state.counts[State.RESERVED] == 2


def test_a_stale_prompt_is_issued_again_as_a_child_and_given_up_after_its_attempts() -> None:
    run = Run(groups_per_step=1)
    for generation in range(3):
        (ticket,) = run.train(dropped=((generation + 1, "stale"),))
        assert ticket == generation + 1
    parents = [(ticket.parent, ticket.index) for ticket in run.state.tickets.values()]
    assert [parent for parent, _ in parents] == [0, 1, 2]
    assert len({row for _, row in parents}) == 1
    census = take_census(run.state)
    assert (census.dropped, census.prompts_drawn, census.given_up) == ({"stale": 3}, 1, 1)


def test_weights_that_cannot_exist_get_no_version() -> None:
    run = Run()
    with pytest.raises(LedgerError, match="cannot exist"):
        run.ledger.register_version(run.token, 1)
    run.fill(2)
    run.ledger.reserve(run.token, 0, 0.0)
    with pytest.raises(LedgerError, match="cannot exist"):
        run.ledger.register_version(run.token, 1)
    run.ledger.trained(run.token, 0)
    assert run.ledger.register_version(run.token, 1) == 2


# Fencing and resume


def test_an_older_token_is_refused_everything() -> None:
    run = Run()
    run.fill(2)
    run.ledger.open("successor")
    ledger, token = run.ledger, run.token
    for act in (
        lambda: ledger.reserve(token, 0, 0.0),
        lambda: ledger.trained(token, 0),
        lambda: ledger.register_version(token, 0),
        lambda: ledger.checkpointed(token, 0, "d", [0]),
        lambda: ledger.resume(token, 0),
        lambda: ledger.request_evaluation(token, 0),
    ):
        with pytest.raises(FencedError, match="old"):
            act()


def test_a_new_learner_must_resume_before_it_goes_on() -> None:
    run = Run()
    run.train()
    token = run.ledger.open("successor")
    with pytest.raises(LedgerError, match="not resumed"):
        run.ledger.reserve(token, 1, 0.0)


def test_a_resume_replays_the_same_groups_at_the_same_steps() -> None:
    run = Run()
    run.train()
    run.checkpoint()
    batches = [run.train(), run.train()]
    run.reopen(1)
    assert take_census(run.state).trained == 2
    assert [run.train(), run.train()] == batches
    assert run.residue == 0


def test_a_replica_with_weights_that_a_resume_abandoned_gets_nothing_until_it_has_the_restored_ones() -> None:
    run = Run()
    run.train()
    run.checkpoint()
    run.train()
    abandoned = run.version
    run.reopen(1)
    run.train()
    assert run.lease(version=abandoned) == [], "the restored weights would reach it in mid-answer"
    assert len(run.lease()) == 1
    assert run.residue == 0


def test_a_resume_needs_a_committed_checkpoint() -> None:
    run = Run()
    run.train(), run.train()
    token = run.ledger.open("successor")
    with pytest.raises(LedgerError, match="no committed checkpoint"):
        run.ledger.resume(token, 1)


def test_checkpoints_of_an_abandoned_branch_are_forgotten() -> None:
    run = Run()
    run.train()
    run.checkpoint()
    run.train()
    run.checkpoint(1)
    run.reopen(1)
    assert [checkpoint.step for checkpoint in run.ledger.checkpoints()] == [1]


def test_nothing_goes_back_before_the_oldest_kept_checkpoint() -> None:
    run = Run()
    run.train()
    run.checkpoint()
    token = run.ledger.open("successor")
    with pytest.raises(LedgerError, match="no committed checkpoint"):
        run.ledger.resume(token, 0)


def test_a_lost_payload_is_replaced_in_the_replay_by_the_oldest_complete_group() -> None:
    run = Run()
    first = run.train()
    run.reopen(0, missing=(first[0],))
    assert run.ledger.reserve(run.token, 0, 0.0) is None
    (again,) = run.lease()
    assert (again.ticket, again.attempt) == (first[0], 2)
    run.store(again)
    assert run.train() == first


def test_a_replayed_step_keeps_its_size_over_a_second_resume() -> None:
    run = Run()
    first = run.train()
    run.reopen(0, missing=(first[0],))
    run.reopen(0)
    assert run.ledger.reserve(run.token, 0, 0.0) is None
    with pytest.raises(LedgerError, match="not reserved"):
        run.ledger.trained(run.token, 0)
    assert run.train() == first


@pytest.mark.parametrize("is_lost", [False, True])
def test_versions_beyond_a_broken_replay_count_as_older(is_lost: bool) -> None:
    run = Run()
    batches = [run.train() for _ in range(3)]
    (grant,) = run.lease()
    run.store(grant)
    run.reopen(0, missing=(batches[1][0],) if is_lost else ())
    counted = dict(run.ledger.counted_versions([run.state.tickets[1], run.state.tickets[grant.ticket]]))
    assert counted == {1: 0, 2: 1, 3: 0 if is_lost else 2, 4: -1 if is_lost else 3}


def test_a_replay_that_drops_another_group_forks_there() -> None:
    run = Run()
    run.train(), run.train()
    (grant,) = run.lease()
    run.store(grant)
    run.reopen(0)
    run.train(dropped=((1, "stale"),))
    assert run.ledger.counted_versions([run.state.tickets[grant.ticket]]) == [(3, -2)]


def test_a_rollback_with_a_change_forks_where_it_goes_back_to_and_its_note_is_told_ever_after() -> None:
    run = Run()
    run.train(), run.train()
    (grant,) = run.lease()
    run.store(grant)  # sampled with the weights of step 2
    run.ledger.resume(run.token, 0, is_fork=True, note={"lr_scale": 0.5})
    assert run.ledger.counted_versions([run.state.tickets[grant.ticket]]) == [(3, -2)]
    run.reopen(0)
    again = Ledger.replay(run.ledger.settings, [unpack(pack(one)) for one in run.ledger.drain_events()])
    assert again.state.note == {"lr_scale": 0.5}


def test_a_rollback_without_the_offenders_replays_exactly_up_to_them() -> None:
    run = Run()
    first = run.train()
    bad = run.fill(2)
    run.ledger.reserve(run.token, 1, 0.0)
    (grant,) = run.lease()
    run.store(grant)  # sampled with the weights of step 1
    run.ledger.resume(run.token, 0, refused=bad[:1])
    assert run.ledger.counted_versions([run.state.tickets[grant.ticket]]) == [(2, 1)]
    assert run.train() == first
    assert run.train() == [bad[1], grant.ticket]
    number, _ = run.version, run.reopen(0)
    assert run.state.versions.counted_step(number) == 2, "the step is whole: it can be replayed"
    census = take_census(run.state)
    assert (census.dropped, census.given_up, census.residue) == ({"guard": 1}, 1, 0)
    with pytest.raises(LedgerError, match="not of step 1 or later"):
        run.ledger.resume(run.token, 1, refused=first)


def test_a_rollback_whose_answer_was_lost_can_be_repeated() -> None:
    run = Run()
    bad = run.fill(2)
    run.ledger.reserve(run.token, 0, 0.0)
    for _ in range(2):
        run.ledger.resume(run.token, 0, refused=bad[:1])
    census = take_census(run.state)
    assert (census.dropped, census.residue) == ({"guard": 1}, 0)


@pytest.mark.parametrize("num_refused", [1, 2])
def test_a_step_whose_update_the_guard_refused_forks_when_it_is_replayed(num_refused: int) -> None:
    run = Run()
    first = run.train(dropped=((1, "guard"), (2, "guard"))[:num_refused])
    run.train()
    (grant,) = run.lease()
    run.store(grant)  # sampled with the weights of step 2
    run.reopen(0)
    assert run.ledger.counted_versions([run.state.tickets[grant.ticket]]) == [(3, -2)]
    if num_refused == 1:
        assert run.train() == first[1:]
    assert run.residue == 0


def test_a_step_that_trained_nothing_forks_when_it_is_replayed_with_other_groups() -> None:
    run = Run(max_attempts=1)
    run.train(dropped=((1, "stale"), (2, "stale")))
    run.train()
    (grant,) = run.lease()
    run.store(grant)  # sampled with the weights of step 2
    run.reopen(0)
    assert run.ledger.counted_versions([run.state.tickets[grant.ticket]]) == [(3, -2)]


def test_leases_that_the_restored_weights_could_not_get_are_revoked() -> None:
    run = Run(max_lag=0)
    run.train(), run.train()
    (grant,) = run.lease()
    run.reopen(0)
    assert run.ledger.judge_push("a", grant.ticket, grant.attempt) == "late"
    assert run.lease() == [], "its turn comes after the replay"


def test_a_checkpoint_of_a_step_that_is_not_trained_is_refused() -> None:
    run = Run()
    with pytest.raises(LedgerError, match="does not fit"):
        run.ledger.checkpointed(run.token, 1, "d", [1])
    with pytest.raises(LedgerError, match="not among the kept"):
        run.ledger.checkpointed(run.token, 0, "d", [5])


# Bounds


def test_tickets_before_the_oldest_checkpoint_are_folded_into_counters() -> None:
    run = Run()
    for step in range(50):
        run.train()
        run.checkpoint(*([step] if step else []))
    assert len(run.state.tickets) <= 4
    census = take_census(run.state)
    assert (census.trained, census.residue) == (100, 0)


def test_dropped_tickets_are_folded_even_if_no_checkpoint_ever_comes() -> None:
    run = Run()
    for _ in range(MAX_DROPPED_TICKETS + 50):
        run.ledger.drop_zero_variance(run.lease()[0].ticket)
    census = take_census(run.state)
    assert len(run.state.tickets) == MAX_DROPPED_TICKETS
    assert (census.dropped, census.residue) == ({"zero_variance": MAX_DROPPED_TICKETS + 50}, 0)


# Evaluations


def test_an_evaluation_goes_to_one_replica_whose_weights_have_seen_its_step() -> None:
    run = Run()
    number = run.ledger.request_evaluation(run.token, 1)
    orders = run.ledger.evaluations
    assert orders.give("a", run.version, None) is None
    run.train()
    assert orders.give("a", run.version, None) is not None
    assert orders.give("b", run.version, None) is None
    assert orders.give("a", run.version, number) is None, "it is at work on it"
    assert orders.give("a", run.version, None) is not None, "its process came back without it"
    run.ledger.deregister("a")
    assert orders.give("b", run.version, None) is not None
    assert orders.finish(number, run.version, {"score": Tally(1, 0.5)})
    assert not orders.finish(number, run.version, {"score": Tally(1, 0.6)})
    assert run.state.evaluations[number].metrics == {"score": 0.5}


def test_a_tightened_bound_admits_less_and_never_more_than_the_configured_one() -> None:
    run = Run()
    run.ledger.tighten(0)
    assert len(run.lease(want=100)) == 2, "one step of two groups"
    run.ledger.tighten(1)
    assert len(run.lease(want=100)) == 2, "and the next one"
    with pytest.raises(LedgerError, match="not between 0 and 1"):
        run.ledger.tighten(2)


def test_while_a_step_trains_few_groups_are_left_over_and_a_waiting_learner_opens_the_gate():
    run = Run(groups_per_step=4, max_lag=8, ready_batches=2, memory_bytes=64 * GROUP_BYTES)
    run.fill(7)
    assert len(run.ledger.reserve(run.token, 0, 0.0)) == 4
    stored, left_over = 3, run.ledger.settings.left_over_groups
    assert left_over == 5
    assert len(run.lease(want=64)) == 4 - (stored - left_over) // 4, "a step's worth, and what is lacking"
    run.ledger.trained(run.token, 0, lag_max=0)
    assert len(run.lease(want=64)) > 4, "up to the bound on open tickets"


def test_a_resume_ends_the_pace_of_the_step_that_was_in_training():
    run = Run(groups_per_step=4, max_lag=8, memory_bytes=64 * GROUP_BYTES)
    run.fill(4)
    run.ledger.reserve(run.token, 0, 0.0)
    assert run.state.paced_open_tickets
    run.reopen(0)
    assert not run.state.paced_open_tickets
