"""Replay of steps whose rows shared their prompt: a record names the way, an older one is of packed rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.core.config.load import dump_resolved
from asyncrl.core.experience import Group
from learner.record.comparison import Difference
from learner.record.replay import replay_run
from learner.record.settings import configure, settings_of
from tests.learner.guard import guarded_run
from tests.learner.guard.guarded_run import Faults, make_config, running
from tests.weight_sync.cluster import running_cluster

ALGORITHM = {"veto": 1e-3}
SECTIONS = {
    "run": {"record": True},
    "learner": {"steps": 2, "weight_decay": 0.01, "warmup_steps": 0},
    "checkpoint": {"every_steps": 2},
}


def write_resolved(model: Path, folder: Path) -> None:
    config = make_config(model, algorithm=ALGORITHM, **SECTIONS)
    (folder / "resolved.yaml").write_text(dump_resolved(config))


def test_a_record_that_names_no_way_of_prompts_is_of_one_per_row(model: Path, tmp_path: Path) -> None:
    write_resolved(model, tmp_path)
    settings = json.loads(json.dumps(settings_of(make_config(model, **SECTIONS))))
    assert settings["learner"]["shared_prompt"] == "auto"
    learner = {key: value for key, value in settings["learner"].items() if key != "shared_prompt"}
    older, asked = settings | {"learner": learner}, ["learner.shared_prompt=auto"]
    found = [configure(tmp_path, settings), configure(tmp_path, older), configure(tmp_path, older, asked)]
    assert [config.learner.shared_prompt for config in found] == ["auto", "off", "auto"]


@pytest.mark.long  # a run and two replays
def test_steps_whose_rows_shared_their_prompt_train_again_bit_by_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_pair(ticket: int, attempt: int, version: int) -> Group:
        return replace(short_pair(ticket, attempt, version), prompt_ids=np.arange(80, dtype=np.int32))

    short_pair = guarded_run.make_pair
    monkeypatch.setattr(guarded_run, "make_pair", make_pair)
    folder = tmp_path / "run"
    with (
        running_cluster() as cluster,
        running(model, cluster, folder, Faults(), ALGORITHM, **SECTIONS) as run,
    ):
        run.go()
    write_resolved(model, folder)
    found = replay_run(str(folder), "runs", 0, 2)
    assert len(found.steps) == 2 and found.is_exact, found
    found = replay_run(str(folder), "runs", 0, 2, overrides=["learner.shared_prompt=off"])
    tokens = Difference("perf/computed_tokens", 180.0, 340.0)
    assert all(tokens in step.differences for step in found.steps), "the run did not share"
