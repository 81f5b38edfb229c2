"""A resume may change the learning rate, and the changed one is in force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.learner.guard.guarded_run import Faults, Run, running
from tests.weight_sync.cluster import Cluster, running_cluster

PPO = {"advantage": "gae"}


def go(model: Path, cluster: Cluster, folder: Path, algorithm: dict[str, Any], **sections: Any) -> Run:
    with running(model, cluster, folder, Faults(), algorithm, **sections) as run:
        run.go()
    return run


def test_a_resume_with_other_rates_trains_policy_and_critic_at_them(model: Path, tmp_path: Path) -> None:
    before = {"learner": {"steps": 2, "lr": 1e-4}, "critic": {"lr": 2e-4}}
    after = {"learner": {"steps": 4, "lr": 3e-4}, "critic": {"lr": 5e-4}}
    with running_cluster() as cluster:
        first = go(model, cluster, tmp_path, PPO, checkpoint={"every_steps": 2}, **before).rows()
        second = go(model, cluster, tmp_path, PPO, checkpoint={"every_steps": 2}, **after).rows()
    assert [row["actor/lr"] for row in first] == [1e-4] * 2
    assert [row["critic/lr"] for row in first] == [2e-4] * 2
    assert [row["actor/lr"] for row in second] == [3e-4] * 2
    assert [row["critic/lr"] for row in second] == [5e-4] * 2
