"""One short training run, the same for every layout of ranks; and one real step on groups in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.core.config.tree import AlgorithmSection, LearnerSection, LoraSection
from asyncrl.core.experience import Group
from learner.algorithms.objective import Objective, make_objective
from learner.backend import LearnerBackend, Models, Placement, ValueBackend, ValueLossFn
from learner.batching.batch import PackedBatch, assign_shards, build_batch, plan_minibatches
from learner.fsdp2.backend import Fsdp2Backend
from learner.megatron.backend import MegatronBackend
from learner.orders import Train
from learner.report import Stopwatch, reduce_over_ranks
from learner.step import train_step
from learner.stream import StreamedStep
from tests.learner.parts.samples import make_groups

NUM_MINIBATCHES = 2
STEP_OF_VERSION = {1: 0, 2: 1, 3: 2}


def open_backend(folder: Path, placement: Placement | None = None, make=MegatronBackend, **changes):
    options = {
        name: changes.pop(name) for name in ("dtype", "seed", "temperature", "is_frozen") if name in changes
    }
    if "lora" in changes:
        options["lora"] = LoraSection(**changes.pop("lora"))
    config = {"lr": 1e-3, "weight_decay": 0.01, "minibatches": NUM_MINIBATCHES, "warmup_steps": 2}
    section = LearnerSection(**(config | changes))
    return make(folder, section, placement or Placement(), **({"dtype": "float32"} | options))


def open_fsdp2(folder: Path, placement: Placement | None = None, make=Fsdp2Backend, **changes):
    """As `open_backend`, on the other backend."""
    return open_backend(folder, placement, make=make, backend="fsdp2", **changes)


def open_objective(max_lag: int = 4, **changes) -> Objective:
    section = AlgorithmSection(**({"veto": 1e-3} | changes))
    return make_objective(section, max_lag=max_lag, max_response_tokens=32)


class StoredGroups:
    """An fetcher whose groups are in memory."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        return [group for group in self._groups if group.ticket in tickets]


def take_step(
    models: Models, objective: Objective, groups: Sequence[Group], watch: Stopwatch | None = None
) -> dict[str, float]:
    """Train learner step 2 on `groups` of versions 1 to 3, as the service does; return its metrics."""
    order = Train(
        step=2,
        token=1,
        tickets=[group.ticket for group in groups],
        num_tokens=[group.num_tokens for group in groups],
        versions=list(STEP_OF_VERSION.items()),
    )
    fetcher, watch = StoredGroups(groups), watch or Stopwatch()
    result = train_step(order, fetcher, models, objective, NUM_MINIBATCHES, watch, max_prompt_tokens=6)
    return reduce_over_ranks(models.policy, result.metrics, result.weight)


def take_streamed_step(models: Models, objective: Objective, groups: Sequence[Group]) -> dict[str, float]:
    """As `take_step`, in two parts and with one update."""
    streamed = StreamedStep(StoredGroups(groups), models, objective, Stopwatch(), max_prompt_tokens=6)
    half = len(groups) // 2
    for part in (groups[half:], groups[:half]):
        tickets, lengths = [one.ticket for one in part], [one.num_tokens for one in part]
        versions = list(STEP_OF_VERSION.items())
        streamed.add(Train(2, 1, tickets, lengths, versions, is_last=part[0] is groups[0]))
    _, result = streamed.finish()
    return reduce_over_ranks(models.policy, result.metrics, result.weight)


def record_experts(batch: PackedBatch, num_layers: int, num_active: int, num_experts: int) -> PackedBatch:
    """Return the batch with experts recorded that no router would choose, on nine of ten tokens.

    Those of a row depend on its ticket and its place in the group, not on what is packed beside it.
    """
    rows, places = [], {}
    for group, length in zip(batch.group_R.tolist(), batch.row_lengths, strict=True):
        ticket = batch.tickets_G[group]
        places[ticket] = places.get(ticket, 0) + 1
        generator = torch.Generator().manual_seed(1000 * ticket + places[ticket])
        scores = torch.rand(length, num_layers, num_experts, generator=generator)
        chosen = scores.topk(num_active, -1).indices.to(torch.int16)
        chosen[torch.rand(length, generator=generator) < 0.1] = -1
        chosen[-1] = -1
        rows.append(chosen)
    nothing = torch.zeros(0, num_layers, num_active, dtype=torch.int16)
    return dataclasses.replace(batch, experts_N=torch.cat([nothing, *rows]))


def prepare_step(
    backend: LearnerBackend,
    objective: Objective,
    step: int,
    num_groups: int = 6,
    record: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
    **options: Any,
) -> list[PackedBatch]:
    """Return this rank's share of each minibatch of step `step`; `options` are those of `make_groups`."""
    groups = make_groups(num_groups, seed=step, **options)
    num_tokens_of = {group.ticket: group.num_tokens for group in groups}
    plan = plan_minibatches(list(num_tokens_of), NUM_MINIBATCHES)
    mine = assign_shards(num_tokens_of, plan, backend.dp_size)[backend.dp_rank]
    batch = record(build_batch([group for group in groups if group.ticket in mine], step, STEP_OF_VERSION))
    prox_N, entropy_N = backend.logprobs(batch)
    batch, _ = objective.prepare(batch.mask_over_age(objective.max_lag), prox_N, entropy_N)
    return [batch.select_groups(tickets) for tickets in plan]


def train(
    backend: LearnerBackend,
    steps: range,
    objective: Objective | None = None,
    num_groups: int = 6,
    **options: Any,
) -> list[dict[str, float]]:
    """Train `steps` and return the metrics of every update; `options` are those of `make_groups`."""
    objective = objective or open_objective()
    return [
        backend.update(minibatch, objective.loss)
        for step in steps
        for minibatch in prepare_step(backend, objective, step, num_groups, **options)
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
