"""Experts that a run records in generation: of what, and their bytes. The one place that reads the key."""

from __future__ import annotations

from asyncrl.core.config.tree import Config
from asyncrl.core.experts import item_bytes
from asyncrl.models.tables import routed_sizes


def recorded_sizes(config: Config) -> tuple[int, int, int] | None:
    """Return what is recorded of a token: layers, experts chosen by each of how many; None for nothing."""
    return None if config.rollout.router_replay == "off" else routed_sizes(config.model.path)


def count_expert_bytes(config: Config) -> int:
    """Return the bytes of a token's recorded experts, before the column is packed; 0 without."""
    sizes = recorded_sizes(config)
    return 0 if sizes is None else sizes[0] * sizes[1] * item_bytes(sizes[2])
