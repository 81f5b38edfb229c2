"""Generates groups: all samples of one grant at once, whole or not at all.

Invariant: a group is made of exactly `group_size` trajectories, sample `i` with the seed that
belongs to (run, ticket, i), whatever the attempt or the replica.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncrl.buffer.client import LeaseGrant
from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.errors import AsyncrlError
from asyncrl.experience import Group, Trajectory
from rollout_service.engine.protocol import Sampling
from rollout_service.episode import Environment
from rollout_service.lengths import Lengths
from rollout_service.prompts import PromptSet, TokenizedPrompt


@dataclass(frozen=True)
class GroupSettings:
    """How a group is sampled; `lengths` forces response lengths."""

    run_seed: int
    group_size: int
    temperature: float
    max_tokens: int
    lengths: Lengths | None = None


class GroupRunner:
    """Runs grants in an environment on the prompts of the training data."""

    def __init__(self, environment: Environment, prompts: PromptSet, settings: GroupSettings) -> None:
        self._environment = environment
        self._prompts = prompts
        self._settings = settings

    async def run(self, grant: LeaseGrant) -> Group:
        """Return the grant's group. The first episode that fails ends the others, and its error is raised."""
        prompt = self._prompts.at(grant.index)
        failures: list[AsyncrlError] = []
        try:
            async with asyncio.TaskGroup() as episodes:
                tasks = [
                    episodes.create_task(self._run_sample(grant, prompt, sample))
                    for sample in range(self._settings.group_size)
                ]
        except* AsyncrlError as group:
            failures.extend(error for error in group.exceptions if isinstance(error, AsyncrlError))
        if failures:
            raise failures[0]
        return Group(grant.ticket, grant.attempt, prompt.token_ids, tuple(task.result() for task in tasks))

    async def _run_sample(self, grant: LeaseGrant, prompt: TokenizedPrompt, sample: int) -> Trajectory:
        seed = sample_seed(self._settings.run_seed, grant.ticket, sample)
        max_tokens, lengths = self._settings.max_tokens, self._settings.lengths
        if lengths is not None:
            max_tokens = lengths.draw_tokens(seed, max_tokens)
        sampling = Sampling(self._settings.temperature, max_tokens, seed, ignores_eos=lengths is not None)
        return await self._environment.run(prompt, sampling, f"{grant.ticket}.{grant.attempt}.{sample}")
