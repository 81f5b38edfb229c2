"""Cost of one version of weights: seconds and bytes of each stage on its way (pure).

Owns the arithmetic, for measured rates and for assumed ones. Invariant: a stage that the run does not have is
left out, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.core.config.tree import Config
from weight_sync.protocol.swap_scheduler import max_loads

GB = 10**9
EXPORT, GROUP, STORE, MAP = "export", "over gloo", "through the folder", "mapped"
LOAD, ALL = "load", "all replicas"


@dataclass(frozen=True)
class WeightRates:
    """Seconds, and bytes per second, of the stages. The defaults are assumed, not measured.

    Attributes:
        export_s, export_bytes_per_s: Of a learner rank that copies its parts to shared memory, with digests.
        group_s, send_bytes_per_s: Of a broadcast, for each copy that leaves the publisher one after another.
        receive_bytes_per_s: What a broadcast takes once, however many receive it.
        store_bytes_per_s: Into the folder, and out of it.
        check_bytes_per_s: Of the digests of a copy that is mapped.
        load_s, load_bytes_per_s: Of a replica that stands still, for the share of each of its GPUs.
    """

    export_s: float = 0.0
    export_bytes_per_s: float = 8 * GB
    group_s: float = 0.0
    send_bytes_per_s: float = 2.5 * GB
    receive_bytes_per_s: float = math.inf
    store_bytes_per_s: float = 1 * GB
    check_bytes_per_s: float = 8 * GB
    load_s: float = 0.2
    load_bytes_per_s: float = 8 * GB


ASSUMED_WEIGHTS = WeightRates()


@dataclass(frozen=True)
class Stage:
    """One stage: how long it takes, how much it moves, and the rule of both."""

    name: str
    seconds: float
    num_bytes: int
    rule: str


@dataclass(frozen=True)
class VersionCost:
    """Cost of a version of `num_bytes` for a fleet.

    Attributes:
        writers: Learner ranks that write parts of their own.
        in_group: Replicas that receive over gloo, each on a node of its own. by_folder: Those that read the
            folder. mapped: Those beside the publisher, which map its copy.
        engine_gpus: Of one replica.
        parallelism: Replicas that load at once.
        cores: Of a host that has all parts; None where each has cores enough.
    """

    num_bytes: int
    writers: int
    in_group: int
    by_folder: int
    engine_gpus: int
    parallelism: int
    cores: int | None = None
    mapped: int = 0

    @staticmethod
    def of(config: Config, num_bytes: int, cores: int | None = None) -> VersionCost:
        """Return the cost of a version of the run, with the replicas of its start."""
        section, replicas = config.weight_sync, config.rollout.replicas.start + config.rollout.standby
        has_others = section.folder is not None and config.launcher.is_cluster
        by_folder = replicas if section.all_by_folder or has_others else 0
        others = replicas - by_folder
        at_once = max_loads(section.parallelism, section.max_unavailable, replicas)
        return VersionCost(
            num_bytes=num_bytes,
            writers=config.learner.num_ranks,
            in_group=others if config.launcher.is_cluster else 0,
            by_folder=by_folder,
            engine_gpus=max(1, math.ceil(config.rollout.gpus)),
            parallelism=max(1, min(replicas, at_once)),
            cores=cores,
            mapped=0 if config.launcher.is_cluster else others,
        )

    @property
    def num_copies(self) -> float:
        """Copies of a broadcast that are sent one after another: levels of gloo's tree.

        A copy on one host keeps two cores busy, one that sends and one that receives.
        """
        levels = math.ceil(math.log2(self.in_group + 1))
        return levels if self.cores is None else max(levels, 2 * self.in_group / self.cores)

    def export_s(self, rates: WeightRates) -> float:
        """Return for how long the learner stands still."""
        return rates.export_s + self.num_bytes / self.writers / rates.export_bytes_per_s

    def group_s(self, rates: WeightRates) -> float:
        """Return the seconds of a broadcast, from its order until the last receiver has verified."""
        sent_s = self.num_bytes * self.num_copies / rates.send_bytes_per_s
        return rates.group_s + self.num_bytes / rates.receive_bytes_per_s + sent_s if self.in_group else 0.0

    def folder_s(self, rates: WeightRates) -> float:
        """Return the seconds in which a version is stored, and then read."""
        return 2 * self.num_bytes / rates.store_bytes_per_s if self.by_folder else 0.0

    def map_s(self, rates: WeightRates) -> float:
        """Return the seconds in which those beside the publisher check its copy, all at once."""
        return self.num_bytes / rates.check_bytes_per_s if self.mapped else 0.0

    def transfer_s(self, rates: WeightRates) -> float:
        """Return the seconds until the last replica has the bytes, whichever way they take."""
        return max(self.group_s(rates), self.folder_s(rates), self.map_s(rates))

    def load_s(self, rates: WeightRates) -> float:
        """Return for how long a replica stands still."""
        return rates.load_s + self.num_bytes / self.engine_gpus / rates.load_bytes_per_s

    def stages(self, rates: WeightRates) -> Iterator[Stage]:
        """Yield the stages in their order."""
        size = f"{self.num_bytes / GB:.3g} GB"
        rate = rates.export_bytes_per_s / GB
        rule = f"the learner stands still: {size} / ({self.writers} ranks x {rate:.3g} GB/s)"
        yield Stage(EXPORT, self.export_s(rates), self.num_bytes, rule)
        if self.in_group:
            rate = rates.send_bytes_per_s / GB
            rule = f"{size} x {self.num_copies:.3g} copies in a row / {rate:.3g} GB/s; a node's share one"
            sent = self.num_bytes * self.in_group
            yield Stage(GROUP, self.group_s(rates), sent, rule)
        if self.by_folder:
            rule = f"{size}, stored once and read by each / {rates.store_bytes_per_s / GB:.3g} GB/s"
            moved = self.num_bytes * (1 + self.by_folder)
            yield Stage(STORE, self.folder_s(rates), moved, rule)
        if self.mapped:
            rate = rates.check_bytes_per_s / GB
            rule = f"no byte moves on this machine: digests of {size} / {rate:.3g} GB/s"
            yield Stage(MAP, self.map_s(rates), 0, rule)
        loads = self.in_group + self.by_folder + self.mapped
        if not loads:
            return
        each, load_s = self.num_bytes // self.engine_gpus, self.load_s(rates)
        rule = f"a replica stands still: {each / GB:.3g} GB a GPU / {rates.load_bytes_per_s / GB:.3g} GB/s"
        yield Stage(LOAD, load_s, self.num_bytes, rule)
        turns = math.ceil(loads / self.parallelism)
        rule = f"{turns} turns of weight_sync.parallelism {self.parallelism}; the others generate"
        yield Stage(ALL, turns * load_s, self.num_bytes * loads, rule)
