"""Programs of several learner ranks of which one alone sees a spike, a NaN, or the end of its memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from learner.backend import Models, Placement
from learner.guard.guard import UnstableTraining
from learner.guard.memory import GuardedModel, GuardedModels
from learner.megatron.backend import MegatronValueBackend
from tests.learner.parts.contract import weights_of
from tests.learner.parts.training import open_backend, open_objective, prepare_step, squared_error

LIMITS = [("actor/grad_norm", 1e3), ("critic/grad_norm", 1e3)]


def on_rank_1(placement: Placement, factor: float, loss_fn: Callable) -> Callable:
    """Multiply the loss of rank 1 alone."""

    def loss(*args):
        value, metrics = loss_fn(*args)
        return value * (factor if placement.rank == 1 else 1.0), metrics

    return loss


def refuse_long(placement: Placement, limit: int, loss_fn: Callable) -> Callable:
    """Run out of memory on rank 1 alone, at more than `limit` tokens."""

    def loss(*args):
        if placement.rank == 1 and args[-1].num_tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss_fn(*args)

    return loss


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def run_guard(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Inject each fault into the policy, then into the critic; say what this rank decided."""
    policy = open_backend(Path(job["model"]), placement, **job["changes"])
    critic = open_backend(Path(job["model"]), placement, MegatronValueBackend, **job["changes"])
    guarded, objective = GuardedModels(Models(policy, critic)), open_objective()
    minibatches = prepare_step(policy, objective, 0)
    parts = {
        "actor": (guarded.models.policy, objective.loss),
        "critic": (guarded.models.critic, squared_error),
    }
    result = {
        part: inject(placement, guarded, model, loss_fn, minibatches, part)
        for part, (model, loss_fn) in parts.items()
    }
    critic.close()
    policy.close()
    return result


def inject(
    placement: Placement, guarded: GuardedModels, model: Any, loss_fn: Callable, minibatches: list, part: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    start = weights_of(model)
    for name, factor in (("spike", 1e8), ("nan", math.nan)):
        guarded.begin_step(LIMITS)
        metrics = model.update(minibatches[0], on_rank_1(placement, factor, loss_fn))
        found[name] = {
            "skipped": metrics[f"{part}/skipped_updates"],
            "num_refused": guarded.num_refused,
            "moved": distance(weights_of(model), start),
        }
    limit = max(minibatch.num_tokens for minibatch in minibatches) // 2 + 20
    guarded.begin_step([])
    for minibatch in minibatches:
        model.update(minibatch, refuse_long(placement, limit, loss_fn))
    return found | {
        "num_out_of_memory": model.num_out_of_memory,
        "budget": model.max_tokens_per_microbatch,
        "sums": [float(tensor.double().abs().sum()) for tensor in weights_of(model).values()],
    }


def run_plain_step(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train the same step without any fault: two updates, counted after two that were refused."""
    policy = open_backend(Path(job["model"]), placement, **job["changes"])
    critic = open_backend(Path(job["model"]), placement, MegatronValueBackend, **job["changes"])
    objective = open_objective()
    minibatches = prepare_step(policy, objective, 0)
    result = {}
    for part, model, loss_fn in (("actor", policy, objective.loss), ("critic", critic, squared_error)):
        model._num_updates = 2  # the schedule counts refused updates too
        for minibatch in minibatches:
            model.update(minibatch, loss_fn)
        result[part] = [float(tensor.double().abs().sum()) for tensor in weights_of(model).values()]
    critic.close()
    policy.close()
    return result


def run_stuck(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Run out of memory on rank 1 inside a pass that the other takes part in. Ends the process's groups."""
    policy = open_backend(Path(job["model"]), placement, **job["changes"])
    guarded, objective = GuardedModel(policy), open_objective()
    minibatch = prepare_step(policy, objective, 0)[0]
    try:
        guarded.update(minibatch, refuse_long(placement, 0, objective.loss))
    except (UnstableTraining, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}
