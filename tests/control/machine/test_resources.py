"""GPUs that a run may ask Ray for."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.control.machine import resources
from asyncrl.control.machine.resources import count_gpus


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
