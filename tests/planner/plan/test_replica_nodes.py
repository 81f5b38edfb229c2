"""`plan` of replicas over several nodes: what is refused, and what is told."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.service import NODE_VARIABLE
from asyncrl.planner import plan
from asyncrl.planner.plan.footprint.memory import PER_REPLICA, RELAYED
from rollout_service.engine.vllm.engine import _engine_arguments
from rollout_service.engine.vllm.variant import settings_of


def config_with(nnodes: Any = 2, gpus: float = 4, ray: str = "10.0.0.1:6379", **sections: Any) -> Config:
    rollout = {"gpus": gpus, "cpus": 8, "engine_args": {"nnodes": nnodes}}
    model = {"path": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"}
    whole = {"model": model, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}, "rollout": rollout}
    return Config(**whole, launcher={"ray": ray}, **sections)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nnodes": 0}, "nnodes is 0; give the number of nodes"),
        ({"nnodes": True}, "nnodes is True; give the number of nodes"),
        ({"nnodes": "2"}, "nnodes is '2'; give the number of nodes"),
        ({"ray": "local"}, "nnodes 2 is for a cluster; set launcher.ray"),
        ({"nnodes": 4, "gpus": 2}, r"nnodes 4 does not divide rollout\.gpus: 2"),
        ({"weight_sync": {"backend": "direct"}}, "direct reaches workers of one node; set auto"),
        ({"nnodes": 5, "gpus": 0}, "5 does not divide the model's 16 attention heads"),
    ],
)
def test_what_does_not_go_with_replicas_over_nodes_is_refused(changes: dict[str, Any], told: str) -> None:
    assert plan.check_elsewhere(config_with())
    with pytest.raises(ConfigError, match=told):
        plan.check_elsewhere(config_with(**changes))


def test_a_plan_tells_the_nodes_of_a_replica_their_memory_and_the_pause() -> None:
    alone, found = plan.check_elsewhere(config_with(nnodes=1)), plan.check_elsewhere(config_with())
    told = {one.name: one.value for one in found.derived}
    assert told["nodes of a replica"] == 2
    assert any("nnodes 2" in note and "paused" in note for note in found.notes)
    (part,) = (part for part in found.memory if part.what == RELAYED)
    assert part.where == PER_REPLICA["host"] and part.num_bytes > 2 * 0.5e9
    assert not any(part.what == RELAYED for part in alone.memory)
    assert "nodes of a replica" not in {one.name for one in alone.derived}


@pytest.mark.parametrize(("gpus", "workers"), [(4, 4), (0, 2)])
def test_an_engine_is_cut_over_all_workers_of_its_nodes(
    gpus: float, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_VARIABLE, "a,b")
    settings = settings_of(config_with(gpus=gpus))
    assert (settings.further_nodes, settings.num_cpus) == (["b"], 4.0)
    arguments = _engine_arguments(settings)
    assert arguments["tensor_parallel_size"] == workers and "nnodes" not in arguments
    assert arguments["distributed_executor_backend"] == "mp"
    monkeypatch.delenv(NODE_VARIABLE)  # of a process that no cluster has placed
    assert _engine_arguments(settings_of(config_with(gpus=0)))["distributed_executor_backend"] == "uni"


def test_replicas_over_several_nodes_are_of_one_engine() -> None:
    rollout = {"engine": ["vllm", "sglang"], "engine_args": {"vllm": {"nnodes": 2}}}
    sections = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
    with pytest.raises(ConfigError, match="nnodes: replicas of several nodes are of one engine"):
        plan.check_elsewhere(Config(**sections, rollout=rollout))
