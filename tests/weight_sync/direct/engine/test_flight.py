"""The real vLLM with requests in flight through many versions that its workers hold themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollout_service.engine.vllm import engine as vllm_engine
from rollout_service.engine.vllm.engine import VllmEngine
from tests.rollout.engine.engine_parts import LoopThread, make_model, save_model
from tests.rollout.replica.flight_parts import Flight, settings_for
from tests.weight_sync.direct.engine.test_worker_loads import DESK, EXTENSION
from weight_sync.memory.staging import Staged

NUM_DIRECT = 20


class DirectEngine(VllmEngine):
    """Loads its first version from a file, and each later one from the stages of its workers."""

    num_direct = 0

    async def swap(self, staged: Staged) -> None:
        if staged.version.number == 1:
            await super().swap(replace(staged, desk=DESK))
            return
        asked = (staged.path, staged.manifest.to_bytes())
        assert all(await self.client.collective_rpc("fill_stage", args=asked))
        await super().swap(replace(staged, path=""))
        self.num_direct += 1


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_token_in_flight_through_twenty_direct_versions_is_of_the_version_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """Log-probs are compared with those of Hugging Face's model of that version."""
    monkeypatch.setattr(vllm_engine, "WORKER_EXTENSION", EXTENSION)
    model, loop = make_model(0), LoopThread()
    engine = DirectEngine(settings_for(str(save_model(model, tmp_path)), cpu_workers=num_workers))
    try:
        loop.call(engine.start(), 280.0)
        flight = Flight(engine, {0: model})
        loop.call(flight.through(1 + NUM_DIRECT), 500.0)
    finally:
        loop.call(engine.shutdown())
        loop.close()
    assert engine.num_direct == NUM_DIRECT
    flight.check_spans()
    assert flight.check_logprobs() > 5000
    assert sorted(flight.greedy) == list(range(2 + NUM_DIRECT))
    flight.check_greedy()
