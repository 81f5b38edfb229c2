"""A whole run whose journal is a Redis that the buffer starts: it trains, survives, ends clean, goes on."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.parts.up_run import QUICKSTART, UpRun, leftovers

CONFIG = QUICKSTART.with_name("quickstart_redis.yaml")


def server_of(run: UpRun) -> dict[str, object]:
    found: dict[str, object] = json.loads((run.folder / "buffer" / "redis" / "server.json").read_text())
    return found


DEADLINE_S = 600.0
"""Of a start on a busy machine and the steps after it: only a run that hangs takes longer."""
SETS = ("rollout.replicas=1", "eval.every_steps=0", "checkpoint.every_steps=4")


@pytest.mark.long
def test_a_run_with_a_managed_redis_trains_through_the_servers_death_and_ends_clean(
    up: Callable[..., UpRun],
) -> None:
    run = up("redis", "learner.steps=60", *SETS, config=CONFIG)
    run.wait_for(lambda status: status["step"] >= 2, deadline_s=DEADLINE_S)
    server = server_of(run)
    os.kill(int(str(server["pid"])), signal.SIGKILL)
    code, output = run.finish(DEADLINE_S)
    assert code == 0, output
    assert len(run.rows()) == 60
    assert run.summary()["ledger_residue"] == 0
    log = (run.folder / "logs" / "buffer.0.log").read_text()
    assert "is away" in log and "is back" in log and "lost acknowledged data" not in log
    assert server_of(run)["pid"] != server["pid"]
    assert not Path(f"/proc/{server_of(run)['pid']}").exists()
    assert stat.S_IMODE((run.folder / "resolved.yaml").stat().st_mode) == 0o600
    assert leftovers(run.folder) == []
    password = str(server["password"]).encode()
    logs = [path for path in (run.folder / "logs").iterdir() if path.is_file()]
    assert logs and not [path for path in logs if password in path.read_bytes()]


@pytest.mark.long
def test_a_run_with_a_managed_redis_goes_on_where_it_ended(up: Callable[..., UpRun]) -> None:
    for num_steps in (8, 12):
        run = up("redis_resumed", f"learner.steps={num_steps}", *SETS, config=CONFIG)
        code, output = run.finish(DEADLINE_S)
        assert code == 0, output
        assert run.rows()[-1]["training/global_step"] == num_steps
        assert run.summary()["ledger_residue"] == 0
    assert len(run.rows()) == 12
