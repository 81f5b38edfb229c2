"""A row that is longer than a microbatch, as a journal from before the buffer's bounds may hold one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.ledger.events import Dropped, Reserved
from tests.buffer.parts import make_group
from tests.learner.guard import guarded_run
from tests.learner.guard.guarded_run import NUM_STEPS, Faults, Run, make_pair, running

BUDGET = 40
LEARNER = {"steps": NUM_STEPS, "max_tokens_per_microbatch": BUDGET}


class Killed(Exception):
    """Stands for the end of the process."""


def make_pair_with_long_rows(tickets: set[int]):
    """Return what makes a replica's groups: those of `tickets` have a row that does not fit."""

    def make(ticket, attempt, version):
        pair = make_pair(ticket, attempt, version)
        if ticket not in tickets:
            return pair
        long = make_group(ticket, attempt, version, num_tokens=BUDGET - 2).trajectories[1]
        return replace(pair, trajectories=(pair.trajectories[0], long))

    return make


def drops_of(run: Run) -> dict[int, str]:
    return {event.ticket: event.reason for event in run.events() if isinstance(event, Dropped)}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_groups_with_a_row_that_fits_no_microbatch_are_dropped_and_the_run_goes_on(
    model, cluster, tmp_path, monkeypatch, caplog, stream
):
    long = {2, 5, 6}  # one of a step, and a whole step
    monkeypatch.setattr(guarded_run, "make_pair", make_pair_with_long_rows(long))
    with running(model, cluster, tmp_path, Faults(), {}, learner=LEARNER | {"stream": stream}) as run:
        run.go()
        status = run.status()
        assert run.leader.step == NUM_STEPS
    assert status.dropped == {"oversized": len(long)} and status.residue == 0
    assert drops_of(run) == dict.fromkeys(long, "oversized")
    assert f"a row of {BUDGET + 1} tokens does not fit a microbatch of {BUDGET}" in caplog.text


class Dying:
    """The leader's way to the buffer; the learner dies before it books its first step."""

    def __init__(self, client: LearnerClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def trained(self, *args: Any) -> None:
        raise Killed


def test_a_journal_that_holds_such_a_row_in_a_reserved_batch_is_resumed(
    model, cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(guarded_run, "make_pair", make_pair_with_long_rows({2}))
    with running(model, cluster, tmp_path, Faults(wrap=Dying), {}) as run, pytest.raises(Killed):
        run.go()  # with microbatches that the row fits
    assert any(isinstance(event, Reserved) and 2 in event.tickets for event in run.events())
    assert not drops_of(run)
    with running(model, cluster, tmp_path, Faults(), {}, learner=LEARNER) as run:
        run.go()
        assert run.leader.step == NUM_STEPS and run.status().residue == 0
    assert drops_of(run) == {2: "oversized"}
