"""Parts of the tests of recorded turns: the real buffer, replicas killed at points, a tool that counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncrl.buffer import composition
from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.experience import Group
from asyncrl.core.runtime.faults import set_hook
from asyncrl.core.service import ServiceContext
from asyncrl.core.staleness import PolicyVersion, Span
from rollout_service.data.prompts import PromptSet
from rollout_service.engine.protocol import Completion, Sampling
from rollout_service.environments.registry import Episodes
from rollout_service.environments.runner import MultiTurn
from rollout_service.environments.tools.calling import CallKey
from rollout_service.environments.tools.calls import CallFormat, PatternCalls
from rollout_service.environments.tools.tool import Tool
from rollout_service.environments.tools.tool_use import ToolEpisode
from rollout_service.replica.groups import GroupTasks
from rollout_service.replica.lifecycle import Lifecycle
from rollout_service.replica.parts import ReplicaSettings
from rollout_service.sampling.groups import GroupRunner, GroupSettings
from tests.rollout.data.files import load_prompts
from tests.rollout.environments.parts import TOKENIZER, ExactMatch
from tests.rollout.replica.replica_parts import make_config, running, write_data
from tests.waiting import wait_for

PHRASES = ("?2*3", "?4*5", "20")
"""Two turns with a call, and the answer."""
GROUP_SIZE, MAX_TOKENS = 2, 64
SETTINGS = ReplicaSettings(4, 60.0, 10.0, resumes_partial=True, records_turns=True)
TURN_POINTS = ("rollout.turn_begins", "rollout.turn_said")
CALL_POINTS = ("rollout.calling", "rollout.called")


class Killed(BaseException):
    """Stands for SIGKILL: no code of ours handles it, and nothing more is sent."""


class Killer:
    """Kills at the `at`-th point that a sample passes; None lets it live. `passed`: all of them, in order."""

    def __init__(self, at: int | None = None, sample: int = 0) -> None:
        self._at, self._sample = at, sample
        self.passed: list[tuple[str, tuple[int | None, ...]]] = []

    def __call__(self, name: str, place: tuple[int | None, ...]) -> None:
        if name in (*TURN_POINTS, *CALL_POINTS) and place[1] == self._sample:
            self.passed.append((name, place[2:]))
            if len(self.passed) - 1 == self._at:
                raise Killed


@contextlib.contextmanager
def hooked(killer: Killer) -> Iterator[Killer]:
    before = set_hook(killer)
    try:
        yield killer
    finally:
        set_hook(before)


class CountingTool(Tool):
    """A tool with a lasting effect: `effects` by text and sample of the call; `keys` of all calls."""

    name, description, argument = "calculator", "", "expression"

    def __init__(self, *, is_idempotent: bool) -> None:
        self.is_idempotent = is_idempotent
        self.effects: Counter[tuple[str, int]] = Counter()
        self.keys: list[CallKey] = []

    async def call(self, text: str, key: CallKey) -> str:
        is_known = any(str(one) == str(key) for one in self.keys)
        self.keys.append(key)
        if not (self.is_idempotent and is_known):
            self.effects[text, key.sample] += 1
        one, other = text.split("*")
        return str(int(one) * int(other))


class SpeakingEngine:
    """A scripted engine of one version: says `phrases[turn]`; log-probs tell version and place.

    Its tokens are of version `old_as`, if given, as of weights that were swapped in between.
    """

    def __init__(self, version: int, phrases: Sequence[str] = PHRASES, old_as: int | None = None) -> None:
        self.serving = PolicyVersion(version, 0)
        self._version = version if old_as is None else old_as
        self._phrases = phrases
        self.said: list[tuple[int, int]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        name, _, turn = request_id.partition(".turn")
        self.said.append((int(name.rpartition(".")[2]), int(turn or 0)))
        await asyncio.sleep(0)
        text = self._phrases[int(turn or 0)]
        ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
        version = self._version
        logprobs = -float(version) - np.arange(len(ids), dtype=np.float32) / 64
        return Completion(np.asarray(ids, np.int32), logprobs, (Span(version, 0, len(ids)),), "stop")


def calling(*tools: Any, call_format: CallFormat | None = None) -> Episodes:
    """Return episodes of a pattern's calls."""
    chosen = call_format or PatternCalls(r"\?(.+)", "calculator", "expression", "!{result}=")
    by_name: Mapping[str, Any] = {tool.name: tool for tool in tools}
    return Episodes(lambda prompt, seed: ToolEpisode(by_name, chosen), is_restorable=True)


@dataclass
class Bench:
    """A buffer with a learner; `attempt` is a replica's work at one lease."""

    address: str
    learner: LearnerClient
    prompts: PromptSet
    counters: Counter[str] = field(default_factory=Counter)

    async def lease(self, client: ReplicaClient, version: int) -> LeaseGrant:
        (grant,) = (await client.lease(version, 1, 5.0)).grants
        return grant

    async def attempt(
        self,
        episodes: Episodes,
        engine: Any,
        killer: Killer,
        name: str = "rollout.0",
        settings: ReplicaSettings = SETTINGS,
        branches: int = 1,
        seed: int = 0,
    ) -> LeaseGrant:
        """Generate one leased group with the real loop, until the killer strikes."""
        client = ReplicaClient(self.address, name, 10.0)
        runner = MultiTurn(engine, TOKENIZER, episodes, ExactMatch(), has_chats=False)
        sizes = GroupSettings(seed, GROUP_SIZE, 1.0, MAX_TOKENS, branches=branches)
        groups = GroupRunner(runner, self.prompts, sizes)
        parts: Any = SimpleNamespace(buffer=client, runner=groups, engine=engine)
        lifecycle = Lifecycle(name)
        try:
            await client.deregister()  # as each start does, after a death too
            grant = await self.lease(client, engine.serving.number)
            with hooked(killer):
                await GroupTasks(parts, settings, lifecycle, asyncio.TaskGroup())._run(grant)
        except* Killed:
            pass
        finally:
            self.counters += lifecycle.counters
            client.close()
        return grant

    def play(self, episodes: Episodes, engine: Any, at: int | None = None, **more: Any) -> LeaseGrant:
        return asyncio.run(self.attempt(episodes, engine, Killer(at), **more))

    def group(self, ticket: int) -> Group:
        """Return a stored group, as the learner gets it."""
        found = self.learner.reserve(0, 10.0, have=[])
        assert found is not None
        self.learner.fetch([one.ticket for one in found.tickets])
        return next(one for one in self.learner.fetch([ticket]) if one.ticket == ticket)


@contextlib.contextmanager
def open_bench(folder: Path, journal: str = "none", is_new: bool = True, max_lag: int = 1) -> Iterator[Bench]:
    """Run a buffer that admits one group at a time; not `is_new`: it was there before."""
    if is_new:
        write_data(folder)
    config = make_config(folder, group_size=GROUP_SIZE, max_tokens=MAX_TOKENS)
    learner = config.learner.model_copy(update={"groups_per_step": 1, "minibatches": 1})
    section = config.buffer.model_copy(update={"journal": journal})
    staleness = config.staleness.model_copy(update={"max_lag": max_lag})
    config = config.model_copy(update={"buffer": section, "learner": learner, "staleness": staleness})
    buffer = composition.build(ServiceContext(config, "buffer.0", folder / "run", "test"))
    with running(buffer):
        wait_for(lambda: buffer.status().address, "the buffer's address")
        client = LearnerClient(buffer.status().address)
        client.open("test")
        prompts = load_prompts(folder / "train.parquet", TOKENIZER, 16)
        yield Bench(buffer.status().address, client, prompts)
        client.close()


async def describe(bench: Bench) -> None:
    client = ReplicaClient(bench.address, "rollout.9", 10.0)
    await client.describe_data(bench.prompts.num_prompts, bench.prompts.digest, bench.prompts.sources)
    client.close()


def prepare(bench: Bench) -> tuple[int, int]:
    """Return the numbers of two versions of the same step."""
    asyncio.run(describe(bench))
    return bench.learner.register_version(0), bench.learner.register_version(0)
