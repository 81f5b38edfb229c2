"""The policies `drop` and `wait` in a service over sockets, its journal verified afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.buffer.composition import build
from asyncrl.buffer.messages import LeaseGrant
from asyncrl.cli.audit.report import verify_run
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service import ServiceContext
from tests.buffer.parts import GROUP_SIZE, make_group


@contextlib.contextmanager
def served(runs_dir: Path, policy: str) -> Iterator[str]:
    """Serve a run with bound 1 and batches of 2 as its configuration says; yield the address."""
    config = Config.model_validate(
        {
            "run": {"name": "told", "dir": str(runs_dir)},
            "model": {"path": "builtin:digit_sort"},
            "data": {"train": "builtin:digit_sort"},
            "reward": {"fn": "gsm8k"},
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": 32},
            "learner": {"groups_per_step": 2},
            "staleness": {"max_lag": 1, "policy": policy, "max_wait_s": 60.0},
        }
    )
    folder = runs_dir / "told"
    folder.mkdir()
    (folder / "resolved.yaml").write_text(dump_resolved(config))
    service = build(ServiceContext(config, "buffer.0", folder, "id"))
    stop = ThreadEvent()
    thread = threading.Thread(target=service.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield service.address
    finally:
        stop.set()
        thread.join(60.0)
        assert not thread.is_alive()


class Parties:
    """A replica with a straggler in its hands, and a learner."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.learner = LearnerClient(address)
        self.learner.open("learner.0")
        self._version = self.learner.register_version(0)
        self._replica = self._do(self._connect(address))

    def _do(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    async def _connect(self, address: str) -> ReplicaClient:
        replica = ReplicaClient(address, "a")
        await replica.describe_data(100, "digest")
        return replica

    def lease(self) -> LeaseGrant:
        (grant,) = self._do(self._replica.lease(self._version, 1, 5.0)).grants
        return grant

    def push(self, grant: LeaseGrant, version: int) -> None:
        assert self._do(self._replica.push(make_group(grant.ticket, grant.attempt, version))) == "stored"

    def fill(self, num_groups: int) -> None:
        for _ in range(num_groups):
            self.push(self.lease(), self._version)

    def train(self, step: int) -> list[int]:
        """Train a step whose batch is complete; return its tickets."""
        batch = self.learner.reserve(step, 5.0)
        assert batch is not None
        numbers = [one.ticket for one in batch.tickets]
        groups = self.learner.fetch(numbers)
        spans = [span for one in groups for part in one.trajectories for span in part.spans]
        self.learner.trained(step, lag_max=max(step - batch.step_of_version[span.version] for span in spans))
        self._version = self.learner.register_version(step + 1)
        return numbers

    def close(self) -> None:
        self._do(asyncio.sleep(0))
        self._replica.close()
        self.learner.close()
        self._loop.close()


def sound_account(runs_dir: Path) -> dict[str, Any]:
    """Verify the run's journal; return its account."""
    found = verify_run("told", str(runs_dir))
    assert found["findings"] == []
    assert found["lag_max_trained"] <= 1
    account: dict[str, Any] = found["account"]
    return account


def test_under_drop_a_straggler_over_age_is_dropped_and_its_prompt_trains_later(tmp_path: Path) -> None:
    with served(tmp_path, "drop") as address, contextlib.closing(Parties(address)) as parties:
        slow = parties.lease()
        for step in range(2):
            parties.fill(2)
            parties.train(step)
        parties.push(slow, version=1)
        assert parties.learner.reserve(2, 0.0) is None, "over age at step 2: dropped, not trained"
        parties.fill(2)
        assert slow.ticket not in parties.train(2)
        assert parties.learner.status().dropped == {"stale": 1}
    account = sound_account(tmp_path)
    assert account["dropped"]["stale"] == 1
    assert (account["trained"], account["residue"]) == (6, 0)


def test_under_wait_a_step_waits_for_a_straggler_at_the_bound_and_trains_it(tmp_path: Path) -> None:
    with served(tmp_path, "wait") as address, contextlib.closing(Parties(address)) as parties:
        slow = parties.lease()
        parties.fill(2)
        parties.train(0)
        parties.fill(2)
        assert parties.learner.reserve(1, 0.2) is None, "complete, and waiting for the straggler"
        parties.push(slow, version=1)
        assert slow.ticket in parties.train(1)
    account = sound_account(tmp_path)
    assert not any(account["dropped"].values())
    assert (account["trained"], account["residue"]) == (4, 0)
