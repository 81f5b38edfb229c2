"""Control calls whose vLLM engine core dies under them. A scripted client stands for vLLM's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_service.engine.protocol import EngineDied
from rollout_service.engine.vllm import engine as vllm_engine
from rollout_service.engine.vllm.engine import VllmEngine
from tests.rollout.replica.flight_parts import settings_for


def engine_on(client: Any) -> VllmEngine:
    engine = VllmEngine(settings_for("no folder"))
    engine._llm = client
    return engine


def test_a_control_call_that_vllm_never_answers_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_engine, "CONTROL_DEADLINE_S", 5.0)
    monkeypatch.setattr(vllm_engine, "DEATH_WATCH_S", 0.01)
    client, cancelled = SimpleNamespace(errored=False), []

    async def never() -> None:
        client.errored = True  # the core dies while the call is under way
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def call() -> None:
        with pytest.raises(EngineDied, match="died at the pause"):
            await engine_on(client)._control(never(), "the pause")
        await asyncio.sleep(0)
        assert cancelled, "nothing is left under way"

    asyncio.run(call())


def test_an_answer_that_came_before_the_death_counts():
    async def answer() -> int:
        return 7

    found = asyncio.run(engine_on(SimpleNamespace(errored=True))._control(answer(), "the load"))
    assert found == 7
