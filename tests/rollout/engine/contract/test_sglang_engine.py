"""The real SGLang on CPU with a tiny model, in its own environment: the contract of vLLM's engine.

`make setup LIST=sglang` makes that environment; without it these tests are skipped, and say so.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import Qwen3ForCausalLM

from asyncrl.core.errors import EngineError
from asyncrl.core.runtime.faults import VARIABLE
from asyncrl.core.staleness import PolicyVersion, Span
from rollout_service.engine.protocol import Completion, EngineDied, Interrupted, Sampling
from rollout_service.engine.sglang.child.__main__ import SHARED
from rollout_service.engine.sglang.engine import SglangEngine, SglangSettings
from rollout_service.engine.sglang.messages import Abort, Done, Generate, Pause, Resume
from rollout_service.engine.sglang.process import PYTHON
from rollout_service.engine.sglang.variant import VARIANT
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
from tests.rollout.engine.contract.engine_contract import *  # noqa: F403
from tests.rollout.engine.contract.engine_contract import DOOMED, HALF, PROMPT, Running, generate_at
from tests.rollout.engine.engine_parts import LoopThread, make_model, save_model, stage

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="SGLang is not there: make setup LIST=sglang"),
]
PAUSE_S, LONG_S = 60.0, 2.0
"""Deadline of a pause; far longer than one token takes on a busy machine."""
PROMPT_IDS = np.asarray(PROMPT, np.int32).tobytes()


class RunningSglang(Running):
    engine: SglangEngine

    async def is_paused(self) -> bool:
        request = asyncio.create_task(self.sample(78, 1))
        done, _ = await asyncio.wait([request], timeout=LONG_S)
        request.cancel()
        return not done

    async def resume(self) -> None:
        await self.engine._child.ask(Resume(self.engine._child.new_number()), "the resumption", PAUSE_S)

    async def pause(self) -> None:
        await self.engine._child.ask(Pause(self.engine._child.new_number(), False), "the pause", PAUSE_S)

    async def until_under_way(self, most: int) -> None:
        """Requests are prefilled in their order: those before this one have tokens when it has."""
        while len(self.engine._running) <= most:
            await asyncio.sleep(0)
        await self.engine.generate(PROMPT, Sampling(2.0, 20, 0, ignores_eos=True), "last")

    def num_unfinished(self) -> int:
        return len(self.engine._running)

    def check_half_loaded(self, models: list[Qwen3ForCausalLM]) -> None:
        """Its parameters are NaN, from which nothing can be sampled: nobody looks into it."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = make_model(0)
    folder: Path = save_model(model, tmp_path_factory.mktemp("model"))
    loop = LoopThread()
    settings = SglangSettings(str(folder), "float32", 1024, 64, 64 << 20, has_stops=True, engine_args=OWN)
    engine = SglangEngine(settings, build_tokenizer())
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(VARIABLE, f"engine.load@{DOOMED}.{HALF}")
            loop.call(engine.start(), 600.0)
        yield RunningSglang(loop, engine, {0: model}, VARIANT.logprob_tolerance)
    finally:
        loop.call(engine.shutdown())
        loop.close()


OWN = {"decode_log_interval": 41}


def test_the_child_has_a_session_of_its_own_with_all_of_its_processes(running: Running):
    child, *others = running.engine.child_pids()
    assert os.getsid(child) == child != os.getsid(0)
    assert others and {os.getsid(pid) for pid in others} == {child}


def test_a_request_that_comes_and_ends_while_the_engine_is_paused_has_no_token(running: Running):
    """SGLang holds it back, and would not answer its abort."""

    async def come_and_end() -> Any:
        await running.pause()
        request = asyncio.create_task(running.sample(5))
        await asyncio.wait([request], timeout=0.3)
        await running.engine.interrupt()
        outcome = await asyncio.gather(request, return_exceptions=True)
        await running.resume()
        return outcome[0]

    error = running.loop.call(come_and_end())
    assert type(error).__name__ == "Interrupted" and error.completion.spans == ()
    running.check_logprobs(running.generate(5))


def test_a_drain_in_a_pause_keeps_all_tokens_of_the_requests_that_were_retracted(running: Running):
    async def drain() -> list[Completion]:
        tasks = []
        for seed in range(6):  # at different lengths
            ask = running.engine.generate(PROMPT, Sampling(2.0, 900, seed, ignores_eos=True), f"d{seed}")
            tasks.append(asyncio.create_task(ask))
            await running.sample(501, 2)
        await running.pause()
        await running.engine.interrupt()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await running.resume()
        return [one.completion for one in ended if isinstance(one, Interrupted)]

    beginnings = running.loop.call(drain())
    lengths = [len(one.token_ids) for one in beginnings]
    assert len(lengths) == 6 and lengths == sorted(lengths, reverse=True)
    assert lengths[-1] > 0 and len(set(lengths)) == 6, lengths
    for one in beginnings:
        running.check_logprobs(one, 2.0)


def test_an_abort_ends_no_request_whose_number_begins_with_its_own(running: Running):
    running.engine._child._numbers = itertools.chain([7_000], itertools.count(70_000))

    async def abort_one() -> list[Any]:
        calls = [running.engine.generate(PROMPT, Sampling(2.0, 60, i, True), f"p{i}") for i in range(40)]
        tasks = [asyncio.create_task(call) for call in calls]
        await running.until_under_way(39)
        assert {7_000, 70_000} <= running.engine._running
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = running.loop.call(abort_one())
    assert isinstance(results[0], asyncio.CancelledError)
    assert [len(one.token_ids) for one in results[1:]] == [60] * 39


def test_an_abort_that_is_read_in_the_turn_of_its_request_ends_it(running: Running):
    child = running.engine._child

    async def ask_and_abort() -> Any:
        os.kill(child.pid, signal.SIGSTOP)  # it finds both in one read
        try:
            ask = Generate(child.new_number(), PROMPT_IDS, 2.0, 900, 0, True, [], [])
            answer = asyncio.create_task(child.ask(ask, "an aborted request"))
            while ask.number not in child._asked:
                await asyncio.sleep(0)
            child.tell(Abort(child.new_number(), [ask.number]))
        finally:
            os.kill(child.pid, signal.SIGCONT)
        return await answer

    answer = running.loop.call(ask_and_abort())
    assert (answer.finish_reason, answer.token_ids) == ("abort", b"")
    running.check_logprobs(running.generate(5))


def test_a_pause_that_outlasts_its_deadline_is_taken_back(running: Running, monkeypatch: pytest.MonkeyPatch):
    served, child = running.swap(12), running.engine._child
    ask = child.ask

    async def ask_late(message: Any, *rest: Any) -> Any:
        answer = await ask(message, *rest)
        if isinstance(message, Pause):
            assert isinstance(answer, Done)
            raise EngineError("SGLang did not finish the pause within 60 s")
        return answer

    with monkeypatch.context() as late, stage(make_model(2), PolicyVersion(served + 1, served)) as staged:
        late.setattr(child, "ask", ask_late)
        with pytest.raises(EngineError, match="did not finish the pause"):
            running.loop.call(running.engine.swap(staged))
    assert running.engine.is_loaded
    running.check_logprobs(generate_at(running, served))


def test_with_the_cache_kept_the_spans_change_and_what_follows_is_another_distribution(running: Running):
    """`kv_cache: keep`: a hybrid policy. The label is right from the boundary on."""
    old, settings = running.swap(11), running.engine._settings
    running.models[old + 1] = make_model(2)

    async def swap_in_flight(staged: Any) -> Any:
        request = asyncio.create_task(
            running.engine.generate(PROMPT, Sampling(2.0, 300, 3, ignores_eos=True), "kept")
        )
        await running.engine.generate(PROMPT, Sampling(2.0, 20, 4, ignores_eos=True), "tick")
        await running.engine.swap(staged)
        return await request

    object.__setattr__(settings, "recomputes_kv_cache", False)
    try:
        with stage(running.models[old + 1], PolicyVersion(old + 1, old)) as staged:
            completion = running.loop.call(swap_in_flight(staged))
    finally:
        object.__setattr__(settings, "recomputes_kv_cache", True)
    first, second = completion.spans
    assert (first, second) == (Span(old, 0, first.end), Span(old + 1, first.end, 300))
    with pytest.raises(AssertionError):
        running.check_logprobs(completion, 2.0)
    running.check_logprobs(generate_at(running, old + 1))


def test_a_killed_scheduler_ends_the_requests_and_the_whole_session(running: Running):
    """Last, as the engine is gone after it."""

    async def kill() -> list[Any]:
        sampling = [Sampling(2.0, 900, seed, ignores_eos=True) for seed in range(4)]
        tasks = [
            asyncio.create_task(running.engine.generate(PROMPT, one, f"k{one.seed}")) for one in sampling
        ]
        await running.until_under_way(3)
        (scheduler,) = [
            pid for pid in running.engine.child_pids() if "scheduler" in psutil.Process(pid).cmdline()[0]
        ]
        os.kill(scheduler, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = running.loop.call(kill())
    assert all(isinstance(result, EngineDied) for result in results), results
    _gone, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in running.engine.child_pids() if psutil.pid_exists(pid)], 20.0
    )
    assert not alive
    with pytest.raises(EngineDied):
        running.generate(1)


def test_an_engine_that_is_shut_down_leaves_nothing_in_shared_memory(tmp_path: Path):
    def mapped_by(pids: list[int]) -> set[str]:
        """Others make semaphores meanwhile: those that these processes map count."""
        lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        inodes = {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
        entries = [entry for entry in os.scandir("/dev/shm") if SHARED.match(entry.name)]
        return {entry.name for entry in entries if entry.inode() in inodes}

    async def start_and_shut_down() -> set[str]:
        settings = SglangSettings(str(save_model(make_model(0), tmp_path)), "float32", 1024, 4, 64 << 20)
        engine = SglangEngine(settings, build_tokenizer())
        try:
            await engine.start()
            return mapped_by(engine.child_pids())
        finally:
            await engine.shutdown()

    made = asyncio.run(start_and_shut_down())
    assert {name[:3] for name in made} == {"sem", "sgl"}
    assert not made & set(os.listdir("/dev/shm"))
