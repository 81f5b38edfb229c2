"""Runs that are held up say so at once, in the words of who met it, and end where nobody can go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.cli.reports.weights import inspect_weights
from asyncrl.control.phases import ANSWERS_WAIT
from asyncrl.control.record.events import load_events
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.runtime.faults import VARIABLE
from tests.small_disk import fill
from tests.system.parts.up_run import QUICKSTART, UpRun

pytestmark = pytest.mark.long
QUICK = ("rollout.replicas=1", "rollout.engine=scripted", "eval.every_steps=0", "learner.steps=1000")
SOON_S = 10.0
HANGS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(3600)
    return 1.0
"""


def held_up_by(run: UpRun, cause: str, caused_at: Callable[[], float]) -> dict[str, Any]:
    """Wait for an obstacle; check that it is everywhere within `SOON_S` of its cause, and return it.

    Everywhere: a line on the terminal, the snapshot, the page as it is served, an event.
    """

    def finds(status: dict[str, Any]) -> bool:
        return any(one["cause"] == cause for one in status["obstacles"])

    status, seen_at = run.wait_for(finds, 400.0), time.time()
    found: dict[str, Any] = next(one for one in status["obstacles"] if one["cause"] == cause)
    shown = {one["text"].rstrip(".").lower() for one in run.page_view()["obstacles"]}  # a sentence there
    shown_at = time.time()
    told = [found, *(one for one in run.status()["obstacles"] if one["cause"] == cause)]
    assert shown & {one["reason"].rstrip(".").lower() for one in told}, "the first reason, or the next"
    (event, *_) = [one for one in obstacles_of(run) if one["cause"] == cause]
    assert event["service"] == found["service"] and event["time"] - found["since"] < 1.0
    told_at = run.told_at("! ", event["text"][:40])
    times = {"event": event["time"], "snapshot": seen_at, "page": shown_at, "terminal": told_at}
    after = {where: round(at - caused_at(), 1) for where, at in times.items()}
    print(f"{cause}: seconds after the cause: {after}")
    assert max(after.values()) < SOON_S, after
    return found


def obstacles_of(run: UpRun) -> list[dict[str, Any]]:
    return [one for one in load_events(RunDir(run.folder).events) if one["kind"] == "obstacle"]


def met_at(run: UpRun, sentence: str) -> float:
    """Return when the replica first warned of it, in seconds of the wall clock, rounded down."""
    log = (run.folder / "logs" / "rollout.0.log").read_text()
    met = next(line for line in log.splitlines() if sentence in line and " WARNING " in line)
    return time.mktime(time.strptime(met[:19], "%Y-%m-%d %H:%M:%S"))


def check_goes_on(run: UpRun, cause: str) -> None:
    """The obstacle is over, the run trains on, and `down` ends it in order with nothing lost."""
    step = run.status()["step"]
    run.wait_for(lambda s: s["step"] >= step + 3 and not s["obstacles"])
    run.wait_for(lambda _: any(one["cause"] == cause and one["is_over"] for one in obstacles_of(run)))
    assert run.status()["ledger"]["residue"] == 0
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output


def check_ended(run: UpRun, sentence: str) -> str:
    """The run ends by itself, with exit code 1 and the sentence, which stood on the terminal before."""
    code, output = run.finish()
    assert code == 1, output
    told, _, paragraph = output.partition("the run failed in ")
    assert any(line.startswith("! ") and sentence in line for line in told.splitlines()), output
    assert sentence in paragraph.split("The last lines of")[0], output
    return output


def test_a_run_whose_engines_refuse_every_version_ends_with_the_engines_reason(
    up: Callable[..., UpRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "engine.load")  # each load, at its first tensor, in vLLM's own worker
    sentence = "was told to fail at tensor 0"
    run = up("refused", "rollout.replicas=1", "eval.every_steps=0", "learner.steps=1000")
    found = held_up_by(run, "weights_refused", lambda: met_at(run, sentence))
    assert found["blocks"] and sentence in found["reason"]
    output = check_ended(run, sentence)
    assert "can take no version, nor can another replica" in output
    weights = inspect_weights(run.folder)
    assert weights.counters["rounds_failed"] >= 1 and weights.counters["failed_loads"] >= 6
    assert weights.rounds[0].parts == {"receiver.0": "REFUSED"}
    monkeypatch.delenv(VARIABLE)  # it is mended
    code, output = up("refused", "rollout.replicas=1", "eval.every_steps=0", "learner.steps=4").finish()
    assert code == 0, output
    assert len(run.rows()) == 4 and run.summary()["ledger_residue"] == 0


def test_a_reward_that_hangs_is_told_of_and_ends_the_run(up: Callable[..., UpRun], tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGS)
    reward = f"reward.fn={{fn: '{tmp_path / 'hanging.py'}:compute_score', deadline_s: 5}}"
    run = up("hanging", *QUICK, reward)
    sentence = "took longer than 5 s"
    found = held_up_by(run, "rewards_fail", lambda: met_at(run, sentence))
    assert found["blocks"] and sentence in found["reason"]
    output = check_ended(run, sentence)
    assert "answers could not be scored" in output


def test_a_reward_that_hangs_shows_before_its_deadline(up: Callable[..., UpRun], tmp_path: Path) -> None:
    """That of a run that names none is a minute: nobody is left to guess for so long."""
    (tmp_path / "hanging.py").write_text(HANGS)
    run = up("hanging-long", *QUICK, f"reward.fn={tmp_path / 'hanging.py'}:compute_score")
    ready = run.wait_for(lambda s: s["services"].get("rollout.0", {}).get("state") == "READY", 400.0)
    ready_at = time.time()
    assert ready["step"] == 0
    assert run.told_at(ANSWERS_WAIT) - ready_at < SOON_S
    status = run.status()
    assert (status["phase"], status["bottleneck"]["who"]) == (ANSWERS_WAIT, "reward")
    view = run.page_view()
    assert view["phase"] == ANSWERS_WAIT and "Answers wait for their rewards" in view["bottleneck"]["why"]
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output


def test_a_gateway_that_no_agent_asks_says_so_until_one_does(up: Callable[..., UpRun]) -> None:
    run = up("lonely", "rollout.replicas=1", "eval.every_steps=0", "rollout.gateway={port: 0}")

    def ready_at() -> float:
        events = load_events(RunDir(run.folder).events)
        return float(next(one["time"] for one in events if one["service"] == "replica.0"))

    found = held_up_by(run, "no_agent", ready_at)
    gateway = run.status()["services"]["rollout.0"]["gateway"]
    assert found["blocks"] and f"no agent asks for a session at {gateway} (POST /sessions)" in found["reason"]
    assert httpx.post(f"{gateway}/sessions", json={"wait_s": 30}, timeout=60.0).status_code == 200
    run.wait_for(lambda status: not status["obstacles"])
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output


def test_a_redis_that_dies_is_told_of_until_it_is_back(
    up: Callable[..., UpRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer(tmp_path / "redis", "always")
    server.ensure()
    try:
        config = QUICKSTART.with_name("quickstart_redis.yaml")
        monkeypatch.setenv("REDIS_URL", server.url)
        run = up("orphaned", *QUICK, "buffer.url=${REDIS_URL}", config=config)
        run.wait_for(lambda status: status["step"] >= 3)
        pid, killed_at = server.pid, time.time()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        found = held_up_by(run, "journal_away", lambda: killed_at)
        assert found["blocks"] and "Redis at redis://127.0.0.1:" in found["reason"]
        assert "nobody listens" in found["reason"], "it is this user's own: the kernel says who listens"
        server.ensure()
        check_goes_on(run, "journal_away")
    finally:
        server.stop()


@pytest.mark.parametrize("small_disk", [96], indirect=True)
def test_a_full_disk_is_told_of_until_there_is_room(up: Callable[..., UpRun], small_disk: Path) -> None:
    run = up("filled", *QUICK, f"run.dir={small_disk}")
    run.folder = small_disk / "filled"
    run.wait_for(lambda status: status["step"] >= 3)
    fill(small_disk / "ballast")
    filled_at = time.time()
    found = held_up_by(run, "disk_full", lambda: filled_at)
    assert found["blocks"] and str(small_disk) in found["reason"]
    assert "No space left" in found["reason"] or "disk is full" in found["reason"]  # SQLite's words
    (small_disk / "ballast").unlink()
    check_goes_on(run, "disk_full")
