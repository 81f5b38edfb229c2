"""Choice of a membership's backend (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.core.config.tree import Config

GLOO, NCCL = "gloo", "nccl"


def choose_backend(config: Config) -> str:
    """Return the backend that the configuration wants.

    `auto` wants NCCL only if learner and replicas have GPUs; a membership still falls back to gloo
    unless every member can do NCCL, see `agree_on_backend`.
    """
    wanted = config.weight_sync.backend
    if wanted != "auto":
        return wanted
    return NCCL if config.rollout.gpus and config.learner.gpus else GLOO


def agree_on_backend(wanted: str, abilities: Iterable[frozenset[str]]) -> str:
    """Return `wanted` if all members are able to use it, else gloo, which everyone is."""
    return wanted if all(wanted in able for able in abilities) else GLOO
