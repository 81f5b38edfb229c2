"""The real vLLM loads what its workers hold themselves: no bit differs from a load of the whole file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.core.errors import EngineError
from asyncrl.core.runtime.faults import VARIABLE
from asyncrl.core.sockets.keys import make_run_keys
from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.protocol import Completion, Sampling
from rollout_service.engine.vllm import engine as vllm_engine
from rollout_service.engine.vllm.engine import VllmEngine
from tests.different import assert_all_differ
from tests.rollout.engine.engine_parts import LoopThread, probe_of, stage
from tests.rollout.engine.families import WIDTHS, Form, start_engine
from weight_sync.direct.seat import DeskAddress
from weight_sync.direct.stage import Stages
from weight_sync.memory.staging import Staged
from weight_sync.rectangles.rectangle import Rectangle

if TYPE_CHECKING:
    from rollout_service.engine.vllm.worker_seat import WorkerSeat

TIED, UNTIED = Form("qwen3", is_tied=True, vocab_size=131), Form("llama", False, 87, WIDTHS[3])
CASES = [
    (TIED, 1),
    *(pytest.param(form, tp, marks=pytest.mark.long) for form, tp in ((UNTIED, 1), (TIED, 2), (UNTIED, 2))),
]
DOOMED, HALF = 500, 12
"""The load of this version fails at this one of its tensors, on the last worker."""
EXTENSION = "tests.weight_sync.direct.engine.filled_stages.FilledStages"
KEYS = make_run_keys().client
DESK = DeskAddress("tcp://127.0.0.1:9", KEYS)
"""Nobody answers there."""


@dataclass
class Served:
    engine: VllmEngine
    loop: LoopThread
    num_workers: int

    def ask(self, method: str, *args: object) -> list[Any]:
        """Return what each worker answers."""
        call = self.engine.client.collective_rpc(method, args=args)  # type: ignore[call-arg]
        answers: list[Any] = self.loop.call(call)
        assert len(answers) == self.num_workers
        return answers

    def load(self, staged: Staged) -> Completion:
        """Load and sample."""
        self.loop.call(self.engine.swap(staged))
        assert self.engine.serving == staged.version
        sampling = Sampling(1.0, 24, seed=3, ignores_eos=True)
        found: Completion = self.loop.call(self.engine.generate([5, 60, 33, 86, 17, 2], sampling, "r"))
        return found

    def load_whole(self, number: int, model: PreTrainedModel, desk: DeskAddress | None = None) -> Completion:
        with stage(model, PolicyVersion(number, number), probe_of(model)) as staged:
            return self.load(replace(staged, desk=desk))

    def hand_over(self, number: int, model: PreTrainedModel) -> Staged:
        """Bring the version to the workers' stages, and return it without its file."""
        with stage(model, PolicyVersion(number, number), probe_of(model)) as staged:
            num_bytes = self.ask("fill_stage", staged.path, staged.manifest.to_bytes())
        share = staged.manifest.total_bytes / self.num_workers
        assert max(num_bytes) < 1.5 * share, "it is a worker's own share"
        return replace(staged, path="")

    def fail_to_load(self, staged: Staged, reason: str) -> None:
        with pytest.raises(EngineError, match=reason):
            self.loop.call(self.engine.swap(staged))
        assert not self.engine.is_loaded


@contextmanager
def opened(form: Form, num_workers: int, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Served]:
    patch.setattr(vllm_engine, "WORKER_EXTENSION", EXTENSION)
    patch.setenv(VARIABLE, f"engine.load@{DOOMED}.{HALF}.{num_workers - 1}")
    loop = LoopThread()
    engine = start_engine(form.build(0), folder, loop, workers=num_workers)
    try:
        yield Served(engine, loop, num_workers)
    finally:
        loop.call(engine.shutdown())
        loop.close()


def assert_equal(found: Completion, wanted: Completion) -> None:
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.logprobs.tobytes() == wanted.logprobs.tobytes()


@pytest.mark.parametrize(("form", "num_workers"), CASES, ids=str)
def test_a_version_from_the_workers_stages_is_served_to_the_bit(
    form: Form, num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = models = [form.build(seed) for seed in (1, 2, 3)]
    assert_all_differ(models, in_every_tensor=True)
    with opened(form, num_workers, tmp_path / "model", monkeypatch) as served:
        served.load_whole(1, first)
        assert served.ask("describe_seat") == [None] * num_workers
        wanted = served.load_whole(2, second, DESK)
        described = [DESK.address, KEYS.public, KEYS.secret, KEYS.server]
        places = [[*described, rank, num_workers] for rank in range(num_workers)]
        assert served.ask("describe_seat") == places
        other = served.load_whole(3, third)
        assert not np.array_equal(other.logprobs, wanted.logprobs)

        assert_equal(served.load(served.hand_over(4, second)), wanted)
        assert_equal(served.load(served.hand_over(5, third)), other)

        with stage(first, PolicyVersion(6, 6)) as staged:
            served.fail_to_load(replace(staged, path=""), "SyncError: version 6 is not on this worker")
        assert_equal(served.load_whole(7, second), wanted)

        served.fail_to_load(served.hand_over(DOOMED, first), f"told to fail at tensor {HALF}")
        assert_equal(served.load(served.hand_over(DOOMED + 1, third)), other)


class ScriptedSeat:
    """A seat without a thread: the real one would ask after its test has ended."""

    def __init__(self, runtime: object, desk: DeskAddress, index: int, count: int, party: Stages) -> None:
        assert (index, count) == (1, 2) and party.regions
        self.desk, self.is_asking = desk, False

    def start(self) -> None:
        self.is_asking = True

    def close(self) -> None:
        self.is_asking = False


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch) -> WorkerSeat:
    from rollout_service.engine.vllm import worker_seat  # vLLM, which collecting need not import

    monkeypatch.setattr(worker_seat, "get_world_group", lambda: SimpleNamespace(rank=1, world_size=2))
    monkeypatch.setattr(worker_seat, "Seat", ScriptedSeat)
    return worker_seat.WorkerSeat()


def test_a_load_that_breaks_takes_no_seat_and_the_next_one_does(seat: WorkerSeat) -> None:
    w = torch.ones(4, 6)
    with pytest.raises(RuntimeError, match="size"), seat.taken_after(DESK, [("w", w)]):
        w[:2].clone().view(5)
    assert seat._seat is None and not seat.stages.regions
    with seat.taken_after(DESK, [("w", w)]):
        w[2:].clone()
    assert isinstance(seat._seat, ScriptedSeat) and seat._seat.is_asking
    assert seat.stages.regions == [("w", Rectangle((2, 0), (4, 6)))]


def test_a_seat_moves_with_its_desk_and_what_was_recorded_and_received_stays(seat: WorkerSeat) -> None:
    w = torch.ones(4, 6)
    with seat.taken_after(DESK, [("w", w)]):
        w[2:].clone()
    first, stages = seat._seat, seat.stages
    assert isinstance(first, ScriptedSeat)
    for desk in (DESK, None):
        with seat.taken_after(desk, [("w", w)]):
            w.clone()
        assert seat._seat is first and first.is_asking
    other = replace(DESK, address="tcp://127.0.0.1:10")
    with seat.taken_after(other, iter(())):
        w.clone()
    second = seat._seat
    assert isinstance(second, ScriptedSeat) and second.desk == other
    assert second.is_asking and not first.is_asking
    assert seat.stages is stages


def test_a_loader_that_writes_into_the_checkpoint_loads_but_gets_no_seat(
    seat: WorkerSeat, caplog: pytest.LogCaptureFixture
) -> None:
    w = torch.ones(4, 6)
    for _ in range(2):
        with seat.taken_after(DESK, [("w", w)]):
            w.mul_(2)
    assert seat._seat is None
    assert caplog.text.count("receives nothing directly: the loader writes into 'w'") == 1
