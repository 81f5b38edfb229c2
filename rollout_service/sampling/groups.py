"""Group generator: all samples of one grant at once, whole or not at all.

Invariant: a group is made of exactly `group_size` trajectories, sample `i` with the seed that
belongs to (run, ticket, i), whatever the attempt or the replica. Where the advantage wants one, sample
`group_size` is greedy: only its reward joins the group, as the baseline (ReMax, arXiv 2310.10505).
A sample that was interrupted stays as the beginning of one, and the next attempt goes on from it.
With `branches` the samples are trees: the first of so many is sampled whole, and each other one forks off
after one of its turns, drawn by the fork's seed. What they share is trained in the first alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.config.lengths import Lengths
from asyncrl.core.errors import AsyncrlError, EngineError
from asyncrl.core.experience import CUT_REASONS, UNFINISHED, Group, Trajectory, check_reward
from asyncrl.core.experts import Rows, extend
from asyncrl.core.runtime.faults import fault_point
from rollout_service.data.prompts import PromptSet, TokenizedPrompt
from rollout_service.engine.protocol import Interrupted, Sampling
from rollout_service.sampling import partial_rollout
from rollout_service.sampling.episode import EpisodeRunner, Unfinished
from rollout_service.sampling.turn_journal import EpisodeRecord, Journal, TurnJournal


@dataclass(frozen=True)
class GroupSettings:
    """Sampling of a group.

    Attributes:
        lengths: Forces response lengths.
        has_greedy: A greedy sample is added.
        stop: Strings that end a response.
        branches: Samples of a tree; it divides `group_size`. More than 1: episodes of several turns.
        masks_cut: Answers that a limit cut off are not trained: all of their loss mask is 0.
    """

    run_seed: int
    group_size: int
    temperature: float
    max_tokens: int
    lengths: Lengths | None = None
    has_greedy: bool = False
    stop: tuple[str, ...] = ()
    masks_cut: bool = False
    branches: int = 1

    @property
    def num_samples(self) -> int:
        """Requests that a group makes of the engine."""
        return self.group_size + self.has_greedy


def gather_prompt_experts(
    trajectories: Sequence[Trajectory], num_tokens: int, known: Rows | None = None
) -> tuple[Rows | None, list[Trajectory]]:
    """Return the experts of a prompt, each from whichever trajectory has it, and these without them.

    Args:
        num_tokens: Of the prompt. known: Experts of its first tokens.
    """
    for one in trajectories:
        known = extend(known, num_tokens, one.prompt_experts)
    return known, [dataclasses.replace(one, prompt_experts=None) for one in trajectories]


class GroupRunner:
    """Runs grants as episodes on the prompts of the training data.

    `on_end` is called whenever a sample has ended.
    """

    journal = TurnJournal

    def __init__(self, episodes: EpisodeRunner, prompts: PromptSet, settings: GroupSettings) -> None:
        self._episodes = episodes
        self._prompts = prompts
        self._settings = settings
        self._num_ended: Counter[tuple[int, int]] = Counter()
        self.on_end: Callable[[], None] = lambda: None

    @property
    def num_samples(self) -> int:
        """Requests that a group makes of the engine."""
        return self._settings.num_samples

    def num_unfinished(self, num_held: int) -> int:
        """Return how many samples of `num_held` groups have not ended."""
        return num_held * self.num_samples - self._num_ended.total()

    async def run(self, grant: LeaseGrant, partial: Group | Journal | None = None) -> Group:
        """Return the grant's group; `is_complete` tells whether it may be pushed whole, or only as partial.

        Args:
            partial: Partial group of an earlier attempt, if it `fits`: whole samples stay, others continue.
                Or the journal of its turns: each sample goes on from there, and records its own.

        Raises:
            Interrupted: The engine was interrupted before there was a token to keep that is not recorded.
            AsyncrlError: Of the first episode that fails; it ends the others.
            WireError: Its samples have more parts of a reward than a group may have.
        """
        prompt = self._prompts.at(grant.index)
        is_tree = self._settings.branches > 1
        begun = self._begun(TurnJournal(*grant.key, None) if is_tree and partial is None else partial)
        failures: list[AsyncrlError] = []
        try:
            async with asyncio.TaskGroup() as episodes:
                tasks: list[asyncio.Task[Trajectory]] = []
                for sample in range(len(begun)):
                    running = self._run_sample(grant, prompt, sample, begun, tasks)
                    tasks.append(episodes.create_task(running))
        except* AsyncrlError as group:
            failures.extend(error for error in group.exceptions if isinstance(error, AsyncrlError))
        finally:
            del self._num_ended[grant.key]
        if failures:
            raise failures[0]
        known = partial.prompt_experts if isinstance(partial, Group) else None
        told = [task.result() for task in tasks]
        prompt_experts, trajectories = gather_prompt_experts(told, len(prompt.token_ids), known)
        check_reward(0.0, {}, {name for one in trajectories for name in one.reward_parts})
        is_recorded = isinstance(partial, TurnJournal) and any(
            one.finish_reason == UNFINISHED for one in trajectories
        )
        if is_recorded or not any(trajectory.num_tokens for trajectory in trajectories):
            raise Interrupted(f"ticket {grant.ticket} was not begun", completion=partial_rollout.NOTHING)
        baseline_reward = partial.baseline_reward if isinstance(partial, Group) else None
        if len(trajectories) > self._settings.group_size:
            greedy = trajectories.pop()
            baseline_reward = None if greedy.finish_reason == UNFINISHED else greedy.reward
        identity = grant.ticket, grant.attempt, prompt.token_ids
        return Group(*identity, tuple(trajectories), baseline_reward, prompt_experts=prompt_experts)

    def is_complete(self, group: Group) -> bool:
        """Tell whether nothing of a group is left to do."""
        return group.is_whole and (group.baseline_reward is not None or not self._settings.has_greedy)

    def fits(self, grant: LeaseGrant, partial: Group) -> bool:
        """Tell whether a partial group is of the grant's prompt and of the configured group size."""
        is_ours = partial.prompt_ids.tolist() == self._prompts.at(grant.index).token_ids.tolist()
        return is_ours and len(partial.trajectories) == self._settings.group_size

    def _begun(self, partial: Group | Journal | None) -> Sequence[Trajectory | EpisodeRecord | None]:
        """Return what is there of each sample to run; the greedy one is left out once its reward is known."""
        settings = self._settings
        if isinstance(partial, TurnJournal):
            return [partial.episode(sample) for sample in range(settings.num_samples)]
        if not isinstance(partial, Group):
            return [None] * settings.num_samples
        is_greedy_left = settings.has_greedy and partial.baseline_reward is None
        return [*partial.trajectories, *[None] * is_greedy_left]

    async def _run_sample(
        self,
        grant: LeaseGrant,
        prompt: TokenizedPrompt,
        sample: int,
        begun: Sequence[Trajectory | EpisodeRecord | None],
        tasks: Sequence[asyncio.Task[Trajectory]],
    ) -> Trajectory:
        origin = sample - sample % self._settings.branches
        try:
            if origin != sample:
                own, shared = begun[sample], begun[origin]
                assert isinstance(own, EpisodeRecord) and isinstance(shared, EpisodeRecord)
                if not own.turns and (await tasks[origin]).finish_reason == UNFINISHED:
                    return partial_rollout.as_unfinished(partial_rollout.NOTHING)
                self._fork(grant, sample, own, shared)
            trajectory = await self._sample(grant, prompt, sample, begun[sample])
            fault_point("rollout.sampled", grant.ticket, sample)
            return trajectory
        finally:
            self._num_ended[grant.key] += 1
            self.on_end()

    def _fork(self, grant: LeaseGrant, sample: int, own: EpisodeRecord, shared: EpisodeRecord) -> None:
        """Let a sample go on from a turn of the one before it that is not its last."""
        origin = sample - sample % self._settings.branches
        own.environment_seed = self._sampling(grant, origin).seed
        num_places = len(shared.turns) - 1
        if not own.turns and num_places > 0:
            own.fork(shared, 1 + self._sampling(grant, sample).seed % num_places)

    async def _sample(
        self,
        grant: LeaseGrant,
        prompt: TokenizedPrompt,
        sample: int,
        begun: Trajectory | EpisodeRecord | None,
    ) -> Trajectory:
        if isinstance(begun, Trajectory) and begun.finish_reason != UNFINISHED:
            return begun
        episode_id = f"{grant.ticket}.{grant.attempt}.{sample}"
        try:
            trajectory = await self._episodes.run(prompt, self._sampling(grant, sample), episode_id, begun)
        except Unfinished as error:
            return error.trajectory
        except Interrupted:
            return partial_rollout.as_unfinished(partial_rollout.NOTHING)
        if not trajectory.num_tokens:
            raise EngineError(f"episode {episode_id} has no token: an empty answer cannot be trained")
        return self._masked(trajectory)

    def _sampling(self, grant: LeaseGrant, sample: int) -> Sampling:
        settings = self._settings
        seed = sample_seed(settings.run_seed, grant.ticket, sample)
        max_tokens, lengths = settings.max_tokens, settings.lengths
        if lengths is not None:
            max_tokens = lengths.draw_tokens(seed, max_tokens)
        temperature = settings.temperature if sample < settings.group_size else 0.0
        return Sampling(temperature, max_tokens, seed, lengths is not None, settings.stop)

    def _masked(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory as the policy for answers that were cut wants it."""
        if not self._settings.masks_cut or trajectory.finish_reason not in CUT_REASONS:
            return trajectory
        return dataclasses.replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))
