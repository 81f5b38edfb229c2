"""Refusals of `plan` and `up`, before anything starts, of what a service would refuse minutes later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.planner import plan
from tests.planner.plan.model_folder import write_model_folder


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """A configuration whose files exist."""
    save_file({}, write_model_folder(tmp_path / "model") / "model.safetensors")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    return {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "reward": {"fn": "gsm8k"},
        "rollout": {"replicas": 1},
    }


def problems_of(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan.check(Config(**values))
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"rollout": {"response_tokens": "uniform:1:2"}},
            "rollout.response_tokens: 'uniform:1:2' cannot be read",
        ),
        (
            {"rollout": {"engine": "sglang", "engine_args": {"python": "/nowhere/python"}}},
            "rollout.engine: there is no /nowhere/python for sglang",
        ),
        (
            {"rollout": {"gateway": {"port": 0}}, "launcher": {"host": "192.0.2.1"}},
            "rollout.gateway: the gateway would listen on 192.0.2.1 without a key",
        ),
    ],
)
def test_what_a_service_would_refuse_at_its_start_is_refused_before_anything_starts(
    good: dict[str, Any], monkeypatch: pytest.MonkeyPatch, values: dict[str, dict[str, Any]], line: str
) -> None:
    monkeypatch.delenv("ASYNCRL_GATEWAY_KEY", raising=False)
    for section, keys in values.items():
        good.setdefault(section, {}).update(keys)
    assert any(problem.startswith(line) for problem in problems_of(good))


def test_a_model_of_quantised_weights_is_refused(good: dict[str, Any]) -> None:
    config = Path(good["model"]["path"]) / "config.json"
    table = json.loads(config.read_text())
    config.write_text(json.dumps({**table, "quantization_config": None}))
    plan.check(Config(**good))
    config.write_text(json.dumps({**table, "quantization_config": {"quant_method": "fp8"}}))
    (line,) = problems_of(good)
    assert line.startswith("model.path") and "holds quantised weights" in line
