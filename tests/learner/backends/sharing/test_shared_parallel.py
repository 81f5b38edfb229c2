"""Shared prompts under each parallelism train what one process trains with a prompt in each row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.learner.parts.launching import assert_trained_alike, run_alone, run_ranks
from tests.learner.parts.samples import save_model

pytestmark = pytest.mark.long

GROUPS = {"max_tokens": 12, "prompt_tokens": (24, 36)}
SMALL = {"max_tokens_per_microbatch": 100}
OF_TWO: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "sequence_parallel": False},
    "sp": {"tp": 2} | SMALL,
    "sp_full": {"tp": 2, "recompute": "full"},
    "pp": {"pp": 2},
    "pp_small": {"pp": 2, "recompute": "selective"} | SMALL,
    "vpp": {"pp": 2, "vpp": 2} | SMALL,
    "dp": {"dp": 2, "recompute": "selective"},
    "dp_overlap": {"dp": 2, "overlap": True} | SMALL,
    "cp": {"cp": 2},
    "fsdp2": {"backend": "fsdp2", "dp": 2} | SMALL,
    "fsdp2_full": {"backend": "fsdp2", "dp": 2, "recompute": "full"},
}
EXPERTS_OF_TWO: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2} | SMALL,
    "tp_ep": {"tp": 2, "ep": 2, "recompute": "full"},
    "pp": OF_TWO["pp_small"],
    "fsdp2": OF_TWO["fsdp2"],
}
OF_FOUR = {
    "sp_pp": {"tp": 2, "pp": 2} | SMALL,
    "sp_dp": {"tp": 2, "dp": 2} | SMALL,
    "pp_dp": {"pp": 2, "dp": 2, "vpp": 2, "overlap": True} | SMALL,
    "fsdp2_four": {"backend": "fsdp2", "dp": 4},
}


@pytest.fixture(scope="module", params=["qwen3", "qwen2_tied"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Path]:
    return train_packed(request.param, tmp_path_factory.mktemp(request.param))


def train_packed(kind: str, folder: Path) -> tuple[Path, Any, Path]:
    """Return the model, what one process trained with packed rows, and where its weights are."""
    model = save_model(folder / "model", kind, num_layers=4)
    found = run_alone(model, folder, groups=GROUPS, changes={"shared_prompt": "off"})
    assert not found["shares_prompts"]
    return model, found, folder


@pytest.mark.parametrize(("world_size", "layouts"), [(2, OF_TWO), (4, OF_FOUR)], ids=["two", "four"])
def test_ranks_that_share_prompts_train_as_one_process_does_that_does_not(
    alone: tuple[Path, Any, Path], world_size: int, layouts: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    check(alone, world_size, layouts, tmp_path)


def test_ranks_that_share_experts_and_prompts_train_as_one_process_does_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    check(train_packed("qwen3_moe", tmp_path / "alone"), 2, EXPERTS_OF_TWO, tmp_path)


def check(
    alone: tuple[Path, Any, Path], world_size: int, layouts: dict[str, dict[str, Any]], out: Path
) -> None:
    model, wanted, folder = alone
    jobs = [
        {"name": name, "model": model, "changes": changes, "groups": GROUPS}
        for name, changes in layouts.items()
    ]
    run_ranks(world_size, jobs, out)
    for name in layouts:
        for rank in range(world_size):
            found = json.loads((out / f"{name}.{rank}.json").read_text())
            assert found["shares_prompts"] == (name != "cp")
        assert_trained_alike(out, name, world_size, wanted, folder, tolerance=5e-5)
