"""GSM8K prompts end to end with the shipped configuration: real text, long and uneven."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.parts.up_run import UpRun, asyncrl_command, leftovers

CONFIG = Path(__file__).parents[3] / "configs" / "grpo_gsm8k.yaml"
QUESTION = (
    "A baker sells {n} loaves on Monday and twice as many on Tuesday. On Wednesday she sells five fewer than "
    "on both days together. How many loaves does she sell on the three days? "
)


def write_gsm8k(path: Path, num_rows: int) -> None:
    """Write rows in GSM8K's original form."""
    rows = [
        {
            "question": QUESTION.format(n=n) * (1 + n % 3),
            "answer": f"{n} + {2 * n} = {3 * n}\n#### {6 * n - 5}",
        }
        for n in range(1, num_rows + 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.long
def test_steps_on_gsm8k_prompts_until_down(up: Callable[..., UpRun], tmp_path: Path) -> None:
    write_gsm8k(tmp_path / "train.jsonl", 40)
    done = subprocess.run(
        asyncrl_command("data", "gsm8k", "train.jsonl", "data/gsm8k_train.parquet"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = up("text", "learner.steps=2000", config=CONFIG, cwd=tmp_path)
    run.wait_for(lambda status: status["step"] >= 3)
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    rows = run.rows()
    assert [row["training/global_step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 3
    assert all(0 <= row["critic/rewards/mean"] <= 1 for row in rows)
    assert max(row["prompt_length/max"] for row in rows) > 2 * min(row["prompt_length/min"] for row in rows)
    summary = run.summary()
    assert summary["ledger_residue"] == 0
    assert summary["ledger"]["trained"] + summary["ledger"]["dropped"].get("stale", 0) == 4 * len(rows)
    assert leftovers(run.folder) == []
