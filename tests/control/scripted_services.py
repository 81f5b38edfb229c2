"""Scripted stand-ins for a run's services, in threads: they follow a script and say so."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncrl.core.errors import ServiceFailed
from asyncrl.core.metrics.row_log import RowLog
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.rpc.message import Message
from asyncrl.core.service import ServiceContext
from asyncrl.core.service_command import (
    AnyCommand,
    Drain,
    HandOverRows,
    Rows,
    Standing,
    StepsDone,
    WriteCheckpoint,
    unknown_command,
)
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import GuardFinding, RedisJournalStatus, ServiceStatus
from tests.statuses import status_of

ROW = {
    "critic/rewards/mean": 0.5,
    "staleness/lag_mean": 1.0,
    "staleness/lag_max_trained": 2,
    "staleness/trained_tokens": 90,
    "staleness/masked_tokens": 10,
    "actor/entropy": 1.0,
    "timing_s/step": 0.5,
    "timing_s/wait": 0.2,
    "perf/total_num_tokens": 100,
    "perf/learner_tokens_per_s": 200.0,
}


class Scripted:
    """Waits for its end; `drain` is an end too."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self._drained = threading.Event()

    def run(self, stop: threading.Event) -> None:
        while not (stop.wait(0.01) or self._drained.is_set()):
            self.work()

    def work(self) -> None:
        """Do one bit of the script."""

    def status(self) -> ServiceStatus:
        if self.context.kind != "rollout":
            return self.tell()
        return self.tell(version=1, tokens=10, busy_s=1.0, idle_s=1.0)

    def tell(self, state: str = "READY", **values: Any) -> ServiceStatus:
        """Return a status of the service's kind."""
        return status_of(self.context.name, values, state=state)

    def command(self, command: AnyCommand) -> Message:
        if isinstance(command, Drain):
            self._drained.set()
            return Standing(ServiceState.DRAINING)
        raise unknown_command("a scripted service", command)


class ScriptedLearner(Scripted):
    """Takes a step each time it works, to `learner.steps`."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.rows: list[dict[str, Any]] = []

    def run(self, stop: threading.Event) -> None:
        while len(self.rows) < self.context.config.learner.steps and not stop.wait(0.01):
            self.rows.append({"training/global_step": len(self.rows) + 1, **ROW})

    def status(self) -> ServiceStatus:
        return self.tell(step=len(self.rows), last_evaluation=1)

    def command(self, command: AnyCommand) -> Message:
        assert isinstance(command, HandOverRows)
        return Rows(command.after, tuple(self.rows[command.after :]))


class WarnedLearner(ScriptedLearner):
    """Its guard has found one thing for each of the first steps."""

    def status(self) -> ServiceStatus:
        texts = [f"step {step}: large_steps: actor/step_kl is 0.3" for step in range(min(2, len(self.rows)))]
        findings = [GuardFinding(step + 1, step, "large_steps", text) for step, text in enumerate(texts)]
        return replace(super().status(), findings=tuple(findings))


class PacedLearner(ScriptedLearner):
    """Waits after step 5 for the file `go-on`; a second incarnation goes on from the checkpoint of step 2."""

    def run(self, stop: threading.Event) -> None:
        folder = self.context.run_dir
        mark = folder / "second-incarnation"
        self.incarnation, first = int(mark.exists()), 3 if mark.exists() else 1
        mark.touch()
        for step in range(first, self.context.config.learner.steps + 1):
            while step == 6 and not (folder / "go-on").exists() and not stop.is_set():
                stop.wait(0.01)
            if stop.wait(0.01):
                return
            row = {**ROW, "timing_s/step": time.time(), "incarnation": self.incarnation}
            self.rows.append({"training/global_step": step, **row})

    def status(self) -> ServiceStatus:
        step = self.rows[-1]["training/global_step"] if self.rows else 0
        return replace(super().status(), step=step)


class AskedLearner(PacedLearner):
    """Writes down which of its incarnations was asked for a checkpoint at which step, and writes none."""

    def command(self, command: AnyCommand) -> Message:
        if not isinstance(command, WriteCheckpoint):
            return super().command(command)
        step = self.status().step
        with (self.context.run_dir / "asked").open("a") as file:
            file.write(f"{self.incarnation}:{step} ")
        return StepsDone(step)


class MuteLearner(PacedLearner):
    """Writes its rows into its log, and hands none over in the incarnations that the file `mute` names."""

    def run(self, stop: threading.Event) -> None:
        self.rows = LoggedRows(self.context.run_dir)
        super().run(stop)

    def command(self, command: AnyCommand) -> Message:
        is_mute = str(self.incarnation) in (self.context.run_dir / "mute").read_text()
        return Rows(0, ()) if is_mute else super().command(command)


class LoggedRows(list[dict[str, Any]]):
    """Rows that are written down as a learner's are."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._log = RowLog(run_dir)

    def append(self, row: dict[str, Any]) -> None:
        row = {"time": time.time(), **row}
        self._log.add(row)
        super().append(row)


class ScriptedBuffer(Scripted):
    """Shows one finished evaluation and a clean ledger; the last ticket is trained as it stops."""

    def run(self, stop: threading.Event) -> None:
        super().run(stop)
        self.trained = 6

    trained = 5

    def status(self) -> ServiceStatus:
        metrics = {"accuracy": 0.25, "val-core/held_out/acc/mean@1": 0.25, "val-aux/num_prompts": 4.0}
        evaluation = {"id": 1, "step": 0, "version": 1, "metrics": metrics}
        ledger = {"residue": 0, "issued": 5, "trained": self.trained, "dropped": {}}
        return self.tell(evaluations=[evaluation], **ledger)


class LateEvaluation(ScriptedBuffer):
    """Its evaluation is done only when the training has been for a while."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._num_asked = 0

    def status(self) -> ServiceStatus:
        self._num_asked += 1
        status = super().status()
        return status if self._num_asked > 4 else replace(status, evaluations=())


class PoisonedBuffer(ScriptedBuffer):
    """Nothing was ever trained, and many prompts were given up."""

    def status(self) -> ServiceStatus:
        return replace(super().status(), trained=0, dropped={"poison": 32})


class WaitingLearner(Scripted):
    """Never gets a batch."""

    def status(self) -> ServiceStatus:
        return self.tell(step=0, last_evaluation=0)

    def command(self, command: AnyCommand) -> Message:
        return Rows(0, ())


class SlowSaver(WaitingLearner):
    """Has trained a step; ends once asked to and `may-save` is there, and fails if that has words in it."""

    step = 1

    def status(self) -> ServiceStatus:
        return replace(super().status(), step=self.step, resumed_step=0)

    def run(self, stop: threading.Event) -> None:
        may_save = self.context.run_dir / "may-save"
        stop.wait()
        while not may_save.exists():
            time.sleep(0.01)
        if words := may_save.read_text():
            raise OSError(words)


class HeldUpSaver(SlowSaver):
    """As SlowSaver, and reports a full disk all the while."""

    def status(self) -> ServiceStatus:
        full = Obstacle("", Cause.DISK_FULL, "OSError: no space left on device")
        return replace(super().status(), obstacles=(full,))


class NothingToSave(SlowSaver):
    """As SlowSaver, but before its first step."""

    step = 0


def make_ranked_learner(context: ServiceContext) -> Scripted:
    """Return a leader that takes its steps, or a rank that goes on until it is stopped."""
    return WaitingLearner(context) if context.rank else ScriptedLearner(context)


class SlowLeaver(Scripted):
    """Drains only when its file `may-leave` is there."""

    def run(self, stop: threading.Event) -> None:
        may_leave = self.context.run_dir / "may-leave"
        while not stop.wait(0.01) and not (self._drained.is_set() and may_leave.exists()):
            pass


class FailingReplica(Scripted):
    """Fails as soon as it runs."""

    def run(self, stop: threading.Event) -> None:
        raise FileNotFoundError("no tokenizer in the model folder")


class DyingEngine(Scripted):
    """Its engine dies as soon as it is up, and says why."""

    def run(self, stop: threading.Event) -> None:
        time.sleep(0.05)
        raise ServiceFailed("the engine died: ValueError: head_dim=16 is not supported")


class RefusingReplica(Scripted):
    """Takes no version: its loads fail, one more each time that it is asked."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._num_refused = 0

    def status(self) -> ServiceStatus:
        self._num_refused += 1
        reason = "vLLM refused the load of version 1: the probe does not match"
        refused = Obstacle("", Cause.WEIGHTS_REFUSED, reason, self._num_refused)
        return self.tell("SYNCING", version=0, obstacles=[refused])


class UnreachingSync(Scripted):
    """Versions reach no receiver: one transfer more has failed each time that it is asked."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._num_failed = 0

    def status(self) -> ServiceStatus:
        self._num_failed += 10
        reason = "a version did not reach it: no room for 4096 bytes in /dev/shm"
        failed = [
            Obstacle(f"receiver.{index}", Cause.WEIGHTS_UNDELIVERED, reason, self._num_failed)
            for index in range(2)
        ]
        return self.tell(obstacles=failed)


class GivingUpReplica(Scripted):
    """Its groups fail."""

    def status(self) -> ServiceStatus:
        failing = Obstacle("", Cause.GROUPS_FAIL, "the tool 'search' is not there", 96)
        return self.tell(obstacles=[failing])


class AwayBuffer(ScriptedBuffer):
    """Its journal is away until the file `journal-back` is there."""

    def status(self) -> ServiceStatus:
        away = Obstacle("", Cause.JOURNAL_AWAY, "Redis at localhost:1 is away: Connection refused")
        is_back = (self.context.run_dir / "journal-back").exists()
        return replace(super().status(), obstacles=() if is_back else (away,))


class LosingBuffer(ScriptedBuffer):
    """Its journal has lost what it held, once."""

    def status(self) -> ServiceStatus:
        losses = ("Redis at localhost:1 lost acknowledged data",)
        journal = RedisJournalStatus(redis="localhost:1", backlog=0, wiped=1, losses=losses)
        return replace(super().status(), journal=journal)


REPLACE = {
    "buffer": "scripted_services:ScriptedBuffer",
    "learner": "scripted_services:ScriptedLearner",
    "weight_sync": "scripted_services:Scripted",
    "publisher": "scripted_services:Scripted",
    "receiver": "scripted_services:Scripted",
    "rollout": "scripted_services:Scripted",
}


class Syncing(Scripted):
    """Never gets its first weights."""

    def status(self) -> ServiceStatus:
        return self.tell("SYNCING", version=0)


class StuckLeaver(Scripted):
    """Says that it drains, and never ends."""

    def status(self) -> ServiceStatus:
        is_draining = self._drained.is_set()
        return replace(super().status(), state=ServiceState.DRAINING) if is_draining else super().status()

    def run(self, stop: threading.Event) -> None:
        stop.wait()
