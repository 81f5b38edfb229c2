"""Episodes that go on elsewhere, and those that do not: drains, deaths, environments, limits, secrets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.buffer.client import ReplicaClient
from asyncrl.core.errors import LedgerError
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service_command import Drain
from asyncrl.core.staleness import Span
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.protocol import Completion, Sampling
from rollout_service.engine.scripted.engine import ScriptedEngine
from rollout_service.environments import Environment, EnvironmentFailed, Step
from rollout_service.environments.protocol import is_restorable
from rollout_service.environments.registry import Episodes
from rollout_service.environments.runner import MultiTurn
from rollout_service.environments.tools.calling import CallKey, Calls
from rollout_service.environments.tools.calls import JsonCalls, PatternCalls
from rollout_service.environments.tools.tool import ToolExhausted, ToolRefused
from rollout_service.environments.tools.tool_use import ToolEpisode
from rollout_service.environments.turns import Turns
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.service import Replica
from rollout_service.sampling import turn_records
from rollout_service.sampling.groups import GroupRunner, GroupSettings
from rollout_service.sampling.turn_journal import EpisodeRecord, LeaseLost, TurnJournal
from tests.rollout.environments.parts import TOKENIZER, ExactMatch, load
from tests.rollout.environments.recorded.journal_parts import (
    GROUP_SIZE,
    MAX_TOKENS,
    SETTINGS,
    CountingTool,
    Killed,
    SpeakingEngine,
    calling,
    open_bench,
    prepare,
)
from tests.rollout.replica.replica_parts import HandFedReceiver, running
from tests.waiting import wait_for

SAID = {(sample, turn) for sample in range(GROUP_SIZE) for turn in range(3)}


class HeldEngine(ScriptedEngine):
    """Is at work on the third turn of some samples until it is interrupted."""

    def __init__(self, samples: Sequence[int]) -> None:
        self._held = tuple(f".{sample}.turn2" for sample in samples)
        super().__init__(TOKENIZER.eos_token_id, tokens_per_s=1e-6)
        self.said: list[tuple[int, int]] = []
        self.num_held = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        if request_id.endswith(self._held):
            self.num_held += 1
            return await super().generate(prompt_ids, sampling, request_id)
        speaker = SpeakingEngine(self.serving.number)
        found = await speaker.generate(prompt_ids, sampling, request_id)
        self.said += speaker.said
        return found


@pytest.mark.parametrize("samples", [(0, 1), (1,)], ids=["all held", "one has ended"])
def test_a_drain_loses_no_turn(tmp_path: Path, samples: Sequence[int]):
    """The real replica is drained; another one has only the third turns to sample."""
    tool, held, receiver = CountingTool(is_idempotent=False), HeldEngine(samples), HandFedReceiver()
    num_said = 2 * (3 * GROUP_SIZE - len(samples))
    with open_bench(tmp_path) as bench:
        first, second = prepare(bench)
        receiver.offer(first, 0)

        async def build() -> ReplicaParts:
            engine = MeteredEngine(held, SystemClock())
            runner = MultiTurn(engine, TOKENIZER, calling(tool), ExactMatch(), has_chats=False)
            groups = GroupRunner(runner, bench.prompts, GroupSettings(0, GROUP_SIZE, 1.0, MAX_TOKENS))
            buffer = ReplicaClient(bench.address, "rollout.0", 10.0)
            return ReplicaParts(engine, buffer, receiver, groups, None, bench.prompts)

        replica = Replica(ThreadRuntime(), "rollout.0", SETTINGS, build)
        with running(replica):
            wait_for(lambda: (held.num_held, len(held.said)) == (2 * len(samples), num_said), "third turns")
            replica.command(Drain())
            wait_for(lambda: replica.status().state == "RETIRED", "RETIRED")
        assert bench.learner.status().reissues["released"] == 2
        for ticket in (1, 2):
            heir = SpeakingEngine(second)
            assert bench.play(calling(tool), heir, name="rollout.1").ticket == ticket
            assert sorted(heir.said) == [(sample, 2) for sample in samples], "no turn is sampled twice"
        assert len(tool.keys) == 2 * 2 * GROUP_SIZE, "no call is made twice"
        assert bench.counters["groups_resumed"] == 2
        spans = bench.group(1).trajectories[1].spans
        assert [span.version for span in spans] == [first, second]


def test_an_episode_goes_on_after_its_replica_and_the_buffer_died(tmp_path: Path):
    tool = CountingTool(is_idempotent=False)
    with open_bench(tmp_path, "file") as bench:
        first, second = prepare(bench)
        died = SpeakingEngine(first)
        grant = bench.play(calling(tool), died, at=5)
    with open_bench(tmp_path, "file", is_new=False) as bench:
        heir = SpeakingEngine(second)
        assert bench.play(calling(tool), heir).ticket == grant.ticket
        said = Counter(died.said + heir.said)
        assert said.keys() == SAID and all(said[0, turn] == 1 for turn in range(3))
        assert said.total() <= len(SAID) + 1, "the sibling may have had a turn in flight"
        assert max(tool.effects.values()) == 1
        assert bench.group(grant.ticket).trajectories[0].spans[0].version == first


def test_a_replica_that_dies_as_its_last_turn_is_scored_has_recorded_its_calls(tmp_path: Path):
    tool, scored = CountingTool(is_idempotent=False), []
    chosen = PatternCalls(r"\?(.+)", "calculator", "expression", "!{result}=")

    class Scored(ToolEpisode):
        async def score(self) -> float:
            scored.append(self)
            if len(scored) == 1:
                raise Killed
            return 1.0

    def make(prompt: Any, seed: int) -> Scored:
        return Scored({"calculator": tool}, chosen)

    with open_bench(tmp_path) as bench:
        first, second = prepare(bench)
        episodes = Episodes(make, max_turns=1, is_restorable=True)
        grant = bench.play(episodes, SpeakingEngine(first))
        bench.play(episodes, SpeakingEngine(second))
        assert len(scored) >= 3 and max(tool.effects.values()) == 1
        assert bench.group(grant.ticket).is_whole


def test_records_that_would_be_over_age_begin_anew_as_single_turns_do(tmp_path: Path):
    tool = CountingTool(is_idempotent=True)
    with open_bench(tmp_path, max_lag=0) as bench:
        first, _ = prepare(bench)
        ahead = bench.play(calling(tool), SpeakingEngine(first))
        bench.group(ahead.ticket)
        bench.learner.trained(0)
        third = bench.learner.register_version(1)
        grant = bench.play(calling(tool), SpeakingEngine(third, old_as=first), at=5)
        heir = SpeakingEngine(third)
        again = bench.play(calling(tool), heir)
        assert (again.ticket, again.partial_attempt) == (grant.ticket, 0)
        assert sorted(heir.said) == sorted(SAID), "all of it is sampled by the newest version"


# A replica that has lost its lease


def test_an_attempt_that_has_lost_its_lease_makes_no_further_call(tmp_path: Path):
    """The first call goes out with a fencing token that the tool may refuse; the second never does."""
    with open_bench(tmp_path) as bench:
        first, second = prepare(bench)

        class Slow(CountingTool):
            async def call(self, text: str, key: CallKey) -> str:
                if not self.keys:
                    client = ReplicaClient(bench.address, "rollout.0", 10.0)
                    await client.deregister()  # as after its lease expired
                    client.close()
                return await super().call(text, key)

        tool = Slow(is_idempotent=True)
        bench.play(calling(tool), SpeakingEngine(first))
        assert {key.turn for key in tool.keys} == {0} and bench.counters["groups_lost"] == 1
        before = {str(key): key.fencing_token for key in tool.keys}
        bench.play(calling(tool), SpeakingEngine(second))
        again = {str(key): key.fencing_token for key in tool.keys if key.fencing_token == 2}
        assert set(before.values()) == {1} and set(before) & set(again), "the same key, a newer token"
        assert max(tool.effects.values()) == 1


def test_a_record_without_an_answer_ends_the_attempt():
    async def run() -> None:
        async def fail(*_: object) -> str:
            raise LedgerError("gone")

        journal = TurnJournal(1, 1, fail)
        record = journal.episode(0)
        record.say(completion(), "")
        with pytest.raises(LedgerError, match="gone"):
            await journal.flush()
        with pytest.raises(LeaseLost, match="had no answer"):
            await journal.flush()

    asyncio.run(run())


def completion(version: int = 1, num_tokens: int = 2) -> Completion:
    ids = np.arange(num_tokens, dtype=np.int32)
    return Completion(ids, -ids.astype(np.float32), (Span(version, 0, num_tokens),), "stop")


def test_entries_that_come_while_a_call_is_out_share_the_next_one():
    sent: list[tuple[int, int]] = []

    async def run() -> None:
        async def send(number: int, versions: tuple[int, int], record: bytes) -> str:
            sent.append((number, len(turn_records.decode([record]))))
            await asyncio.sleep(0)
            return "stored"

        journal = TurnJournal(1, 1, send)
        for sample in range(4):
            journal.episode(sample)

        async def turn(sample: int) -> None:
            journal.episode(sample).say(completion(), "")
            await journal.flush()

        await asyncio.gather(*(turn(sample) for sample in range(4)))
        await journal.flush()

    asyncio.run(run())
    assert sent == [(1, 1), (2, 3)]


# Calls of one turn


class Named(CountingTool):
    def __init__(self, name: str, is_idempotent: bool, raises: Exception | None = None) -> None:
        super().__init__(is_idempotent=is_idempotent)
        self.name, self._raises = name, raises

    async def call(self, text: str, key: CallKey) -> str:
        if self._raises is not None:
            raise self._raises
        return await super().call(text, key)


def write_calls(*names: str) -> str:
    blocks = [json.dumps({"name": name, "arguments": {"expression": "2*3"}}) for name in names]
    return "".join(f"<tool_call>{block}</tool_call>" for block in blocks)


def remember() -> tuple[TurnJournal, list[bytes]]:
    records: list[bytes] = []

    async def send(number: int, versions: tuple[int, int], record: bytes) -> str:
        records.append(record)
        return "stored"

    return TurnJournal(1, 1, send), records


async def step(journal: TurnJournal, tools: Sequence[Any], answer: str) -> Step:
    record = journal.episode(0)
    if not record.turns:
        record.say(completion(), "")
        await journal.flush()
    episode = ToolEpisode({tool.name: tool for tool in tools}, JsonCalls())
    episode.calls = Calls(record)
    return await episode.step(answer)


def test_each_result_is_recorded_before_the_next_call_and_served_from_the_record():
    first, second = Named("one", is_idempotent=False), Named("two", is_idempotent=False)
    answer = write_calls("one", "none", "two")

    async def run() -> tuple[Step, Step]:
        journal, records = remember()
        told = await step(journal, [first, second], answer)
        # all but the last record: the second call's result is not known
        again = TurnJournal(1, 2, journal._send, records)
        with pytest.raises(EnvironmentFailed, match=r"call 1\.1\.0\.0\.2 of the tool 'two' was begun"):
            await step(again, [first, second], answer)
        await journal.flush()
        whole = TurnJournal(1, 2, journal._send, records)
        return told, await step(whole, [first, second], answer)

    told, again = asyncio.run(run())
    assert told == again
    assert [one["content"][:5] for one in told.observation] == ["6", "error", "6"]  # type: ignore[index]
    assert [len(first.keys), len(second.keys)] == [1, 1]


def test_a_call_that_used_up_its_turn_ends_it_again_from_the_record():
    slow, other = Named("slow", True, ToolExhausted("too long")), Named("other", is_idempotent=True)

    async def run() -> list[Step]:
        journal, records = remember()
        told = await step(journal, [slow, other], write_calls("slow", "other"))
        await journal.flush()
        slow._raises = ToolRefused("never asked")
        return [
            told,
            await step(
                TurnJournal(1, 2, journal._send, records), [slow, other], write_calls("slow", "other")
            ),
        ]

    told, again = asyncio.run(run())
    assert told == again and other.keys == []


def test_a_buffer_without_room_fails_only_calls_that_must_not_be_made_twice(tmp_path: Path):
    idempotent, other = Named("one", is_idempotent=True), Named("two", is_idempotent=False)

    async def full(*_: object) -> str:
        return "full"

    async def run() -> None:
        journal = TurnJournal(1, 1, full)
        with pytest.raises(
            EnvironmentFailed, match="cannot be recorded, and the tool is not idempotent"
        ) as found:
            await step(journal, [idempotent, other], write_calls("one", "two"))
        assert journal.is_full
        assert "buffer.memory_bytes" in found.value.hint

    asyncio.run(run())
    assert (len(idempotent.keys), len(other.keys)) == (1, 0)


def test_a_session_beyond_a_group_s_bytes_goes_on_unrecorded(tmp_path: Path):
    """The limit of a ticket's records is the largest group: 2 samples of 64 tokens here."""
    tool = CountingTool(is_idempotent=True)

    class Verbose(ToolEpisode):
        async def step(self, answer: str) -> Step:
            told = await super().step(answer)
            return told if told.is_done else Step([{"role": "user", "content": "!1=", "note": "x" * 3000}])

    chosen = PatternCalls(r"\?(.+)", "calculator", "expression", "!{result}=")
    episodes = Episodes(lambda prompt, seed: Verbose({"calculator": tool}, chosen), is_restorable=True)
    with open_bench(tmp_path) as bench:
        first, _ = prepare(bench)
        grant = bench.play(episodes, SpeakingEngine(first))
        assert bench.counters["turns/full"] == 1 and bench.counters["turns/stored"] >= 1
        assert bench.group(grant.ticket).is_whole


# Secrets


@pytest.mark.parametrize("is_raised", [True, False], ids=["raised", "refused"])
def test_what_a_call_holds_reaches_no_log_and_no_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_raised: bool
):
    secret = "31337"
    caplog.set_level(logging.DEBUG)

    class Leaking(CountingTool):
        async def call(self, text: str, key: CallKey) -> str:
            raise (ValueError if is_raised else ToolRefused)(f"cannot compute {text}")

    with open_bench(tmp_path, "file") as bench:
        first, _ = prepare(bench)
        tool = Leaking(is_idempotent=False)
        bench.play(calling(tool), SpeakingEngine(first, [f"?{secret}", "1"]))
        told = f"{bench.learner.status()} {caplog.text}"
    failed = "raised ValueError at test_going_on.py" in caplog.text
    assert failed == is_raised
    assert secret not in told
    database = (tmp_path / "run" / "buffer" / "events.sqlite").read_bytes()
    assert secret.encode() not in database, "the events name no content"


# Environments of users


class Told(Environment):
    """Says the number of its step."""

    made: list[int] = []

    def __init__(self, prompt: Any, seed: int):
        self.num_steps, self.restored = 0, 0
        self.made.append(seed)

    async def step(self, answer: str) -> Step:
        self.num_steps += 1
        return Step(f"!{self.num_steps}=", is_done=self.num_steps == 3)

    async def score(self) -> float:
        return 10.0 * self.num_steps + self.restored


class Replayed(Told):
    is_deterministic = True


class Restored(Told):
    async def restore(self, turns: Sequence[tuple[str, Step]]) -> None:
        self.restored = len(turns)
        self.num_steps = len(turns)


class Random(Told):
    """Claims to be deterministic, and is not."""

    is_deterministic = True

    async def step(self, answer: str) -> Step:
        told = await super().step(answer)
        return told if told.is_done else Step(f"!{len(self.made)}=")


@pytest.mark.parametrize(
    ("cls", "reward", "num_said"), [(Replayed, 30.0, 6), (Restored, 32.0, 6), (Random, 30.0, 8)]
)
def test_an_environment_goes_on_as_it_says_it_can(
    tmp_path: Path, cls: type[Told], reward: float, num_said: int
):
    cls.made = []
    episodes = Episodes(cls, is_restorable=is_restorable(cls))
    with open_bench(tmp_path) as bench:
        first, second = prepare(bench)
        died, heir = SpeakingEngine(first, ["1", "2", "3"]), SpeakingEngine(second, ["1", "2", "3"])
        grant = bench.play(episodes, died, at=4)
        bench.play(episodes, heir)
        group = bench.group(grant.ticket)
        assert group.trajectories[0].reward == reward
        assert len(died.said + heir.said) >= num_said
        num_of_first = sum(
            span.end - span.start for span in group.trajectories[0].spans if span.version == first
        )
        assert (num_of_first > 0) == (cls is not Random), "what cannot be restored begins anew"


def test_an_environment_that_declares_nothing_is_not_recorded(tmp_path: Path):
    (tmp_path / "told.py").write_text(
        "from rollout_service.environments import Environment, Step\n"
        "class Told(Environment):\n"
        "    async def step(self, answer):\n"
        "        return Step('1')\n"
        "class Sure(Told):\n"
        "    is_deterministic = True\n"
        "class Own(Told):\n"
        "    async def restore(self, turns):\n"
        "        pass\n"
    )
    found = {name: load(f"told.py:{name}", tmp_path).is_restorable for name in ("Told", "Sure", "Own")}
    assert found == {"Told": False, "Sure": True, "Own": True}
    assert load({"name": "tools"}).is_restorable


def test_without_the_journal_an_episode_begins_anew(tmp_path: Path):
    tool = CountingTool(is_idempotent=True)
    settings = ReplicaSettings(4, 60.0, 10.0)
    with open_bench(tmp_path) as bench:
        first, second = prepare(bench)
        bench.play(calling(tool), SpeakingEngine(first), at=7, settings=settings)
        heir = SpeakingEngine(second)
        bench.play(calling(tool), heir, settings=settings)
        assert sorted(heir.said) == sorted(SAID)
        assert {key.attempt for key in tool.keys} == {1, 2}, "another attempt's turns are other calls"


# Records


def test_a_replica_with_older_weights_waits_for_the_version_of_the_record(monkeypatch: pytest.MonkeyPatch):
    class Engine:
        @property
        def serving(self) -> Any:
            asked.append(1)
            return type("Version", (), {"number": len(asked)})

    asked: list[int] = []
    monkeypatch.setattr("rollout_service.environments.turns.LOOK_EVERY_S", 0.0)
    record = EpisodeRecord((1, 2, 0), None)
    record.say(completion(version=3), "")
    turns = Turns(Engine(), None, None, "1.2.0", record)  # type: ignore[arg-type]
    asyncio.run(turns.take_up(""))
    assert len(asked) == 3
    monkeypatch.setattr("rollout_service.environments.turns.VERSION_DEADLINE_S", 0.0)
    record.say(completion(version=99), "")
    with pytest.raises(EnvironmentFailed, match="version 99, which sampled a part of it, is not served"):
        asyncio.run(turns.take_up(""))
    with pytest.raises(EnvironmentFailed, match="its first observation is another one"):
        asyncio.run(turns.take_up("!1="))


@pytest.mark.parametrize("is_idempotent", [True, False], ids=["idempotent", "not idempotent"])
def test_an_episode_that_cannot_go_on_begins_anew_unless_its_calls_must_not_be_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_idempotent: bool
):
    monkeypatch.setattr("rollout_service.environments.turns.VERSION_DEADLINE_S", 0.0)
    tool = CountingTool(is_idempotent=is_idempotent)
    with open_bench(tmp_path) as bench:
        first, second = prepare(bench)
        grant = bench.play(calling(tool), SpeakingEngine(second), at=5)
        heir = SpeakingEngine(first)
        bench.play(calling(tool), heir)
        failed = [name for name in bench.learner.status().counters if name.startswith("failed/")]
        if is_idempotent:
            assert failed == [] and sorted(heir.said) == sorted(SAID)
            assert bench.group(grant.ticket).trajectories[0].spans[0].version == first
        else:
            assert [name[:41] for name in failed] == ["failed/NotRestored: version 2, which sampl"[:41]]
            assert max(tool.effects.values()) == 1


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff",
        b"\x80",
        turn_records.join([b"\x93\xa4said\x00\x00"]),
        turn_records.join([turn_records.encode(turn_records.Said(0, 0, 1, b"123", b"", (), "stop"))]),
        turn_records.join([turn_records.encode(turn_records.Said(0, 0, 1, b"1234", b"1234", (), "stop"))]),
        turn_records.join(
            [turn_records.encode(turn_records.Said(0, 0, 1, b"1234", b"1234", ((1, 1, 1),), "stop"))]
        ),
    ],
)
def test_records_that_cannot_be_read_begin_anew(record: bytes, caplog: pytest.LogCaptureFixture):
    async def send(*_: object) -> str:
        raise AssertionError("nothing is sent")

    good = turn_records.encode(turn_records.said(0, 0, 1, completion(), ""))
    journal = TurnJournal(1, 2, send, [turn_records.join([good]), record])
    assert journal.episode(0).turns == [] and "ticket 1 begins anew" in caplog.text


def test_an_observation_that_cannot_be_written_fails_its_episode():
    journal, _ = remember()
    record = journal.episode(0)
    record.say(completion(), "")
    with pytest.raises(EnvironmentFailed, match="an observation cannot be recorded: TypeError"):
        record.step(Step([{"role": "user", "content": object()}]))  # type: ignore[dict-item]


def test_entries_that_do_not_follow_are_left_out():
    turns: list[turn_records.Turn] = []
    for entry in (
        turn_records.Answered(0, 0, 0, "no turn yet"),
        turn_records.said(0, 0, 1, completion(), ""),
        turn_records.said(0, 2, 1, completion(), ""),
        turn_records.Stepped(0, 0, "!1=", False),
        turn_records.said(0, 1, 1, completion(), ""),
        turn_records.Stepped(0, 0, "late", True),
    ):
        turn_records.add(turns, entry)
    assert len(turns) == 2 and turns[0].step == Step("!1=") and turns[1].step is None
    turn_records.add(turns, turn_records.said(0, 0, 2, completion(), ""))
    assert [(turn.attempt, turn.step) for turn in turns] == [(2, None)], "said anew, it takes all their place"
