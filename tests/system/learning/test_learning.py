"""A run of 40 steps through `asyncrl up`, with its real parts: it learns, and the account is clean."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from asyncrl.cli.audit.report import verify_run
from tests.system.parts.up_run import UpRun, leftovers

NUM_STEPS = 40
NUM_ANSWERS = 4
"""To a prompt of the last evaluation, where plain transformers answers it."""


@pytest.fixture(scope="module")
def run(up: Callable[..., UpRun]) -> UpRun:
    run = up("learning", f"learner.steps={NUM_STEPS}", f"eval.every_steps={NUM_STEPS}", "eval.prompts=256")
    code, output = run.finish()
    assert code == 0, output
    return run


def gain_in_standard_errors(rows: list[dict[str, Any]]) -> float:
    """Return (mean reward of the last 10 steps - of the first 10) in standard errors of the difference."""
    rewards = [row["critic/rewards/mean"] for row in rows]
    first, last = rewards[:10], rewards[-10:]
    error = (statistics.variance(first) / 10 + statistics.variance(last) / 10) ** 0.5
    return (statistics.mean(last) - statistics.mean(first)) / max(error, 1e-9)


def test_the_reward_rises_by_more_than_four_standard_errors(run: UpRun) -> None:
    assert gain_in_standard_errors(run.rows()) > 4


@pytest.mark.long
def test_with_zero_advantages_the_reward_does_not_rise(up: Callable[..., UpRun]) -> None:
    changes = ("algorithm.advantage=zero_advantage:zero", "eval.every_steps=0", "rollout.replicas=1")
    run = up("not_learning", f"learner.steps={NUM_STEPS}", *changes)
    code, output = run.finish()
    assert code == 0, output
    assert gain_in_standard_errors(run.rows()) < 4


def test_no_token_over_the_bound_is_trained_and_the_run_is_asynchronous(run: UpRun) -> None:
    assert max(row["staleness/lag_max_trained"] for row in run.rows()) <= 4
    summary = run.summary()
    assert summary["lag_mean"] >= 0.5
    assert summary["masked_share"] < 0.05


def test_the_guard_finds_nothing_in_a_healthy_run(run: UpRun) -> None:
    counts = run.summary()["guard"]
    assert counts and not any(counts.values()), counts


def test_the_ledger_has_no_residue_and_names_what_it_dropped(run: UpRun) -> None:
    summary = run.summary()
    assert summary["ledger_residue"] == 0
    ledger = summary["ledger"]
    assert ledger["trained"] + ledger["dropped"].get("stale", 0) >= NUM_STEPS * 16
    assert set(ledger["dropped"]) <= {"stale"}


def test_a_recount_of_the_journal_finds_nothing_wrong(run: UpRun) -> None:
    found = verify_run(str(run.folder), "")
    assert found["findings"] == []
    assert found["steps_trained"] == NUM_STEPS
    assert 1 <= found["lag_max_trained"] <= 4 and found["steps_without_a_lag"] == 0


def test_every_step_trains_its_own_tickets_once(run: UpRun) -> None:
    assert [row["training/global_step"] for row in run.rows()] == list(range(1, NUM_STEPS + 1))


def test_the_run_writes_all_that_it_promises(run: UpRun) -> None:
    for name in ("resolved.yaml", "metrics.jsonl", "curves.png", "summary.json", "weights/model.safetensors"):
        assert (run.folder / name).stat().st_size > 0, name
    assert list((run.folder / "tensorboard").glob("events.*"))
    for service in ("head.0", "supervisor.0", "buffer.0", "weight_sync.0", "publisher.0", "learner.0"):
        assert (run.folder / "logs" / f"{service}.log").exists(), service
    for index in range(2):
        assert (run.folder / "logs" / f"rollout.{index}.log").stat().st_size > 0


def test_nothing_is_left_of_the_run(run: UpRun) -> None:
    assert leftovers(run.folder) == []


def test_work_and_waiting_add_up_to_wall_time(run: UpRun) -> None:
    """The stages and waits of the learner fill the step, but for bookkeeping between them."""
    rows = run.rows()[1:]
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({name: value for name, value in row.items() if name.startswith("timing_s/")})
    step_s, other_s = sums.pop("timing_s/step"), sums.pop("timing_s/other")
    assert other_s >= -0.01 * step_s, "a stage was counted twice"
    assert sums.total() >= 0.7 * step_s
    assert all(0 <= row["perf/rollout_idle_share"] <= 1 for row in rows)


def test_plain_transformers_reaches_the_last_accuracy(run: UpRun, runs_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run.folder / "weights", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "weights")
    rows = pyarrow.parquet.read_table(runs_dir / "builtin" / "digit_sort" / "eval.parquet").to_pylist()[:256]
    torch.manual_seed(0)
    right = sum(count_right(model, tokenizer, row) for row in rows) / (NUM_ANSWERS * len(rows))
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    evaluations = [json.loads(line) for line in lines if "val-core" in line]
    last = max(evaluations, key=lambda row: row["training/global_step"])
    assert last["training/global_step"] == NUM_STEPS
    errors = (right * (1 - right) * (1 + 1 / NUM_ANSWERS) / len(rows)) ** 0.5
    assert right == pytest.approx(last["val-core/held_out/acc/mean@1"], abs=4 * errors)


def count_right(model: Any, tokenizer: Any, row: dict[str, Any]) -> int:
    """Sample answers at temperature 1 and count those that are right as a whole, end of sequence included."""
    ids = tokenizer(row["prompt"])["input_ids"]
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    found = model.generate(torch.tensor([ids]), max_new_tokens=7, num_return_sequences=NUM_ANSWERS, **options)
    answers = [one[len(ids) :] for one in found.tolist()]
    return sum(is_right(tokenizer, answer, row["reward_model"]["ground_truth"]) for answer in answers)


def is_right(tokenizer: Any, answer: list[int], wanted: str) -> bool:
    """Tell whether an answer is `wanted` and ends there."""
    has_ended = tokenizer.eos_token_id in answer
    return has_ended and bool(tokenizer.decode(answer, skip_special_tokens=True) == wanted)
