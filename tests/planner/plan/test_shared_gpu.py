"""A GPU that learner and engine share: what is refused, and the memory that each side gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.control.machine.resources import count_gpus_wanted
from asyncrl.core.config.gpus import USABLE
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.planner import plan
from asyncrl.planner.hardware import assume_rates
from asyncrl.planner.plan import checks
from asyncrl.planner.plan.footprint.capacity import Capacity
from learner.numerics.device import choose_device
from rollout_service.engine.vllm.engine import _engine_arguments
from rollout_service.engine.vllm.variant import settings_of

GB = 10**9


Side = float | dict[str, Any]
"""GPUs of a side, or more of its section."""


def make_config(learner: Side = 0.5, rollout: Side = 0.5, **sections: Any) -> Config:
    sides = {
        name: {"gpus": 0.5} | (side if isinstance(side, dict) else {"gpus": side})
        for name, side in (("learner", learner), ("rollout", rollout))
    }
    model = {"path": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"}
    return Config(**{"model": model, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}} | sides | sections)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rollout": 1.5}, "a whole number of GPUs, or a share of one"),
        ({"learner": {"dp": 2}}, "is for a lone rank, as NCCL refuses two on one GPU"),
        ({"launcher": {"ray": "auto"}}, "shares of a GPU are for one machine, and"),
        (
            {"rollout": {"engine_args": {"gpu_memory_utilization": 0.6}}},
            "gpu_memory_utilization 0.6 is more than rollout.gpus: 0.5",
        ),
    ],
)
def test_what_does_not_go_with_a_share_of_a_gpu_is_refused(changes: dict[str, Any], told: str) -> None:
    assert plan.check_elsewhere(make_config())
    with pytest.raises((ValidationError, ConfigError), match=told):
        plan.check_elsewhere(make_config(**changes))


@pytest.mark.parametrize(
    ("learner", "rollout", "replicas", "num_gpus"),
    [
        (0.5, 0.5, 1, 1),
        (0.3, 0.35, 2, 1),
        (0.5, 0.5, 2, 2),
        (0.6, 0.6, 2, 3),
        (0, 0.5, 3, 2),
        (1, 0.5, 2, 2),
        (1, 2, 2, 5),
    ],
)
def test_shares_are_put_together_on_as_few_gpus_as_hold_them(
    learner: float, rollout: float, replicas: int, num_gpus: int
) -> None:
    assert count_gpus_wanted(make_config(learner, rollout), replicas) == num_gpus


@pytest.mark.parametrize(
    ("gpus", "engine_args", "expected"),
    [
        (0.5, {}, 0.5 * USABLE),
        (0.5, {"gpu_memory_utilization": 0.4}, 0.4),
        (1, {}, None),
        (1, {"gpu_memory_utilization": 0.8}, 0.8),
        (0, {}, None),
    ],
)
def test_the_engine_asks_for_its_share_of_the_memory_and_for_no_other_than_its_default_of_a_whole_gpu(
    gpus: float, engine_args: dict[str, float], expected: float | None
) -> None:
    config = make_config(rollout={"gpus": gpus, "engine_args": engine_args})
    arguments = _engine_arguments(settings_of(config))
    assert arguments.get("gpu_memory_utilization") == expected
    assert arguments["tensor_parallel_size"] == 1


def test_the_learners_allocator_gets_its_share_and_that_of_a_whole_gpu_no_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append((share, device))
    )
    choose_device(1, 0)
    assert limits == []
    assert choose_device(0.5, 0) == limits[0][1] and limits[0][0] == 0.5 * USABLE


def lacks(gpu: int, **changes: Any) -> list[str]:
    return list(checks.check_memory(make_config(**changes), Capacity(gpu=gpu * GB)))


def test_each_side_is_held_against_its_own_share_of_the_memory() -> None:
    """0.6 G weights: 18 bytes of each in the learner are 10.7 GB, 2 in the engine 1.2 GB."""
    assert lacks(24) == []
    (line,) = lacks(16)
    assert line.startswith("learner.gpus: the run takes 10.7 GB of each GPU of the learner, which has 7.36")
    assert line.endswith("raise this share of the GPU and lower the other one")
    assert lacks(16, learner=0.8, rollout=0.2) == []
    (line,) = lacks(16, learner=0.95, rollout=0.05)
    assert line.startswith("rollout.gpus: the run takes 1.19 GB of each GPU of a replica, which has 0.736")
    (line,) = lacks(16, learner=0.75, rollout={"gpus": 0.25, "engine_args": {"gpu_memory_utilization": 0.07}})
    assert "which has 1.12 (0.07 of it)" in line, "its own word goes before the share"
    assert lacks(16, learner=1, rollout=1) == [], "whole GPUs have it all"


def test_the_plan_says_what_is_shared_and_reserves_both_on_one_gpu() -> None:
    found = plan.check_elsewhere(make_config())
    assert found.num_gpus == 1.0
    assert sum("is shared: 0.46 of its memory" in line for line in found.notes) == 2
    assert not any("is shared" in line for line in plan.check_elsewhere(make_config(1, 1)).notes)


def test_a_share_of_a_gpu_computes_its_share() -> None:
    half, whole = (
        assume_rates(config, size, "H100", 500.0)
        for config in (make_config(), make_config(1, 1))
        if (size := checks.read_size(config)) is not None
    )
    assert half.step_s_per_token == 2 * whole.step_s_per_token
    assert half.decode[-1][1] < whole.decode[-1][1] and half.swap_s == whole.swap_s
