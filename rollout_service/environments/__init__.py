"""Environments: what an episode is, beyond one answer. `Environment` and `Step` are what a user needs."""

from rollout_service.environments.protocol import Environment, EnvironmentFailed, Step

__all__ = ["Environment", "EnvironmentFailed", "Step"]
