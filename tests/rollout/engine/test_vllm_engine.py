"""The real vLLM on CPU with a tiny model, against Hugging Face."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import Qwen3ForCausalLM

from asyncrl.core.errors import ConfigError, EngineError
from asyncrl.core.runtime.faults import VARIABLE
from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.vllm import engine as vllm_engine
from rollout_service.engine.vllm.core.gauges import CacheGauges
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings, _start_async_llm
from tests.rollout.engine.contract.engine_contract import *  # noqa: F403
from tests.rollout.engine.contract.engine_contract import DOOMED, HALF, Running, generate_at
from tests.rollout.engine.engine_parts import (
    LoopThread,
    make_model,
    save_model,
    stage,
)
from tests.rollout.replica.flight_parts import until_under_way

TOLERANCE = 1e-4
OWN = {"max_num_batched_tokens": 9000}


class RunningVllm(Running):
    engine: VllmEngine

    async def is_paused(self) -> bool:
        assert await self.engine._llm.get_weight_version() == str(self.engine.serving.number)
        return await self.engine._llm.is_paused()

    async def resume(self) -> None:
        await self.engine._llm.resume_generation()

    async def pause(self) -> None:
        await self.engine._llm.pause_generation(mode="keep", clear_cache=True)

    async def until_under_way(self, most: int) -> None:
        await until_under_way(self.engine, most)

    def num_unfinished(self) -> int:
        return self.engine._llm.get_num_unfinished_requests()

    def check_half_loaded(self, models: list[Qwen3ForCausalLM]) -> None:
        mixed = self.peek()
        assert min(self.distance(mixed, model) for model in models) > 0.1


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = make_model(0)
    folder: Path = save_model(model, tmp_path_factory.mktemp("model"))
    loop = LoopThread()
    settings = VllmSettings(str(folder), "float32", 1024, 64, 64 << 20, engine_args=OWN)
    engine = VllmEngine(settings)
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(VARIABLE, f"engine.load@{DOOMED}.{HALF}")
            loop.call(engine.start(), 240.0)
        yield RunningVllm(loop, engine, {0: model}, TOLERANCE)
    finally:
        loop.call(engine.shutdown())
        loop.close()


def test_arguments_of_the_engines_own_reach_it(running: Running):
    assert running.engine.client.vllm_config.scheduler_config.max_num_batched_tokens == 9000


def test_an_argument_that_vllm_does_not_have_is_a_config_error_that_names_those_near_it():
    settings = VllmSettings("m", "float32", 8, 1, 1 << 20, engine_args={"max_num_batched_token": 1})
    with pytest.raises(ConfigError, match="has no max_num_batched_token") as found:
        _start_async_llm(settings, CacheGauges())
    assert "max_num_batched_tokens" in found.value.hint


def test_a_load_that_outlasted_its_deadline_does_not_bar_the_next_one(running: Running):
    running.loop.call(running.engine._llm.start_weight_update())
    running.engine._has_open_update = True  # as a deadline leaves it
    running.check_logprobs(generate_at(running, running.swap(8)))


def test_an_engine_that_did_not_resume_counts_as_not_loaded(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    async def refuse() -> None:
        raise RuntimeError("not now")

    number = max(running.models) + 1
    with monkeypatch.context() as vllm:
        vllm.setattr(running.engine._llm, "resume_generation", refuse)
        with pytest.raises(EngineError, match="vLLM refused the resumption: RuntimeError: not now"):
            running.swap(9)
    assert running.engine.serving.number == number and not running.engine.is_loaded
    running.check_logprobs(generate_at(running, running.swap(6)))
    assert running.engine.is_loaded


def test_a_core_that_ends_while_it_is_killed_makes_no_error_of_the_shutdown():
    class EndingLlm:
        def shutdown(self, timeout: float) -> None:
            raise psutil.NoSuchProcess(1)

    engine = VllmEngine(VllmSettings("nowhere", "float32", 16, 1, 1 << 20))
    engine._llm = EndingLlm()
    asyncio.run(engine.shutdown())


def test_a_pause_that_outlasts_its_deadline_is_taken_back(running: Running, monkeypatch: pytest.MonkeyPatch):
    served, llm = running.swap(1), running.engine._llm
    pause = llm.pause_generation

    async def pause_late(**options: Any) -> None:
        await pause(**options)
        raise TimeoutError

    with (
        monkeypatch.context() as late,
        stage(make_model(2), PolicyVersion(served + 1, served)) as staged,
    ):
        late.setattr(llm, "pause_generation", pause_late)
        with pytest.raises(EngineError, match="did not finish the pause"):
            running.loop.call(running.engine.swap(staged))
    assert not running.loop.call(llm.is_paused())
    assert running.engine.is_loaded
    running.check_logprobs(generate_at(running, served))


class SlowClient:
    """A vLLM whose load takes a fifth of a second; it answers all else at once."""

    errored = False

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, update: object) -> None:
        await asyncio.sleep(0.2)

    async def collective_rpc(self, method: str) -> list[tuple[str, None]]:
        return [("", None)]

    async def finish_weight_update(self) -> None: ...


@pytest.mark.parametrize(("num_bytes", "is_loaded"), [(10_000, True), (0, False)])
def test_a_load_has_time_for_its_bytes(
    num_bytes: int, is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "CONTROL_DEADLINE_S", 0.05)
    monkeypatch.setattr(vllm_engine, "LOAD_BYTES_PER_S", 1000.0)
    engine: Any = VllmEngine(VllmSettings("nowhere", "float32", 16, 1, 1 << 20))
    engine._llm = SlowClient()
    load = engine._load_on_all(3, object(), num_bytes)
    in_time = nullcontext() if is_loaded else pytest.raises(EngineError, match=r"version 3 within 0\.05 s")
    with in_time:
        asyncio.run(load)
