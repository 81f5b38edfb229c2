"""Demand for `/dev/shm` of the staged versions on one host.

Owns the rule: weight sync keeps 3 versions at the publisher (the current one, one in transfer, one being
written), which the receivers of its host map. A replica that loads keeps 2 from being written to (one that
its engine loads, one that waits), whose segments the publisher replaces if it needs them. On another host the
same holds for the receiver that gets the versions for all. On each node of the learner a publisher keeps an
equal share of each version. With `encoding: delta` there is one more at the publisher, and at a receiver that
versions are sent to, as the base of differences. Never reserves anything: the services do, as versions come.
Invariant: the count is the most that is in use at once, with the receivers that are on this host.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from asyncrl.core.config.tree import Config
from asyncrl.models import named_models
from asyncrl.models.weight_files import read_shapes
from weight_sync.encoding.low_rank import factor_shapes
from weight_sync.protocol.swap_scheduler import max_loads

SHM_DIR = Path("/dev/shm")
NUM_AT_PUBLISHER, NUM_AT_RECEIVER = 3, 2
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GB = 10**9


@dataclass(frozen=True)
class SharedMemory:
    """Demand of weight sync.

    Attributes:
        num_weights: Of the model.
        version_bytes: Of one version.
        num_versions: Most versions kept at once; one in `num_shares` of the bytes of each.
        rule: Rule of the count.
    """

    num_weights: int
    version_bytes: int
    num_versions: int
    rule: str
    num_shares: int = 1

    @property
    def num_bytes(self) -> int:
        return -(-self.version_bytes * self.num_versions // self.num_shares)

    def describe(self, free_bytes: int) -> str:
        """Return a sentence for the user, a warning if `free_bytes` are not enough."""
        need = f"weight sync takes up to {self.num_bytes / GB:.3g} GB of {SHM_DIR}: {self.rule}"
        if free_bytes >= self.num_bytes:
            return need
        return (
            f"warning: {need}; only {free_bytes / GB:.3g} GB are free: enlarge it "
            f"(mount -o remount,size=..., or --shm-size of a container), or lower weight_sync.parallelism"
        )


def count(config: Config, receivers: int, publishers: int = 1) -> SharedMemory | None:
    """Return what a run needs of one host, None if its model's size cannot be told.

    Args:
        receivers: That are on the publisher's host; none where there are several `publishers`.
    """
    section = config.weight_sync
    at_publisher = NUM_AT_PUBLISHER + section.uses_delta
    loads = min(receivers, max_loads(section.parallelism, section.max_unavailable, receivers))
    rule = f"{at_publisher} at the publisher"
    rule += f", 1/{publishers} of each" if publishers > 1 else ""
    if loads:
        rule = f"({rule} + {NUM_AT_RECEIVER} for each of {loads} replicas that load at once)"
    return _count_versions(config, at_publisher + NUM_AT_RECEIVER * loads, rule, publishers)


def count_at_receiver(config: Config) -> SharedMemory | None:
    """Return what one receiver takes of its node, where that is not the publisher's; None as of `count`.

    Those of a node share the copy of one of them.
    """
    section = config.weight_sync
    num_versions, loads = NUM_AT_RECEIVER + section.uses_delta, section.parallelism
    shared = (
        f"several on a node share {num_versions}, and {NUM_AT_RECEIVER} for each of {loads} that load at once"
    )
    return _count_versions(config, num_versions, f"{num_versions} at its receiver ({shared})")


def _count_versions(config: Config, num_versions: int, rule: str, num_shares: int = 1) -> SharedMemory | None:
    """Return what `num_versions` take, which were counted by `rule`."""
    num_weights = count_weights(config.model.path)
    if num_weights is None:
        return None
    version_bytes = (count_adapters(config) or num_weights) * ITEM_BYTES[config.model.dtype]
    return SharedMemory(
        num_weights, version_bytes, num_versions, f"{rule} x {version_bytes / GB:.3g} GB", num_shares
    )


def free_bytes() -> int:
    """Return what this host's shared memory has left."""
    stats = os.statvfs(SHM_DIR)
    return stats.f_bavail * stats.f_frsize


def count_adapters(config: Config) -> int | None:
    """Return the number of weights of the adapters, None without any or if it is not known."""
    if not config.model.lora.rank:
        return None
    shapes = shapes_of(config.model.path)
    return (
        sum(math.prod(shape) for shape in factor_shapes(shapes, config.model.lora).values())
        if shapes
        else None
    )


def shapes_of(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a folder's tensors, or of a named model's matrices; none if they are not known."""
    if Path(path).exists():
        return read_shapes(Path(path))
    return dict(named_models.tensor_shapes(named_models.find_table(path) or {}, has_head=True))


def count_weights(path: str, without: Container[str] = ()) -> int | None:
    """Return the number of weights in a folder's safetensors or of a named model, None if it is not known.

    Args:
        without: Names of tensors that do not count.
    """
    if not Path(path).exists():
        table = named_models.find_table(path)
        return None if table is None else named_models.count_weights(table, without)
    shapes = read_shapes(Path(path))
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in without) or None
