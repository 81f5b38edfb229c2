"""A whole run whose weights travel through a folder alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.parts.up_run import UpRun
from weight_sync.sync_records import JOURNAL_FILE

SETS = ("rollout.replicas=2", "eval.every_steps=0", "learner.steps=12", "weight_sync.backend=folder")


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_a_run_trains_on_versions_that_its_replicas_read_in_a_folder(
    up: Callable[..., UpRun], tmp_path: Path, encoding: str
) -> None:
    folder = tmp_path / "shared"
    name = f"by_folder_{encoding}"
    run = up(name, *SETS, f"weight_sync.folder=file://{folder}", f"weight_sync.encoding={encoding}")
    run.wait_for(lambda _: any(folder.glob("asyncrl-*/*/*/*")))
    code, output = run.finish()
    assert code == 0, output
    assert run.summary()["ledger_residue"] == 0
    lines = (run.folder / JOURNAL_FILE).read_text().splitlines()
    rounds = [entry for line in lines if (entry := json.loads(line))["kind"] == "round"]
    assert {one["lane"] for one in rounds} == {"FOLDER"}
    assert {name for one in rounds for name in one["parts"]} == {"receiver.0", "receiver.1"}
    assert max(one["number"] for one in rounds) > 10
    assert not [path for path in folder.rglob("*") if path.is_file()]
    assert len(run.rows()) == 12
