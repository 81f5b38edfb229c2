"""Work that outlives its replica, and answers that a limit cut: the real buffer, a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncrl.buffer import composition
from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.errors import EngineError
from asyncrl.core.experience import UNFINISHED, Group, Trajectory
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.service_command import Drain
from asyncrl.core.staleness import PolicyVersion, Span
from rollout_service.data.prompts import PromptSet, TokenizedPrompt
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.protocol import Completion, Interrupted, Sampling
from rollout_service.engine.scripted.engine import ScriptedEngine, scripted_logprob
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.service import Replica
from rollout_service.rewards.score import Answer, Score
from rollout_service.sampling import partial_rollout
from rollout_service.sampling.episode import SingleTurn
from rollout_service.sampling.groups import GroupRunner, GroupSettings
from rollout_service.tasks.digit_sort.vocabulary import EOS, build_tokenizer
from tests.rollout.data.files import load_prompts
from tests.rollout.replica.replica_parts import (
    GROUP_SIZE,
    WAIT_S,
    HandFedReceiver,
    make_config,
    running,
    write_data,
)
from tests.waiting import wait_for
from weight_sync.memory.staging import Staged

HELD_AT = 3
MAX_TOKENS = 24


class ByLength:
    async def score(self, answer: Answer) -> Score:
        return Score(float(answer.num_tokens))


class HeldEngine(ScriptedEngine):
    """Gives each request up to `HELD_AT` tokens, then none until it is interrupted."""

    def __init__(self, eos_id: int) -> None:
        super().__init__(eos_id)
        self._given: Counter[asyncio.Event] = Counter()
        self.num_held = 0

    async def _wait_one_token(self, ended: asyncio.Event) -> None:
        self._given[ended] += 1
        if self._given[ended] > HELD_AT:
            self.num_held += 1
            await ended.wait()
        await super()._wait_one_token(ended)


@dataclasses.dataclass
class Yard:
    """A buffer, the prompts, and a learner; replicas come and go."""

    address: str
    prompts: PromptSet
    learner: LearnerClient
    settings: GroupSettings

    @contextlib.contextmanager
    def replica(self, name: str, engine: ScriptedEngine, version: PolicyVersion) -> Iterator[Replica]:
        receiver = HandFedReceiver()
        receiver.offer(version.number, version.step)

        async def build() -> ReplicaParts:
            metered = MeteredEngine(engine, SystemClock())
            episodes = SingleTurn(metered, build_tokenizer(), ByLength())
            return ReplicaParts(
                engine=metered,
                buffer=ReplicaClient(self.address, name, 5.0),
                weights=receiver,
                runner=GroupRunner(episodes, self.prompts, self.settings),
                evaluator=None,
                prompts=self.prompts,
            )

        replica = Replica(ThreadRuntime(), name, ReplicaSettings(4, 1.0, 10.0, resumes_partial=True), build)
        with running(replica):
            yield replica


@contextlib.contextmanager
def open_yard(folder: Path, advantage: str = "grpo", masks_cut: bool = False) -> Iterator[Yard]:
    write_data(folder)
    config = make_config(folder, advantage, max_tokens=MAX_TOKENS)
    buffer = composition.build(ServiceContext(config, "buffer.0", folder / "run", "test"))
    with running(buffer):
        wait_for(lambda: buffer.status().address, "the buffer's address")
        prompts = load_prompts(folder / "train.parquet", build_tokenizer(), 16)
        settings = GroupSettings(
            0, GROUP_SIZE, 1.0, MAX_TOKENS, has_greedy=advantage == "remax", masks_cut=masks_cut
        )
        learner = LearnerClient(buffer.status().address)
        learner.open("test")
        yield Yard(buffer.status().address, prompts, learner, settings)
        learner.close()


def undisturbed(ticket: int, sample: int) -> list[int]:
    """Return the tokens that the scripted policy gives a sample, whatever its weights."""

    async def ask() -> Completion:
        engine = ScriptedEngine(EOS)
        await engine.start()
        sampling = Sampling(1.0, MAX_TOKENS, sample_seed(0, ticket, sample))
        return await engine.generate([1], sampling, "alone")

    return asyncio.run(ask()).token_ids.tolist()


def check_recorded(trajectory: Trajectory) -> None:
    """Every token has the log-prob of the version that its span names."""
    for span in trajectory.spans:
        wanted = [
            scripted_logprob(int(t), span.version) for t in trajectory.response_ids[span.start : span.end]
        ]
        assert trajectory.logprobs[span.start : span.end].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("advantage", ["grpo", "remax"])
def test_a_drained_replica_s_work_goes_on_elsewhere_with_its_tokens_versions_and_log_probs(
    tmp_path: Path, advantage: str
):
    with open_yard(tmp_path, advantage) as yard:
        first, held = yard.learner.register_version(0), HeldEngine(EOS)
        with yard.replica("rollout.0", held, PolicyVersion(first, 0)) as replica:

            def is_held() -> bool:
                engine = replica.status().engine
                num_requests = engine.in_flight_requests if engine is not None else 0
                return 3 * yard.settings.num_samples < num_requests == held.num_held

            wait_for(is_held, "so many begun answers that no further group fits")
            num_groups = replica.status().in_flight_groups
            assert num_groups > 4, "a group's finished samples make room for others"
            replica.command(Drain())
            wait_for(lambda: replica.status().state == "RETIRED", "RETIRED")
            assert replica.status().counters["partial/stored"] == num_groups
        assert yard.learner.status().reissues == {"partial": num_groups}
        second = yard.learner.register_version(0)
        with yard.replica("rollout.1", ScriptedEngine(EOS), PolicyVersion(second, 0)) as replica:
            reservation = yard.learner.reserve(0, WAIT_S)
            assert reservation is not None
            groups = yard.learner.fetch([ticket.ticket for ticket in reservation.tickets])
            wait_for(
                lambda: replica.status().counters["groups_resumed"] == num_groups, "all partial rollouts"
            )
        assert yard.learner.status().residue == 0
    crossings = 0
    for group in groups:
        assert group.is_whole and (group.baseline_reward is None) == (advantage == "grpo")
        for sample, trajectory in enumerate(group.trajectories):
            check_recorded(trajectory)
            wanted, ids = undisturbed(group.ticket, sample), trajectory.response_ids.tolist()
            assert trajectory.spans[0].version == first
            if len(wanted) > HELD_AT:
                assert trajectory.spans == (Span(first, 0, HELD_AT), Span(second, HELD_AT, len(ids)))
                assert ids[:HELD_AT] == wanted[:HELD_AT]
                crossings += 1
            else:
                assert ids == wanted and len(trajectory.spans) == 1, "a whole sibling stays as it was"
            assert trajectory.reward == trajectory.num_tokens <= MAX_TOKENS
    assert crossings > 4


def make_trajectory(num_tokens: int, version: int = 3) -> Trajectory:
    spans = (Span(version, 0, num_tokens),) if num_tokens else ()
    mask, logprobs = np.ones(num_tokens, np.uint8), np.full(num_tokens, -1.0, np.float32)
    ids = np.arange(num_tokens, dtype=np.int32)
    return Trajectory(ids, mask, logprobs, spans, 0.0, UNFINISHED)


@pytest.mark.parametrize(
    ("trajectory", "max_tokens", "served", "num_begun"),
    [
        (make_trajectory(5), 10, 3, 5),
        (make_trajectory(5), 10, 4, 5),
        (make_trajectory(5), 10, 2, 0),
        (make_trajectory(5), 5, 3, 0),
        (make_trajectory(0), 10, 3, 0),
        (dataclasses.replace(make_trajectory(5), finish_reason="stop"), 10, 3, 0),
        (None, 10, 3, 0),
    ],
    ids=["same version", "newer", "older engine", "no room", "empty", "whole", "nothing"],
)
def test_a_beginning_is_gone_on_with_unless_versions_would_fall_or_nothing_is_left(
    trajectory: Trajectory | None, max_tokens: int, served: int, num_begun: int
):
    assert len(partial_rollout.begin_from(trajectory, max_tokens, served).token_ids) == num_begun


def test_the_rest_is_sampled_under_a_seed_of_its_own_and_versions_that_meet_are_one_span():
    sampling = Sampling(1.0, 10, 7)
    assert partial_rollout.continue_sampling(sampling, 0) == sampling
    rest = partial_rollout.continue_sampling(sampling, 4)
    assert rest.max_tokens == 6 and rest.seed != 7 and rest == partial_rollout.continue_sampling(sampling, 4)
    begun = partial_rollout.begin_from(make_trajectory(4), 10, 3)
    rest_of = Completion(
        np.arange(3, dtype=np.int32), np.zeros(3, np.float32), (Span(3, 0, 1), Span(5, 1, 3)), "stop"
    )
    assert partial_rollout.join(begun, rest_of).spans == (Span(3, 0, 5), Span(5, 5, 7))


def test_a_request_that_is_interrupted_before_its_first_token_has_an_empty_beginning():
    async def interrupt() -> Completion:
        engine = ScriptedEngine(EOS, tokens_per_s=1.0)
        await engine.start()
        request = asyncio.create_task(engine.generate([1], Sampling(1.0, 4, 0), "request"))
        await asyncio.sleep(0)
        await engine.interrupt()
        with pytest.raises(Interrupted) as found:
            await request
        return found.value.completion

    beginning = asyncio.run(interrupt())
    assert (beginning.token_ids.tolist(), beginning.spans) == ([], ())


def test_a_stop_string_across_the_boundary_ends_the_answer_where_it_is_complete():
    tokenizer = build_tokenizer()
    ids = np.array([1, 2, 3, 4, 5, 1, 2], dtype=np.int32)
    whole = Completion(ids, np.zeros(7, np.float32), (Span(1, 0, 3), Span(2, 3, 7)), "length")
    cut = partial_rollout.cut_at_stop(whole, 3, ("345", "99"), tokenizer.decode)
    assert (cut.token_ids.tolist(), cut.finish_reason) == ([1, 2, 3, 4, 5], "stop")
    assert (cut.spans, len(cut.logprobs)) == ((Span(1, 0, 3), Span(2, 3, 5)), 5)
    assert partial_rollout.cut_at_stop(whole, 3, ("354",), tokenizer.decode) is whole
    last = partial_rollout.cut_at_stop(whole, 5, ("4512",), tokenizer.decode)
    assert (len(last.token_ids), last.finish_reason) == (7, "stop"), "also by the last token of all"


def test_a_group_that_lacks_only_its_greedy_answer_is_not_complete(tmp_path: Path):
    write_data(tmp_path)
    prompts = load_prompts(tmp_path / "train.parquet", build_tokenizer(), 16)
    whole = tuple(dataclasses.replace(make_trajectory(3), finish_reason="stop") for _ in range(GROUP_SIZE))
    group = Group(1, 1, prompts.at(0).token_ids, whole)
    for has_greedy in (False, True):
        settings = GroupSettings(0, GROUP_SIZE, 1.0, 8, has_greedy=has_greedy)
        runner = GroupRunner(NoAnswer(), prompts, settings)
        assert runner.is_complete(group) == (not has_greedy)
        assert runner.is_complete(dataclasses.replace(group, baseline_reward=1.0))
        assert runner.fits(LeaseGrant(1, 2, 0, 0, 0, 0, 1.0), group)
        assert not runner.fits(LeaseGrant(1, 2, 0, 0, 1, 0, 1.0), group), "another prompt"


class NoAnswer:
    """Episodes that end without a token."""

    async def run(
        self, prompt: TokenizedPrompt, sampling: Sampling, episode_id: str, partial: Trajectory | None = None
    ) -> Trajectory:
        return dataclasses.replace(make_trajectory(0), finish_reason="stop")


def test_an_empty_answer_fails_its_group(tmp_path: Path):
    write_data(tmp_path)
    prompts = load_prompts(tmp_path / "train.parquet", build_tokenizer(), 16)
    runner = GroupRunner(NoAnswer(), prompts, GroupSettings(0, GROUP_SIZE, 1.0, 8))
    with pytest.raises(EngineError, match="an empty answer cannot be trained"):
        asyncio.run(runner.run(LeaseGrant(1, 1, 0, 0, 0, 0, 1.0)))


class HalfBegun:
    """Is interrupted before the first sample has begun."""

    async def run(
        self, prompt: object, sampling: object, episode_id: str, partial: Trajectory | None = None
    ) -> Trajectory:
        if episode_id.endswith(".0"):
            raise Interrupted("the replica drains", completion=partial_rollout.NOTHING)
        return make_trajectory(5)


def test_a_sample_that_was_interrupted_before_it_began_is_left_for_the_next_attempt(tmp_path: Path):
    write_data(tmp_path)
    prompts = load_prompts(tmp_path / "train.parquet", build_tokenizer(), 16)
    runner = GroupRunner(HalfBegun(), prompts, GroupSettings(0, 2, 1.0, 8))
    group = asyncio.run(runner.run(LeaseGrant(1, 1, 0, 0, 0, 0, 1.0)))
    assert [one.num_tokens for one in group.trajectories] == [0, 5]
    assert not group.is_whole and not runner.is_complete(group)


async def run_cut(prompts: PromptSet, masks_cut: bool) -> Group:
    engine = ScriptedEngine(EOS)
    await engine.start()
    await engine.swap(Staged(PolicyVersion(1, 0), "", None))  # type: ignore[arg-type]
    settings = GroupSettings(0, 16, 1.0, 3, masks_cut=masks_cut)
    return await GroupRunner(SingleTurn(engine, build_tokenizer(), ByLength()), prompts, settings).run(
        LeaseGrant(1, 1, 0, 0, 0, 0, 1.0)
    )


@pytest.mark.parametrize("masks_cut", [False, True])
def test_answers_that_were_cut_are_trained_or_masked_whole_as_the_policy_says(
    tmp_path: Path, masks_cut: bool
):
    write_data(tmp_path)
    group = asyncio.run(run_cut(load_prompts(tmp_path / "train.parquet", build_tokenizer(), 16), masks_cut))
    assert {trajectory.finish_reason for trajectory in group.trajectories} == {"stop", "length"}
    for trajectory in group.trajectories:
        is_trained = trajectory.finish_reason == "stop" or not masks_cut
        assert trajectory.loss_mask.tolist() == [int(is_trained)] * trajectory.num_tokens


def test_a_group_with_masked_answers_is_trained_and_one_of_nothing_else_is_dropped(tmp_path: Path):
    with open_yard(tmp_path, masks_cut=True) as yard:
        yard.settings = dataclasses.replace(yard.settings, max_tokens=2)
        number = yard.learner.register_version(0)
        with yard.replica("rollout.0", ScriptedEngine(EOS), PolicyVersion(number, 0)):
            reservation = yard.learner.reserve(0, WAIT_S)
            assert reservation is not None
            groups = yard.learner.fetch([ticket.ticket for ticket in reservation.tickets])
        assert yard.learner.status().dropped["masked"] > 0
        assert yard.learner.status().residue == 0
    masked = [one for group in groups for one in group.trajectories if not one.loss_mask.any()]
    assert masked and all(one.finish_reason == "length" for one in masked)
    assert all(any(one.loss_mask.any() for one in group.trajectories) for group in groups)
