"""Turns of one episode, token-exact: recorded ones are taken as they are, the others are sampled.

Owns the order of what is recorded: a turn of the model stands in the record before its environment hears it,
and the environment's answer before the model goes on. Invariant: versions rise within an episode, so a
replica waits for the version that sampled the last recorded turn.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollout_service.engine.protocol import Completion, Engine, Sampling
from rollout_service.environments.protocol import NotRestored, Observation, Step, plain
from rollout_service.environments.transcript import Transcript, turn_seed
from rollout_service.sampling.turn_journal import EpisodeRecord

VERSION_DEADLINE_S, LOOK_EVERY_S = 60.0, 0.1
"""Of the wait for the version that sampled the last recorded turn, at a replica that serves an older one."""


class Turns:
    """See the module.

    Args:
        transcript: Tokens so far; its turns are said here.
        record: The turns that are recorded, and where new ones are.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        transcript: Transcript,
        episode_id: str,
        record: EpisodeRecord,
    ) -> None:
        self.transcript, self.record = transcript, record
        self._engine, self._sampling = engine, sampling
        self._episode_id = episode_id

    @property
    def recorded_step(self) -> Step | None:
        """The environment's answer to the last turn that was taken, if it is recorded."""
        return self.record.turns[self.transcript.num_turns - 1].step

    async def take_up(self, opening: Observation) -> None:
        """Return once the episode may go on from its record.

        Raises:
            NotRestored: It began with another observation, or with a version that does not come.
        """
        if plain(opening) != plain(self.record.turns[0].opening):
            raise NotRestored("its first observation is another one")
        wanted = self.record.turns[-1].completion.spans[-1].version
        try:
            async with asyncio.timeout(VERSION_DEADLINE_S):
                while self._engine.serving.number < wanted:
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            raise NotRestored(f"version {wanted}, which sampled a part of it, is not served") from None

    async def take(self, opening: Observation) -> Completion:
        """Return the next turn of the model, which is in the transcript and in the record then."""
        turn, transcript, record = self.transcript.num_turns, self.transcript, self.record
        if turn == len(record.turns):
            await record.flush()
            record.pass_point("rollout.turn_begins")
            own = replace(
                self._sampling, max_tokens=transcript.num_left, seed=turn_seed(self._sampling.seed, turn)
            )
            request_id = f"{self._episode_id}.turn{turn}" if turn else self._episode_id
            completion = await self._engine.generate(transcript.next_prompt(), own, request_id)
            record.say(transcript.without_known(completion), opening)
            await record.flush()
            record.pass_point("rollout.turn_said")
        completion = record.turns[turn].completion
        transcript.say(completion, is_trained=not record.turns[turn].is_shared)
        return completion
