"""GPUs that a run may ask Ray for."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.control.machine import resources
from asyncrl.control.machine.resources import check_replicas, count_gpus
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.status.service import NUM_INDICES

SECTIONS = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("2,3", 2),
        ("0, 1,2", 3),
        ("GPU-5f1c,MIG-0a", 2),
        ("0,-1,2", 1),
        ("NoDevFiles", 0),
        ("0,1,2,3,4,5", 4),
    ],
)
def test_gpus_that_are_hidden_from_this_process_are_not_counted(
    visible: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray refuses to start with more of them than CUDA_VISIBLE_DEVICES names."""
    for index in range(4):
        (tmp_path / f"0000:0{index}:00.0").mkdir()
    monkeypatch.setattr(resources, "DRIVER_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == expected


def test_a_machine_without_the_driver_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "DRIVER_GPUS", tmp_path / "none")
    assert count_gpus() == 0


@pytest.mark.parametrize("launcher", [{}, {"ray": "auto", "host": "10.0.0.1"}])
@pytest.mark.parametrize("rollout", [{"cpus": 0}, {"cpus": 0, "gpus": 1}])
def test_more_replicas_than_can_be_numbered_are_refused_whatever_room_there_is(
    launcher: dict[str, str], rollout: dict[str, float]
) -> None:
    config = Config(**SECTIONS, launcher=launcher, rollout=rollout)
    with pytest.raises(ConfigError, match=f"asks for {10**12} replicas; they are numbered below"):
        check_replicas(config, 10**12)
    if launcher or "gpus" not in rollout:
        check_replicas(config, NUM_INDICES)
