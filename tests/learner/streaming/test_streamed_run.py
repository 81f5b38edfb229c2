"""A learner that streams: real buffer, publisher and Megatron backend, groups that finish one by one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.buffer.ledger.events import Reserved, Trained
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service_command import Pause, Unpause, WriteCheckpoint
from tests.learner.guard.guarded_run import (
    Faults,
    Run,
    check_no_group_was_trained_at_two_steps_of_one_lineage,
    running,
)
from tests.learner.streaming.feeding import Feeding
from tests.weight_sync.cluster import running_cluster

SIZE, STEPS = 3, 4


class Killed(Exception):
    """Stands for the end of the process: nothing of the step in progress is told to anybody."""


def nothing(run: Run, step: int, num_groups: int) -> None:
    """Interrupt nothing."""


def live(
    model: Path,
    cluster: Any,
    folder: Path,
    interrupt: Callable[[Run, int, int], None] = nothing,
    stop: threading.Event | None = None,
    **learner: Any,
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[Any]]:
    """Run a learner on what is in `folder`; return its rows, its last weights and the journal."""
    feeding = Feeding(SIZE, interrupt)
    faults = Faults(wrap=feeding.over)
    sections = {"groups_per_step": SIZE, "steps": STEPS, **learner}
    with running(model, cluster, folder, faults, {}, learner=sections) as run:
        feeding.run = run
        run.learner.run(stop or ThreadEvent())
        status, rows = run.status(), run.rows()
        assert status.residue == 0
        weights = folder / "weights" / "model.safetensors"
        found = load_file(weights) if weights.exists() else {}
    return rows, found, run.events()  # the journal is closed


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


def interrupt_at(step: int, num_groups: int, act: Callable[[Run], None]) -> Callable[[Run, int, int], None]:
    def interrupt(run: Run, at: int, num_taken: int) -> None:
        if (at, num_taken) == (step, num_groups):
            act(run)

    return interrupt


@pytest.fixture(scope="module")
def streamed(model, tmp_path_factory):
    with running_cluster() as cluster:
        return live(model, cluster, tmp_path_factory.mktemp("streamed"), stream=True)


def test_a_streamed_run_ends_with_the_weights_of_one_that_waits(model, cluster, tmp_path, streamed):
    rows, weights, _ = live(model, cluster, tmp_path)
    assert [row["stream/parts"] for row in streamed[0]] == [float(SIZE)] * STEPS
    assert all(row["stream/overlapped_s"] > 0.0 for row in streamed[0])
    assert not any("stream/parts" in row for row in rows)
    for ours, theirs in zip(streamed[0], rows, strict=True):
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
        assert ours["critic/rewards/mean"] == theirs["critic/rewards/mean"]
    before = load_file(model / "model.safetensors")
    apart, moved = (distance(weights, other) for other in (streamed[1], before))
    assert apart < 1e-3 * moved, "elements without a gradient to speak of may move either way"


def test_every_group_is_reserved_in_one_part_and_trained_once(streamed):
    events = streamed[2]
    taken = Counter(ticket for event in events if isinstance(event, Reserved) for ticket in event.tickets)
    assert len(taken) == SIZE * STEPS and set(taken.values()) == {1}
    assert sum(isinstance(event, Trained) for event in events) == STEPS
    assert all(len(event.tickets) == 1 for event in events if isinstance(event, Reserved))


@pytest.mark.parametrize(
    ("step", "num_groups", "resumed_at"),
    [(3, 2, 2), pytest.param(2, 1, 2, marks=pytest.mark.long), (1, 1, 0)],
)
def test_killed_within_a_step_the_next_learner_trains_the_same_parts_to_the_same_bits(
    model, cluster, tmp_path, streamed, step, num_groups, resumed_at
):
    def die(run: Run) -> None:
        assert run.leader.checkpoints.keeper.commit_finished(60.0), "the checkpoint of step 2 was not written"
        raise Killed

    with pytest.raises(Killed):
        live(model, cluster, tmp_path, interrupt_at(step, num_groups, die), stream=True)
    rows, weights, events = live(model, cluster, tmp_path, stream=True)
    assert rows[0]["training/global_step"] == resumed_at + 1
    assert all(torch.equal(weights[name], tensor) for name, tensor in streamed[1].items())
    check_no_group_was_trained_at_two_steps_of_one_lineage(events)


def test_a_checkpoint_asked_for_within_a_step_is_written_though_the_rest_never_comes(
    model, cluster, tmp_path, streamed
):
    def ask_and_look(run: Run, step: int, num_groups: int) -> None:
        if (step, num_groups) == (1, 1):
            run.learner.command(Pause())
            run.learner.command(WriteCheckpoint())
        if (step, num_groups) == (1, 2):
            assert run.leader.checkpoints.keeper.commit_finished(60.0)
            assert run.leader.checkpoints.newest_step == 1, "it waits for groups that come after the pause"
            run.learner.command(Unpause())

    _, weights, _ = live(model, cluster, tmp_path, ask_and_look, stream=True)
    assert all(torch.equal(weights[name], tensor) for name, tensor in streamed[1].items())


def test_stopped_within_a_step_its_groups_stay_reserved_and_come_first(model, cluster, tmp_path, streamed):
    stop = ThreadEvent()
    _, unfinished, events = live(
        model, cluster, tmp_path, interrupt_at(3, 1, lambda run: stop.set()), stop=stop, stream=True
    )
    assert unfinished == {}
    last = [event for event in events if isinstance(event, Reserved)][-2:]
    assert [event.step for event in last] == [3, 3]
    rows, weights, _ = live(model, cluster, tmp_path, stream=True)
    assert [row["training/global_step"] for row in rows] == [STEPS]
    assert all(torch.equal(weights[name], tensor) for name, tensor in streamed[1].items())
