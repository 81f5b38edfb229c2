"""Generates groups: all samples of one grant at once, whole or not at all.

Invariant: a group is made of exactly `group_size` trajectories, sample `i` with the seed that
belongs to (run, ticket, i), whatever the attempt or the replica. Where the advantage wants one, sample
`group_size` is greedy: only its reward joins the group, as the baseline (ReMax, arXiv 2310.10505).
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
    """How a group is sampled; `lengths` forces response lengths, `has_greedy` adds a greedy sample."""

    run_seed: int
    group_size: int
    temperature: float
    max_tokens: int
    lengths: Lengths | None = None
    has_greedy: bool = False

    @property
    def num_samples(self) -> int:
        """Requests that a group makes of the engine."""
        return self.group_size + self.has_greedy


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
                    for sample in range(self._settings.num_samples)
                ]
        except* AsyncrlError as group:
            failures.extend(error for error in group.exceptions if isinstance(error, AsyncrlError))
        if failures:
            raise failures[0]
        trajectories = [task.result() for task in tasks]
        baseline_reward = trajectories.pop().reward if self._settings.has_greedy else None
        return Group(grant.ticket, grant.attempt, prompt.token_ids, tuple(trajectories), baseline_reward)

    async def _run_sample(self, grant: LeaseGrant, prompt: TokenizedPrompt, sample: int) -> Trajectory:
        seed = sample_seed(self._settings.run_seed, grant.ticket, sample)
        max_tokens, lengths = self._settings.max_tokens, self._settings.lengths
        if lengths is not None:
            max_tokens = lengths.draw_tokens(seed, max_tokens)
        temperature = self._settings.temperature if sample < self._settings.group_size else 0.0
        sampling = Sampling(temperature, max_tokens, seed, ignores_eos=lengths is not None)
        return await self._environment.run(prompt, sampling, f"{grant.ticket}.{grant.attempt}.{sample}")
