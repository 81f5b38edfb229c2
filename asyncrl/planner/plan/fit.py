"""Fit of a configuration for GPUs to a machine: whether it has room, and if not the values to change.

Owns which values are tried: fewer replicas or learner ranks, recomputation, an optimizer on the host, a
shared GPU. Of those that give it room the ones with the fewest changes are told. Activations count too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.control.machine.resources import count_gpus_wanted
from asyncrl.core.config.sections.rollout import as_replicas
from asyncrl.core.config.tree import Config
from asyncrl.planner.plan.checks import check_memory, count_all, read_size
from asyncrl.planner.plan.footprint.capacity import Capacity
from asyncrl.planner.plan.footprint.room import find_room
from asyncrl.planner.plan.machine import count_replicas_here

Changes = dict[str, object]


@dataclass(frozen=True)
class Machine:
    """GPUs that a run may use, and memory."""

    num_gpus: int
    memory: Capacity


@dataclass(frozen=True)
class Fit:
    """Verdict on one configuration.

    Attributes:
        lacks: What the machine has too little of, a line each; empty where the configuration fits as it is.
        changes: Values by key that make it fit; empty where it fits, or nothing that is tried does.
    """

    lacks: Sequence[str]
    changes: Changes

    def tell(self) -> str:
        """Return the verdict in words."""
        if not self.lacks:
            return "fits"
        if not self.changes:
            return f"does not fit: {self.lacks[0]}"
        sets = " ".join(f"--set {key}={_show(value)}" for key, value in self.changes.items())
        return f"with {sets}"


def find_fit(config: Config, machine: Machine) -> Fit:
    """Return whether a run fits, and what to change of it if not."""
    lacks = list(find_lacks(config, machine))
    if not lacks:
        return Fit((), {})
    tried = sorted(_alternatives(config), key=len)
    changes = next((one for one in tried if not any(find_lacks(change(config, one), machine))), {})
    return Fit(lacks, changes)


def find_lacks(config: Config, machine: Machine) -> Iterator[str]:
    """Yield what this machine has too little of; replicas on other nodes of a cluster are not counted."""
    here = count_replicas_here(config)
    num_gpus = count_gpus_wanted(config, here)
    if num_gpus > machine.num_gpus:
        yield f"it takes {num_gpus} GPUs of this machine, which has {machine.num_gpus}"
    yield from check_memory(config, machine.memory)
    size, gpu_bytes = read_size(config), machine.memory.gpu
    if size is None or gpu_bytes is None:
        return
    for room in find_room(config, count_all(config, 1, 1), size, gpu_bytes):
        if room.taken_bytes > room.limit_bytes:
            yield f"it takes {room.tell()[0]}, activations included"


def _alternatives(config: Config) -> Iterator[Changes]:
    """Yield sets of values that make a run smaller, each key only where it changes."""
    learner, replicas = config.learner, config.rollout.replicas.start
    cuts: list[dict[str, int]] = [{}, {"dp": 1}, {"tp": 1}, {"tp": 1, "dp": 1}]
    fleets = [Changes(), *(Changes({"rollout.replicas": count}) for count in range(replicas - 1, 0, -1))]
    savings: list[Changes] = [{}, {"learner.recompute": "full"}, {"learner.offload": True}]
    savings.append({**savings[1], **savings[2]})
    for cut, fleet, saving in itertools.product(cuts, fleets, savings):
        if any(getattr(learner, key) == value for key, value in cut.items()):
            continue
        changes = {f"learner.{key}": value for key, value in cut.items()} | fleet | saving
        yield changes
        if change(config, changes).learner.num_ranks == 1:
            yield changes | {"learner.gpus": 0.5, "rollout.gpus": 0.5}


def change(config: Config, changes: Changes) -> Config:
    """Return the configuration with other values of `learner` and `rollout`."""
    sections: dict[str, dict[str, object]] = {"learner": {}, "rollout": {}}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections[section][name] = as_replicas(value) if name == "replicas" else value
    fields = {name: getattr(config, name).model_dump() | values for name, values in sections.items()}
    made = {name: type(getattr(config, name)).model_validate(values) for name, values in fields.items()}
    return config.model_copy(update=made)


def _show(value: object) -> str:
    return str(value).lower()
