"""Whole runs whose learner's ranks send to the engines' workers themselves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest

from asyncrl.core.runtime.faults import VARIABLE
from tests.system.parts.up_run import UpRun
from weight_sync.sync_records import JOURNAL_FILE

SETS = ("rollout.replicas=2", "eval.every_steps=0", "weight_sync.backend=direct")
DOOMED = 4


@pytest.mark.long
@pytest.mark.parametrize("curve", ["off", "on"])
def test_four_learner_ranks_send_to_two_engines(up: Callable[..., UpRun], curve: str) -> None:
    """With keys each pack has a tag."""
    layout = ("learner.tp=2", "learner.pp=2", "learner.cpus=0.25", "learner.steps=12")
    run = up(f"direct_{curve}", *SETS, *layout, f"launcher.curve={curve}")
    rounds = finish(run, num_steps=12)
    lanes = Counter(one["lane"] for one in rounds)
    assert lanes["DIRECT"] >= 8, lanes
    assert {one["cause"] for one in rounds} == {""}


@pytest.mark.long
def test_engines_that_die_while_they_receive_get_the_version_staged_and_the_next_ones_directly(
    up: Callable[..., UpRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines' processes are killed at their first pack of one version."""
    monkeypatch.setenv(VARIABLE, f"direct.sink.pack@{DOOMED}")
    rounds = finish(up("direct_kill", *SETS, "learner.steps=300"), num_steps=300)
    failed = [one["number"] for one in rounds if one["lane"] == "DIRECT" and one["cause"]]
    arrived = [one["number"] for one in rounds if one["lane"] == "DIRECT" and not one["cause"]]
    assert failed[0] == DOOMED and len(failed) <= 2, (
        "an engine that lives may be tried with a dead one once more"
    )
    assert min(arrived) < DOOMED < max(arrived)
    others = [one for one in rounds if one["lane"] != "DIRECT" and one["number"] >= DOOMED]
    assert {name for one in others for name in one["parts"]} == {"receiver.0", "receiver.1"}


@pytest.mark.long
def test_versions_go_directly_as_differences(up: Callable[..., UpRun]) -> None:
    """In bfloat16 at the default learning rate: about one element in a hundred changes in a step."""
    rates = (
        "model.dtype=bfloat16",
        "learner.lr=1e-6",
        "learner.warmup_steps=0",
        "weight_sync.encoding=delta",
    )
    run = up("direct_delta", *SETS, *rates, "learner.tp=2", "learner.cpus=0.25", "learner.steps=12")
    rounds = [one for one in finish(run, num_steps=12) if one["lane"] == "DIRECT"]
    shares = [one["num_bytes"] / one["version_bytes"] for one in rounds]
    print(f"share of the bytes of each version: {[round(share, 4) for share in shares]}")
    assert {one["cause"] for one in rounds} == {""}
    assert sum(share < 0.05 for share in shares) >= 6, shares
    assert max(shares) > 0.9, "the first one has no base"
    verified = run.command("verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def finish(run: UpRun, *, num_steps: int) -> list[dict]:
    """Wait for the end of a run in which nothing is lost; return its rounds."""
    code, output = run.finish()
    assert code == 0, output
    assert run.summary()["ledger_residue"] == 0 and len(run.rows()) == num_steps
    lines = (run.folder / JOURNAL_FILE).read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["kind"] == "round"]
