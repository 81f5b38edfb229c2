"""Recorded steps of a learner of two ranks, trained again in two processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.core.config.load import dump_resolved
from learner.batching.batch import assign_shards, plan_minibatches
from learner.orders import Adjust, Train
from learner.record.batch_store import FOLDER, BatchStore, RecordedStep
from learner.record.replay import replay_run
from learner.record.settings import Settings, settings_of
from tests.learner.guard.guarded_run import make_config
from tests.learner.parts.samples import make_groups

pytestmark = pytest.mark.long
NUM_RANKS, NUM_STEPS, NUM_MINIBATCHES = 2, 2, 2


def record(batch_store: BatchStore, step: int, settings: Settings) -> None:
    """Put a step of made-up groups on the batch_store, a share per rank, with no metrics yet."""
    groups = make_groups(6, seed=step)
    num_tokens_of = {group.ticket: group.num_tokens for group in groups}
    shards = assign_shards(num_tokens_of, plan_minibatches(list(num_tokens_of), NUM_MINIBATCHES), NUM_RANKS)
    order = Train(step, 1, list(num_tokens_of), list(num_tokens_of.values()), [(1, step)])
    for share, tickets in enumerate(shards):
        mine = [group for group in groups if group.ticket in tickets]
        batch_store.write(RecordedStep(order, Adjust(1.0, False), mine, {}, 0, share, NUM_RANKS, settings))


def test_two_ranks_train_the_shares_that_were_recorded_and_do_so_again_bit_by_bit(
    model: Path, tmp_path: Path
) -> None:
    learner = {"dp": NUM_RANKS, "groups_per_step": 6, "minibatches": NUM_MINIBATCHES, "steps": NUM_STEPS}
    (tmp_path / "resolved.yaml").write_text(dump_resolved(make_config(model, learner=learner)))
    batch_store = BatchStore(tmp_path / FOLDER)
    batch_store.folder.mkdir()
    for step in range(NUM_STEPS):
        config = make_config(model, learner=learner | {"grad_clip": 1.0 / (step + 1)})
        record(batch_store, step, settings_of(config))
    said: list[str] = []
    first = replay_run(str(tmp_path), "runs", say=said.append)
    assert [sentence for sentence in said if not sentence.startswith("step ")] == [
        "from step 1 on the run had learner.grad_clip: 0.5 in place of 1.0",
        *["2 processes, as the run's learner had"] * 2,
    ]
    assert len(first.steps) == NUM_STEPS and not first.is_exact
    for compared in first.steps:
        metrics = {found.name: found.replayed for found in compared.differences}
        for share in range(NUM_RANKS):
            batch_store.write(replace(batch_store.read(compared.step, share), metrics=metrics))
    again = replay_run(str(tmp_path), "runs")
    assert again.is_exact and all(step.num_metrics > 40 for step in again.steps)
