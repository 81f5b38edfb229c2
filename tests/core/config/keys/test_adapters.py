"""Adapters in a configuration: refused beside what cannot take them, and counted by the plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.run.resume_rules import find_breaks
from asyncrl.core.config.tree import Config
from asyncrl.planner.plan.footprint import shared_memory
from asyncrl.planner.plan.footprint.memory import count_parts
from asyncrl.planner.plan.models import check_adapters
from tests.planner.plan.model_folder import SIZES, write_model_folder

NUM_WEIGHTS = 8 * 10**9


def make_config(path: str = "m", lora: dict[str, Any] | None = None, **sections: Any) -> Config:
    named = {"path": path, "lora": {"rank": 8} if lora is None else lora}
    return Config(**({"model": named, "data": {"train": "t"}, "reward": {"fn": "f"}} | sections))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"rollout": {"engine": "sglang"}}, "rollout.engine does not take adapters: sglang takes whole"),
        ({"rollout": {"engine": ["vllm", "sglang"]}}, "rollout.engine does not take adapters: sglang takes"),
        ({"weight_sync": {"backend": "direct"}}, "weight_sync.backend does not take adapters"),
        ({"learner": {"kernels": "te"}}, "learner.kernels does not take adapters"),
        ({"rollout": {"quantization": "int8"}}, "rollout.quantization does not take adapters"),
        ({"learner": {"backend": "fsdp2", "compile": True}}, "learner.compile does not take adapters"),
    ],
)
def test_what_cannot_take_adapters_is_refused_beside_them(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_config(**sections)
    make_config(lora={}, **sections)


@pytest.mark.parametrize("lora", [{"alpha": 8}, {"targets": ["q_proj"]}, {"path": "adapters/mine"}])
def test_settings_of_adapters_without_a_rank_are_refused(lora: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"model\.lora does nothing without a rank"):
        make_config(lora=lora)
    make_config(lora=lora | {"rank": 8})


def test_adapters_that_the_model_cannot_have_are_told_before_a_start(tmp_path: Path) -> None:
    dense = str(write_model_folder(tmp_path / "dense", **SIZES))
    mixture = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    experts = str(write_model_folder(tmp_path / "experts", **SIZES, **mixture))
    fused = str(write_model_folder(tmp_path / "fused", **SIZES, model_type="phi3"))
    assert not list(check_adapters(make_config(dense)))
    assert not list(check_adapters(make_config(experts, lora={})))
    for path, lora, told in (
        (dense, {"rank": 8, "targets": ["q_proj", "wq"]}, "model.lora.targets: .* no matrix called wq"),
        (dense, {"rank": 8, "path": str(tmp_path)}, "model.lora.path: .* holds no PEFT adapter"),
        (experts, {"rank": 8}, "model.lora.targets: .* are matrices of experts, which have no adapters"),
        (fused, {"rank": 8, "targets": ["qkv_proj"]}, "model.lora.rank: .* on the fused matrices of 'phi3'"),
    ):
        (line,) = check_adapters(make_config(path, lora))
        assert re.match(told, line), line


def test_a_run_does_not_go_on_with_other_adapters() -> None:
    (found,) = find_breaks(make_config(), make_config(lora={}))
    assert found[0] == "model.lora"
    assert found[1].startswith("model.lora: was {'rank': 8}, is {}; checkpoints hold adapters")


def test_memory_of_optimizer_checkpoint_and_versions_is_that_of_the_adapters(tmp_path: Path) -> None:
    path = str(write_model_folder(tmp_path / "dense", **SIZES))
    config, whole = make_config(path), make_config(path, lora={})
    num_adapters = shared_memory.count_adapters(config)
    assert num_adapters is not None
    assert shared_memory.count_adapters(whole) is None
    shared, all_shared = shared_memory.count(config, 2), shared_memory.count(whole, 2)
    assert shared is not None and all_shared is not None
    assert shared.version_bytes == 2 * num_adapters != all_shared.version_bytes
    kl = {"algorithm": {"kl": {"coef": 0.1}}}
    parts = {
        one.what: one.num_bytes
        for one in count_parts(make_config(path, **kl), NUM_WEIGHTS, 0, adapter_weights=num_adapters)
    }
    assert parts["model"] == 2 * NUM_WEIGHTS
    assert parts["policy and its optimizer"] == 18 * num_adapters
    assert parts["copy of the policy for a checkpoint"] == 12 * num_adapters
    assert "reference policy" not in parts
