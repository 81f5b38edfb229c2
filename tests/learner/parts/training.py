"""One short training run, the same for every layout of ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl.config.tree import AlgorithmSection, LearnerSection
from learner.algorithms.objective import Objective, make_objective
from learner.backend import LearnerBackend, Placement, ValueBackend, ValueLossFn
from learner.batching.batch import PackedBatch, assign_shards, build_batch, plan_minibatches
from learner.megatron.backend import MegatronBackend
from tests.learner.parts.samples import make_groups

NUM_MINIBATCHES = 2
STEP_OF_VERSION = {1: 0, 2: 1, 3: 2}


def open_backend(folder: Path, placement: Placement | None = None, make=MegatronBackend, **changes):
    options = {
        name: changes.pop(name) for name in ("dtype", "seed", "temperature", "is_frozen") if name in changes
    }
    config = {"lr": 1e-3, "weight_decay": 0.01, "minibatches": NUM_MINIBATCHES, "warmup_steps": 2}
    section = LearnerSection(**(config | changes))
    return make(folder, section, placement or Placement(), **({"dtype": "float32"} | options))


def open_objective(**changes) -> Objective:
    return make_objective(AlgorithmSection(**({"veto": 1e-3} | changes)), max_lag=4, max_response_tokens=32)


def prepare_step(
    backend: LearnerBackend, objective: Objective, step: int, num_groups: int = 6
) -> list[PackedBatch]:
    """Return this rank's share of each minibatch of step `step`."""
    groups = make_groups(num_groups, seed=step)
    num_tokens_of = {group.ticket: group.num_tokens for group in groups}
    plan = plan_minibatches(list(num_tokens_of), NUM_MINIBATCHES)
    mine = assign_shards(num_tokens_of, plan, backend.dp_size)[backend.dp_rank]
    batch = build_batch([group for group in groups if group.ticket in mine], step, STEP_OF_VERSION)
    prox_N, entropy_N = backend.logprobs(batch)
    batch, _ = objective.prepare(batch.mask_over_age(objective.max_lag), prox_N, entropy_N)
    return [batch.select_groups(tickets) for tickets in plan]


def train(
    backend: LearnerBackend, steps: range, objective: Objective | None = None, num_groups: int = 6
) -> list[dict[str, float]]:
    """Train `steps` and return the metrics of every update."""
    objective = objective or open_objective()
    return [
        backend.update(minibatch, objective.loss)
        for step in steps
        for minibatch in prepare_step(backend, objective, step, num_groups)
    ]


def squared_error(values_N: torch.Tensor, microbatch: PackedBatch):
    """Mean squared distance of the values to a target that every token of a row shares."""
    target_N = microbatch.rewards_R[microbatch.row_N]
    loss = ((values_N - target_N) ** 2 * microbatch.loss_mask_N).sum() / microbatch.totals.num_tokens
    return loss, {"critic/vf_loss": loss}


def train_values(
    backend: ValueBackend, steps: range, num_groups: int = 6, loss_fn: ValueLossFn = squared_error
) -> list[dict[str, float]]:
    """Train a critic towards the rewards; return the metrics of every update."""
    metrics = []
    for step in steps:
        groups = make_groups(num_groups, seed=step)
        num_tokens_of = {group.ticket: group.num_tokens for group in groups}
        plan = plan_minibatches(list(num_tokens_of), NUM_MINIBATCHES)
        mine = assign_shards(num_tokens_of, plan, backend.dp_size)[backend.dp_rank]
        batch = build_batch([group for group in groups if group.ticket in mine], step, STEP_OF_VERSION)
        metrics += [backend.update(batch.select_groups(tickets), loss_fn) for tickets in plan]
    return metrics
