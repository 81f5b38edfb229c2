"""The guard in a learner: real buffer, publisher and Megatron backend, faults injected into the loss."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.buffer.ledger.events import EvaluationRequested, Resumed, Trained
from learner.algorithms.objective import Objective
from learner.guard.guard import UnstableTraining
from learner.guard.memory import GuardedModel, is_out_of_memory
from tests.learner.guard.guarded_run import (
    LR,
    NUM_STEPS,
    Faults,
    check_no_group_was_trained_at_two_steps_of_one_lineage,
    running,
)
from tests.learner.parts.contract import weights_of
from tests.learner.parts.training import open_backend, open_objective, prepare_step, train
from tests.weight_sync.cluster import Cluster

# Memory


def refuse_over(limit: int, objective: Objective) -> Callable:
    """A loss that runs out of memory on microbatches of more than `limit` tokens."""

    def loss(logprobs_N, entropy_N, microbatch):
        if microbatch.num_tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return objective.loss(logprobs_N, entropy_N, microbatch)

    return loss


def test_out_of_memory_halves_the_microbatches_says_so_and_trains_the_same(model, caplog):
    objective = open_objective()
    with contextlib.closing(open_backend(model)) as backend:
        train(backend, range(1))
        expected = weights_of(backend)
    with contextlib.closing(open_backend(model)) as backend:
        guarded = GuardedModel(backend)
        minibatches = prepare_step(backend, objective, 0)
        limit = max(part.num_tokens for part in minibatches) // 2 + 20
        for minibatch in minibatches:
            guarded.update(minibatch, refuse_over(limit, objective))
        found = weights_of(backend)
        assert backend.num_updates == len(minibatches)
        assert backend.max_tokens_per_microbatch <= limit
    assert guarded.num_out_of_memory >= 1
    assert "the token budget of a microbatch went from 16384 to" in caplog.text
    assert "what to change: set learner.max_tokens_per_microbatch" in caplog.text
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-5


def test_before_a_pass_is_tried_again_on_a_gpu_its_tensors_are_gone_and_the_allocator_s_blocks_too(
    model, monkeypatch
):
    held, alive_at_release = [], []

    def loss(logprobs_N, entropy_N, microbatch):
        if not held:
            activations = torch.zeros(8)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return objective.loss(logprobs_N, entropy_N, microbatch)

    objective = open_objective()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive_at_release.append(held[0]() is not None))
    with contextlib.closing(open_backend(model)) as backend:
        GuardedModel(backend).update(prepare_step(backend, objective, 0)[0], loss)
    assert alive_at_release == [False]


def test_after_an_update_a_forward_pass_is_again_one_that_no_other_rank_waits_in(model):
    with contextlib.closing(open_backend(model)) as backend:
        train(backend, range(1))
        assert backend._schedule.is_reducing
        prepare_step(backend, open_objective(), 1)
        assert not backend._schedule.is_reducing


def test_rows_that_do_not_fit_alone_end_the_run_with_what_to_do(model):
    objective = open_objective()
    with contextlib.closing(open_backend(model)) as backend:
        guarded = GuardedModel(backend)
        minibatch = prepare_step(backend, objective, 0)[0]
        with pytest.raises(UnstableTraining, match=r"as long as the longest row.*Lower rollout.max_tokens"):
            guarded.update(minibatch, refuse_over(0, objective))


def test_only_errors_of_memory_are_taken_for_such():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"))
    assert not is_out_of_memory(RuntimeError("size mismatch"))


def test_an_update_beyond_the_limits_leaves_weights_and_moments_as_they_were(model):
    objective = open_objective()
    with contextlib.closing(open_backend(model)) as backend:
        guarded = GuardedModel(backend)
        first, second = prepare_step(backend, objective, 0)
        guarded.update(first, objective.loss)
        before = weights_of(backend)
        guarded.gate.limits = [("actor/grad_norm", 1e-9)]
        metrics = guarded.update(second, objective.loss)
        assert metrics["actor/skipped_updates"] == 1.0 and guarded.gate.num_refused == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in backend.named_tensors())
        guarded.gate.limits = [("actor/ppo_kl", 1e9), ("actor/grad_norm", 1e9)]
        assert guarded.update(second, objective.loss)["actor/skipped_updates"] == 0.0


# A learner


@pytest.fixture
def make_run(model: Path, cluster: Cluster, tmp_path: Path):
    def make(poisoned: Callable[[int], bool], busy: tuple[int, ...] = (), factor: float = 1e6, **sections):
        faults = Faults(policy=poisoned, factor=factor, busy=busy)
        return running(model, cluster, tmp_path, faults, {}, **sections)

    return make


def test_a_spike_is_rolled_back_with_half_the_learning_rate_and_the_account_stays_exact(make_run, caplog):
    caplog.set_level(logging.INFO, "weight_sync.memory.sharded_publish")
    with make_run(lambda call: call == 6, guard={"action": "rollback"}) as run:
        run.go()
        status, rows = run.status(), run.rows()
    assert run.resumed_steps() == [4]
    assert status.residue == 0 and status.steps_trained == NUM_STEPS
    check_no_group_was_trained_at_two_steps_of_one_lineage(run.events())
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert rows[-1]["guard/rollbacks"] == 1.0 and rows[-1]["guard/grad_norm_spike"] == 1.0
    assert [round(row["actor/lr"] / LR, 3) for row in rows[4:7]] == [1, 1, 0.5]
    assert max(row["staleness/lag_max_trained"] for row in rows) <= 1
    assert {event.lag_max for event in run.events() if isinstance(event, Trained)} <= {0, 1}, "said, in bound"
    assert "back to the checkpoint of step 4, rollback 1" in caplog.text
    assert "why the reward may still look fine" in caplog.text
    assert "each of 1 learner ranks writes its own part of a version" in caplog.text


def test_what_abandoned_weights_sampled_is_older_than_their_step_says(make_run):
    poisoned = {"guard": {"action": "rollback"}, "checkpoint": {"every_steps": 4}}
    with make_run(lambda call: call == 8, **poisoned) as run:
        run.go()
        status, rows = run.status(), run.rows()
    assert run.resumed_steps() == [4]
    # The batch of step 6 was sampled at step 5 or 6, at least one step beyond the fork: lag 3 or more.
    assert rows[10]["training/global_step"] == 7 and rows[10]["staleness/trained_tokens"] == 0
    assert rows[10]["staleness/masked_share"] == 1, "groups without a trainable token count too"
    assert status.dropped["stale"] >= 2 and status.residue == 0
    assert max(row["staleness/lag_max_trained"] for row in rows) <= 1


def test_a_fault_that_stays_is_rolled_back_twice_further_each_time_and_then_ends_the_run(make_run):
    with make_run(lambda call: call >= 6, guard={"action": "rollback"}) as run:
        with pytest.raises(UnstableTraining, match="went back 2 times already"):
            run.go()
        status = run.status()
    assert run.resumed_steps() == [4, 2]
    assert status.residue == 0 and status.steps_trained == 2
    check_no_group_was_trained_at_two_steps_of_one_lineage(run.events())


def test_groups_whose_gradient_alone_is_not_finite_are_dropped_and_the_learning_rate_stays(make_run, caplog):
    # Two updates a step: the second one of step 5 has no finite gradient.
    shape = {"learner": {"minibatches": 2}, "guard": {"action": "rollback"}}
    with make_run(lambda call: call == 12, factor=math.inf, **shape) as run:
        run.go()
        status, rows = run.status(), run.rows()
    forks = [(event.step, event.is_fork) for event in run.events() if isinstance(event, Resumed)]
    assert forks == [(4, False)], "the replay is exact"
    assert status.dropped == {"guard": 1} and status.residue == 0
    assert status.steps_trained == NUM_STEPS
    assert rows[-1]["guard/rollbacks"] == 1.0
    assert {round(row["actor/lr"] / LR, 3) for row in rows} == {1.0}
    assert "without the 1 groups of the updates concerned" in caplog.text


class KilledError(Exception):
    """Ends a learner where a kill would."""


def test_a_learner_killed_after_a_rollback_goes_on_with_what_the_rollback_changed(make_run):
    guard = {"guard": {"action": "rollback"}, "checkpoint": {"every_steps": 4}}

    def spike_then_die(call: int) -> bool:
        if call == 8:  # step 5 again, before any checkpoint after the rollback
            raise KilledError
        return call == 6

    with make_run(spike_then_die, **guard) as run, pytest.raises(KilledError):
        run.go()
    with make_run(lambda call: False, **guard) as run:
        run.go()
        status, rows = run.status(), run.rows()
    forks = [(event.step, event.is_fork) for event in run.events() if isinstance(event, Resumed)]
    assert forks == [(4, True), (4, False)]
    assert status.residue == 0 and status.steps_trained == NUM_STEPS
    assert [row["training/global_step"] for row in rows] == [5, 6, 7, 8]
    assert {round(row["actor/lr"] / LR, 3) for row in rows} == {0.5}
    assert rows[-1]["guard/rollbacks"] == 1.0


def test_a_fault_before_the_first_checkpoint_goes_back_to_the_start(make_run):
    with make_run(lambda call: call == 1, guard={"action": "rollback"}) as run:
        run.go()
        status = run.status()
    assert run.resumed_steps() == [0]
    assert status.residue == 0 and status.steps_trained == NUM_STEPS


def test_skip_update_keeps_the_spike_from_the_weights(make_run):
    with make_run(lambda call: call == 6, guard={"action": "skip_update"}) as run:
        run.go()
        status, rows = run.status(), run.rows()
    assert [row["actor/skipped_updates"] for row in rows] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert rows[-1]["guard/skipped_updates"] == 1.0
    assert status.dropped == {"guard": 2} and status.residue == 0, "it trained nothing"


def test_reduce_lr_halves_the_learning_rate_from_the_next_step_on(make_run):
    with make_run(lambda call: call == 4, guard={"action": "reduce_lr"}) as run:
        run.go()
        rows = run.rows()
    assert [round(row["actor/lr"] / LR, 3) for row in rows[2:]] == [1, 1, 0.5, 0.5, 0.5, 0.5]


def test_stop_ends_the_run_with_what_was_found(make_run):
    with make_run(lambda call: call == 3, guard={"action": "stop"}) as run:
        with pytest.raises(UnstableTraining, match="at step 2: grad_norm_spike: actor/grad_norm is"):
            run.go()


def test_an_evaluation_that_falls_due_while_no_buffer_is_free_is_ordered_with_the_next_weights(make_run):
    with make_run(lambda call: False, busy=(3,), eval={"every_steps": 3}) as run:
        run.go()
    assert [event.step for event in run.events() if isinstance(event, EvaluationRequested)] == [0, 4, 6, 8]
