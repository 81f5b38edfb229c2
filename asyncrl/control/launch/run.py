"""Starting a run from the terminal's side, and watching it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.conflicts import WITH_GREEDY, WITH_VALUES
from asyncrl.config.load import dump_resolved, load_resolved
from asyncrl.config.tree import Config, CriticSection, ModelSection, RewardPart
from asyncrl.control import plan, prepare, shared_memory
from asyncrl.control.api.client import NotRunning, connect
from asyncrl.control.launch.processes import end_leftovers, is_alive, remove_leftovers
from asyncrl.control.launch.spec import RUN_VARIABLE
from asyncrl.control.record.rundir import RunDir, read_json, write_json
from asyncrl.errors import ConfigError, RemoteError

SAME_ON_RESUME = (
    ("run", "seed"),
    ("model", "path"),
    ("data", "train"),
    ("data", "order"),
    ("rollout", "group_size"),
    ("learner", "groups_per_step"),
)
"""What a run's journal and checkpoints depend on: it may not change between two starts."""

FetchedSection = ModelSection | CriticSection
"""The sections whose `path` may be a hub id."""


@dataclass
class RunHandle:
    """A run that this terminal started and watches."""

    folder: RunDir
    head: subprocess.Popen[bytes]
    run_id: str
    sockets: Path

    def poll(self) -> dict[str, Any]:
        """Return the newest snapshot; before there is one, a state of `starting`."""
        client = connect(self.folder)
        try:
            return client.status() if client is not None else {"state": "starting"}
        except (NotRunning, RemoteError):
            return {"state": "stopping"}

    @property
    def is_over(self) -> bool:
        return self.head.poll() is not None

    def ask_stop(self) -> None:
        """Ask the run to checkpoint and end; harmless when it is ending already."""
        client = connect(self.folder)
        try:
            if client is not None:
                client.stop()
            else:
                self.head.terminate()  # it has no services yet
        except (NotRunning, RemoteError):
            pass  # it is ending

    def stop(self, deadline_s: float) -> None:
        """Ask the run to end, wait, and end what is left of it after the deadline."""
        self.ask_stop()
        end = time.monotonic() + deadline_s
        while not self.is_over and time.monotonic() < end:
            time.sleep(0.1)
        if not self.is_over:
            self.head.kill()
        self.head.wait(10.0)
        end_leftovers(self.run_id)
        remove_leftovers(self.run_id, self.sockets)

    def result(self) -> dict[str, Any]:
        """Return the outcome: `state` is finished, stopped or failed; with `error`, `service`, `tail`."""
        outcome = read_json(self.folder.outcome)
        if outcome is not None:
            return outcome
        tail = self.folder.tail("head.0")
        return {"state": "failed", "error": "the head process died", "service": "head.0", "tail": tail}


def start(config: Config, say: Callable[[str], None] = lambda sentence: None) -> RunHandle:
    """Check, prepare and start a run.

    Args:
        config: As loaded; paths may still be relative or built-in.
        say: Told, in a sentence, about work that takes time.

    Raises:
        ConfigError: Something that it names is missing or does not fit; nothing was started.
    """
    plan.check(config)
    config = keep_revisions(config)
    config = prepare.prepare(config, say)
    need = plan.check(config).shared_memory
    if need is not None:
        say(need.describe(shared_memory.free_bytes()))
    folder = RunDir(Path(config.run.dir) / config.run.name)
    _refuse_second_start(folder)
    _refuse_other_lineage(folder, config)
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.outcome.unlink(missing_ok=True)
    if config.buffer.journal == "none":  # nothing to go on from: a new history
        folder.metrics.unlink(missing_ok=True)
    folder.resolved.touch()
    folder.resolved.chmod(0o600)  # buffer.url may hold a password
    folder.resolved.write_text(dump_resolved(config))
    run_id = uuid.uuid4().hex[:8]
    sockets = Path(tempfile.gettempdir()) / f"asyncrl-{run_id}"
    live = {
        "run_id": run_id,
        "key": uuid.uuid4().hex,
        "sockets": str(sockets),
        "pid": 0,
        "url": "",
        "began": time.time(),
    }
    write_json(folder.live, live, mode=0o600)
    with folder.log("head.0").open("ab") as log_file:
        head = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.control.launch.head", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
            env={**os.environ, RUN_VARIABLE: run_id},
        )
    return RunHandle(folder, head, run_id, sockets)


def keep_revisions(config: Config) -> Config:
    """Return `config` with the revisions that an earlier life of the run fetched, where it names none.

    The hub may have moved on since; a run goes on from the models that it began with.
    """
    resolved = RunDir(Path(config.run.dir).absolute() / config.run.name).resolved
    if not resolved.exists():
        return config
    before = load_resolved(resolved.parent)
    rewards = tuple(_keep_reward_revision(part, before.reward.fn) for part in config.reward.fn)
    kept = {
        "reward": config.reward.model_copy(update={"fn": rewards}),
        "model": _keep_revision(config.model, before.model),
        "critic": _keep_revision(config.critic, before.critic),
    }
    return config.model_copy(update=kept)


def _keep_revision(section: FetchedSection, before: FetchedSection) -> FetchedSection:
    if section.path is None or not prepare.is_hub_id(section.path):
        return section
    return section.model_copy(update={"path": prepare.pin_revision(section.path, before.path or "")})


def _keep_reward_revision(part: RewardPart, before: Sequence[RewardPart]) -> RewardPart:
    path = part.arguments.get("path")
    if part.fn != prepare.REWARD_MODEL or not isinstance(path, str) or not prepare.is_hub_id(path):
        return part
    for earlier in before:
        if earlier.fn == prepare.REWARD_MODEL:
            path = prepare.pin_revision(path, str(earlier.arguments.get("path", "")))
    return RewardPart.model_validate(part.model_dump() | {"path": path})


def finished_run(config: Config) -> RunDir | None:
    """Return the folder of a run of this name that has done all of its steps already, else None."""
    folder = RunDir(Path(config.run.dir).absolute() / config.run.name)
    outcome, summary = read_json(folder.outcome), read_json(folder.summary)
    is_finished = outcome is not None and outcome["state"] == "finished" and summary is not None
    return folder if is_finished and (summary or {})["steps"] >= config.learner.steps else None


def _refuse_second_start(folder: RunDir) -> None:
    live = read_json(folder.live)
    if live is not None and is_alive(live["pid"], live["run_id"]):
        raise ConfigError(
            f"run.name: the run in {folder.path} is live (pid {live['pid']})",
            hint="Watch it with 'asyncrl status', end it with 'asyncrl down', or choose another run.name",
        )
    if live is not None:
        end_leftovers(live["run_id"])
        remove_leftovers(live["run_id"], Path(live["sockets"]))


def _value(config: Config, section: str, name: str) -> object:
    return getattr(getattr(config, section), name)


def _refuse_other_lineage(folder: RunDir, config: Config) -> None:
    if not folder.resolved.exists():
        return
    before = load_resolved(folder.path)
    changed = [
        f"{section}.{name}: was {old!r}, is {new!r}"
        for section, name in SAME_ON_RESUME
        if (old := _value(before, section, name)) != (new := _value(config, section, name))
    ]
    old, new = before.algorithm.advantage, config.algorithm.advantage
    if new in WITH_GREEDY and old not in WITH_GREEDY:  # the journal holds groups without a greedy answer
        changed.append(f"algorithm.advantage: was {old!r}, is {new!r}, which needs a greedy answer per group")
    was, now = before.critic.path, config.critic.path
    if new in WITH_VALUES and (old not in WITH_VALUES or was != now):  # checkpoints hold its weights
        changed.append(f"critic: was {was!r} under {old}, is {now!r} under {new}")
    if changed:
        raise ConfigError(
            f"the run in {folder.path} cannot go on with other values:\n" + "\n".join(changed),
            hint="Choose another run.name, or remove that folder",
        )
