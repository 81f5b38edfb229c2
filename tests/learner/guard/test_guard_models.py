"""The guard over all models of a learner: the critic's updates, the KL term, and checkpoints on the way."""

from __future__ import annotations

import contextlib
import math
import time

import torch

from asyncrl.buffer.ledger.events import Checkpointed, Resumed
from asyncrl.core.config.tree import AdaptiveKlSection, KlSection
from learner.algorithms.kl import AdaptiveKl
from learner.backend import Models
from learner.guard.memory import GuardedModel, GuardedModels
from learner.megatron.backend import MegatronValueBackend
from tests.learner.guard.guarded_run import NUM_STEPS, Faults, running
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import open_backend, squared_error, train_values

GAE = {"advantage": "gae"}
KL = {
    "kl": KlSection(
        coef=0.05, where="reward", estimator="k1", adaptive=AdaptiveKlSection(target=0.01, horizon=100)
    )
}


# The critic


def test_a_spike_of_the_critic_alone_is_kept_from_its_weights_and_its_groups_still_train(
    model, cluster, tmp_path
):
    faults = Faults(critic=lambda call: call == 6)
    with running(model, cluster, tmp_path, faults, GAE, guard={"action": "skip_update"}) as run:
        run.go()
        status, rows = run.status(), run.rows()
    assert [row["critic/skipped_updates"] for row in rows] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert {row["actor/skipped_updates"] for row in rows} == {0}
    assert rows[-1]["guard/skipped_updates"] == 1.0
    assert status.dropped == {} and status.steps_trained == NUM_STEPS, "the policy learned from them"
    assert rows[-1]["critic/grad_norm"] < 1e3, "what was refused moved nothing"


def test_a_critic_out_of_memory_makes_its_microbatches_smaller_and_trains_the_same(model, caplog):
    with contextlib.closing(open_backend(model, None, MegatronValueBackend)) as critic:
        train_values(critic, range(1))
        expected = {name: tensor.clone() for name, tensor in critic.named_tensors()}

    def refuse_long(values_N, microbatch):
        if microbatch.num_tokens > 150:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return squared_error(values_N, microbatch)

    with contextlib.closing(open_backend(model, None, MegatronValueBackend)) as critic:
        guarded = GuardedModel(critic, "critic")
        train_values(guarded, range(1), loss_fn=refuse_long)
        found = {name: tensor.clone() for name, tensor in critic.named_tensors()}
    assert guarded.num_out_of_memory >= 1
    assert "out of memory (critic): the token budget of a microbatch went from 16384 to" in caplog.text
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-5


def test_a_group_is_refused_only_if_neither_model_learned_from_it(model):
    with (
        contextlib.closing(open_backend(model)) as policy,
        contextlib.closing(open_backend(model, None, MegatronValueBackend)) as critic,
    ):
        guarded = GuardedModels(Models(policy, critic))
        guarded.begin_step([("critic/grad_norm", 1e-9)])
        tickets = {group.ticket for group in make_groups(6)}
        train_values(guarded.models.critic, range(1))
        assert guarded.num_refused == 2 and guarded.refused_tickets == []
        guarded._policy._refused |= tickets
        assert guarded.refused_tickets == sorted(tickets)


# KL


def test_kl_fallback_fixes_the_coefficient_at_0_says_so_and_stays_over_a_resume(
    model, cluster, tmp_path, caplog
):
    said = "the KL controller is fixed and its coefficient 0 from here on"
    guard = {"guard": {"action": "kl_fallback"}}
    with running(
        model, cluster, tmp_path, Faults(policy=lambda call: call == 3), KL, learner={"steps": 5}, **guard
    ) as run:
        run.go()
        first = [row["actor/kl_coef"] for row in run.rows()]
    assert first[0] == 0.05 and first[1] != 0.05, "the controller moves"
    assert first[2] > 0 and first[3:] == [0.0, 0.0]
    assert said in caplog.text
    caplog.clear()
    with running(model, cluster, tmp_path, Faults(), KL, **guard) as run:
        run.go()
        rows = run.rows()
    assert [row["training/global_step"] for row in rows] == [6, 7, 8]
    assert {row["actor/kl_coef"] for row in rows} == {0.0}
    assert {row["actor/reward_kl_penalty_coeff"] for row in rows} == {0.0}
    assert {row["guard/is_kl_off"] for row in rows} == {1.0}
    assert said in caplog.text


def test_a_divergence_that_is_not_a_number_leaves_the_coefficient_as_it_is():
    controller = AdaptiveKl(0.05, target=0.01, horizon=100)
    controller.update(math.nan, 16)
    assert controller.value == 0.05
    controller.turn_off()
    controller.update(math.inf, 16)
    assert controller.value == 0.0


# Checkpoints


def committed(events: list) -> list[tuple[str, int]]:
    kinds = (Checkpointed, Resumed)
    return [(type(event).__name__, event.step) for event in events if isinstance(event, kinds)]


def test_a_checkpoint_that_is_being_written_at_a_rollback_is_one_to_go_back_to_and_never_committed_after(
    model, cluster, tmp_path
):
    def write_slowly(number: int) -> None:
        if number == 3:  # of step 4; 1 is that of the start
            time.sleep(1.0)

    faults = Faults(policy=lambda call: call == 5, before_write=write_slowly)
    with running(model, cluster, tmp_path, faults, {}, guard={"action": "rollback"}) as run:
        run.go()
        status = run.status()
    found = committed(run.events())
    assert found[:4] == [("Checkpointed", 0), ("Checkpointed", 2), ("Checkpointed", 4), ("Resumed", 4)]
    assert found[4:] == [("Checkpointed", 6), ("Checkpointed", 8)]
    assert status.residue == 0 and status.steps_trained == NUM_STEPS


def test_a_checkpoint_that_is_due_at_the_end_is_not_skipped_for_one_that_is_still_being_written(
    model, cluster, tmp_path
):
    def write_until_the_end(number: int) -> None:
        end = time.monotonic() + 60.0
        while number == 1 and run.learner.status().step < NUM_STEPS and time.monotonic() < end:
            time.sleep(0.01)

    sections = {"checkpoint": {"every_steps": 2, "max_stall_s": 0.0}}
    with running(model, cluster, tmp_path, Faults(before_write=write_until_the_end), {}, **sections) as run:
        run.go()
    assert committed(run.events()) == [("Checkpointed", 2), ("Checkpointed", NUM_STEPS)]
    assert run.checkpoints.steps() == [2, NUM_STEPS]
