"""A run on a mix of sources with a curriculum, evaluated in parts beside training, and the same by `eval`."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.buffer.ledger.events import Issued
from asyncrl.buffer.ledger.orders import PromptOrder, Source
from asyncrl.cli.audit.report import opened_past
from tests.system.parts.up_run import UpRun, asyncrl_command

NUM_STEPS, NUM_SHORT, NUM_LONG = 12, 400, 600


def write_lines(path: Path, source: Path, data_source: str, first: int, count: int) -> str:
    rows = pq.read_table(source).slice(first, count).to_pylist()
    path.write_text("".join(json.dumps({**row, "data_source": data_source}) + "\n" for row in rows))
    return str(path)


@pytest.mark.long
def test_a_mix_is_trained_in_its_order_and_evaluated_by_two_replicas_at_one_version(
    up: Callable[..., UpRun], digit_sort: Path, tmp_path: Path
) -> None:
    train, held_out = digit_sort / "train.parquet", digit_sort / "eval.parquet"
    long = write_lines(tmp_path / "long.jsonl", train, "long", 0, NUM_LONG)
    short = write_lines(tmp_path / "short.jsonl", train, "short", NUM_LONG, NUM_SHORT)
    other = write_lines(tmp_path / "other.jsonl", held_out, "of/two", 100, 100)
    sources = [{"path": long, "weight": 3, "filter": ["tokens:2:16"]}, {"path": short}]
    run = up(
        "mixed",
        f"data.train={json.dumps(sources)}",
        f"data.eval={json.dumps([str(held_out), other])}",
        "data.order=extra_info.index",
        f"learner.steps={NUM_STEPS}",
        "eval.every_steps=4",
        "eval.samples=4",
        "eval.replicas=2",
        "eval.prompts=64",
    )
    code, output = run.finish()
    assert code == 0, output
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "val/id" in row]
    assert [row["training/global_step"] for row in evaluations] == [0, 4, 8, 12]
    for row in evaluations:
        assert (row["val-aux/num_prompts"], row["val-aux/num_failed"]) == (128, 0)
        assert row["val-core/held_out/acc/mean@4"] <= row["val-core/held_out/acc/pass@4"]
        assert 0 <= row["val-core/of/two/acc/maj@4/low"] <= row["val-core/of/two/acc/maj@4"]
    assert run.summary()["ledger_residue"] == 0
    check_order(run.folder)
    done = subprocess.run(
        asyncrl_command("eval", "mixed", "--dir", str(run.runs_dir), "--json"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, last = json.loads(done.stdout)["metrics"], evaluations[-1]
    name = "val-core/held_out/acc/mean@4"
    assert last[f"{name}/low"] <= found[name] <= last[f"{name}/high"], "the same weights and the same prompts"


def check_order(folder: Path) -> None:
    """Check that every prompt drawn is the one that the order names, most of them of the first source."""
    with opened_past(folder) as past:
        events = [one.event for one in past.events()]
    issued = [event for event in events if isinstance(event, Issued) and not event.parent]
    order = PromptOrder(0, (Source(NUM_LONG, 3.0), Source(NUM_SHORT, 1.0)), True, is_ascending=True)
    assert [event[1:4] for event in issued] == [tuple(order.at(place)) for place in range(len(issued))]
    counts = Counter(event.source for event in issued)
    assert 1.5 < counts[0] / counts[1] < 6
