"""The gateway's benchmark: how tokens are counted, its verdict, and what a recovery is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout.gateway import overhead
from benchmarks.rollout.gateway.agents import _rate, _read_stream
from benchmarks.rollout.gateway.recovery import read_recoveries


def make_results(gateway: float) -> dict[str, Any]:
    def rates(*tokens_per_s: float) -> dict[str, list[float]]:
        return {"tokens_per_s": list(tokens_per_s), "cpu_us_per_token": [40.0] * len(tokens_per_s)}

    case = {"engine": "scripted", "answers": "whole"}
    good = {"gateway": rates(100.0, 100.0, 1.0), "vllm": rates(100.0, 100.0, 1.0)}
    bad = {"gateway": rates(gateway, gateway, 900.0), "vllm": rates(100.0, 100.0, 100.0)}
    cases = [{**case, "sessions": 1, "servers": good}, {**case, "sessions": 64, "servers": bad}]
    return {"cases": cases, "recovery_s": [3.0, 1.0, 2.0]}


@pytest.mark.parametrize(("gateway", "is_met"), [(91.0, True), (89.0, False)])
def test_the_worst_share_of_vllms_tokens_per_second_is_judged_by_medians(
    gateway: float, is_met: bool
) -> None:
    found, verdict = overhead.check(make_results(gateway))
    assert found is is_met
    assert verdict.endswith("(scripted, whole, 64 sessions)")


def test_each_server_has_a_row_and_the_recovery_another() -> None:
    rows = overhead.make_rows(make_results(80.0))
    assert [row.case.get("server") for row in rows] == ["gateway", "vllm", "gateway", "vllm", None]
    assert rows[2].values["share_of_vllm"] == 0.8 and "share_of_vllm" not in rows[3].values
    assert rows[4].values == {"to_the_next_turn_s": 2.0}


def test_a_rate_is_of_the_time_between_an_agents_answers() -> None:
    assert _rate([(1.0, 50), (3.0, 8), (5.0, 12)]) == 5.0
    assert _rate([(1.0, 50)]) == 0.0


def test_a_stream_is_read_with_its_number_of_tokens() -> None:
    parts: list[dict[str, Any]] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "12"}}]},
        {"choices": [{"delta": {"content": "3"}}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    text = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
    assert _read_stream(text) == ("123", 3)


def test_a_recovery_is_from_the_call_that_killed_to_the_next_turn(tmp_path: Path) -> None:
    calls = [(4, 0, 1, 1.0), (4, 1, 1, 2.0), (4, 1, 2, 3.0), (4, 2, 2, 5.5), (4, 3, 2, 6.0), (44, 1, 1, 7.0)]
    names = ("ticket", "turn", "token", "at")
    lines = [json.dumps(dict(zip(names, call, strict=True))) for call in calls]
    (tmp_path / "calls.jsonl").write_text("\n".join(lines))
    assert read_recoveries(tmp_path / "calls.jsonl") == {4: 3.5}
    assert read_recoveries(tmp_path / "none.jsonl") == {}
