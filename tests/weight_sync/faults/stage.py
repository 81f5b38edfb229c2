"""A whole weight sync as real processes, a way to strike any of them at an exact point, and their return.

Owns the restarts: what was killed comes back as another process, what was stopped goes on.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.weight_sync.cluster import WAIT_S, Child, Cluster, Fault, Party, fork, wait_until
from tests.weight_sync.faults.cases import BUCKET_BYTES
from tests.weight_sync.faults.parties import EngineRole, LearnerRole, Load, run_engine, run_learner
from tests.weight_sync.faults.traces import state_of
from weight_sync.protocol.rounds import Timing

TIMING = Timing(deadline_s=3.5, offer_s=1.5, settle_s=0.75, silence_s=1.5, dead_s=60.0)
SLACK_S = 1.5
"""By how much a wait may outlast its deadline: the time until a loaded machine lets a process run."""
SERVICES = {"coordinator": "weight_sync.0", "publisher": "publisher.0"}


class Stage:
    """A coordinator, a publisher, a learner, and replicas: a receiver and an engine stand-in each."""

    def __init__(
        self,
        folder: Path,
        num_replicas: int = 2,
        timing: Timing = TIMING,
        parallelism: int = 4,
        faults: dict[str, Fault] | None = None,
        scale: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        load_s: float = 0.0,
        services: Sequence[str] = ("weight_sync.0", "publisher.0"),
    ) -> None:
        self.folder = folder
        self.timing = timing
        self._faults = faults or {}
        self._scale, self._load_s = scale, load_s
        self._token = 0
        self.others: dict[str, Party] = {}
        self.replicas: list[int] = []
        self._loads: defaultdict[int, list[Load]] = defaultdict(list)
        self._ends: Counter[int] = Counter()  # how far the loads of each replica were read
        self.cluster = Cluster(
            timing,
            socket_dir=folder,
            parallelism=parallelism,
            bucket_bytes=bucket_bytes,
            lost_s=timing.silence_s + timing.poll_s,
            services=services,
        )
        self.start("learner")
        for index in range(num_replicas):
            self.add_replica(index)

    # --- parties ----------------------------------------------------------------------------------

    def add_replica(self, index: int) -> None:
        """Start a receiver and the engine beside it."""
        self.start(f"receiver.{index}")
        self.start(f"engine.{index}")
        self.replicas.append(index)

    def remove_replica(self, index: int) -> None:
        """Let a replica leave as it does when the fleet shrinks."""
        self.replicas.remove(index)
        self.cluster.children[f"receiver.{index}"].client.call("drain", deadline_s=WAIT_S)
        for name in (f"engine.{index}", f"receiver.{index}"):
            self.party(name).end()

    def party(self, name: str) -> Party:
        return self.others.get(name) or self.service(name)

    def service(self, name: str) -> Child:
        return self.cluster.children[SERVICES.get(name, name)]

    def names(self) -> list[str]:
        """Return all parties that run now."""
        replicas = [f"{kind}.{index}" for index in self.replicas for kind in ("receiver", "engine")]
        return ["coordinator", "publisher", "learner", *replicas]

    def start(self, name: str) -> None:
        """Start a party, or start it again."""
        log_path = self.folder / f"{name}.log"
        if name == "learner":
            self._token += 1  # the ledger issues a new one with each start
            role = LearnerRole(
                self.cluster.address_of("publisher.0"),
                self.cluster.shm_prefix,
                self.cluster.bucket_bytes,
                self._token,
                log_path,
                self._scale,
            )
            self._start_other(name, run_learner, role)
        elif name.startswith("engine"):
            address = self.cluster.address_of(name.replace("engine", "receiver"))
            engine = EngineRole(address, self._loads_path(name), log_path, self._scale, self._load_s)
            self._start_other(name, run_engine, engine)
        elif fault := self._faults.pop(name, None):
            self.cluster.start(name, fault=fault)
        else:
            self.cluster.start(SERVICES.get(name, name))

    def _start_other(self, name: str, target: Callable[[Any, Connection], None], role: Any) -> None:
        process, lifeline = fork(target, role)
        self.others[name] = Party(process, lifeline)
        assert lifeline.poll(WAIT_S) and lifeline.recv() == "up", f"{name} did not start"

    # --- faults -----------------------------------------------------------------------------------

    def arm(self, witness: str, kind: str, point: str, victims: tuple[str, ...]) -> None:
        """Have `witness` strike `victims`, maybe itself, when it passes `point`."""
        pids = ",".join(str(self.party(victim).pid) for victim in victims)
        self.party(witness).arm(f"{kind}:{point}:{pids}")

    def wait_for_strike(self, *victims: str) -> None:
        for victim in victims:
            pid = self.party(victim).pid
            wait_until(lambda pid=pid: state_of(pid) in "TtZX", f"{victim} to be struck", 20.0)  # type: ignore[misc]

    def bring_back(self, *victims: str) -> None:
        """Start what was killed again; let go on what was stopped."""
        for victim in victims:
            party = self.party(victim)
            if state_of(party.pid) in "Tt":
                party.signal(signal.SIGCONT)
            else:
                party.process.join(WAIT_S)
                party.kill()
                self.start(victim)

    # --- versions ---------------------------------------------------------------------------------

    def tell_learner(self, number: int) -> None:
        """Order a publish and do not wait."""
        self.party("learner").lifeline.send(number)

    def hear_learner(self, wait_s: float = WAIT_S) -> tuple[str, float]:
        """Return the error of the oldest publish not heard of yet, or "", and its seconds."""
        lifeline = self.party("learner").lifeline
        assert lifeline.poll(wait_s), "the learner does not come back from its publish"
        error, seconds = lifeline.recv()
        return str(error), float(seconds)

    def publish(self, number: int) -> None:
        self.tell_learner(number)
        error, _ = self.hear_learner()
        assert not error, error

    def serve(self, number: int, wait_s: float = WAIT_S) -> None:
        """Publish a version and wait until all replicas serve it."""
        self.publish(number)
        self.wait_served(number, self.replicas, wait_s)

    def loads(self, index: int) -> list[Load]:
        """Return all loads of the engines that have run as replica `index`."""
        path, known = self._loads_path(f"engine.{index}"), self._loads[index]
        if path.exists():
            with path.open() as file:
                file.seek(self._ends[index])
                whole, _, _ = file.read().rpartition("\n")
            known += [Load(**json.loads(line)) for line in whole.splitlines()]
            self._ends[index] += len(whole) + bool(whole)
        return known

    def served(self, index: int) -> int:
        """Return the newest version that replica `index` has loaded whole, in any of its lives."""
        return max((load.number for load in self.loads(index) if load.ok), default=0)

    def wait_served(self, number: int, replicas: list[int], wait_s: float = WAIT_S) -> None:
        """Wait until `replicas` serve version `number` or a newer one."""
        wait_until(
            lambda: all(self.served(index) >= number for index in replicas),
            f"replicas {replicas} to serve version {number}",
            wait_s,
        )

    def _loads_path(self, engine: str) -> Path:
        return self.folder / f"{engine}.loads"

    # --- what was written down --------------------------------------------------------------------

    def log_of(self, name: str) -> str:
        path = self.folder / f"{SERVICES.get(name, name)}.log"
        return path.read_text() if path.exists() else ""

    def blamed(self) -> list[str]:
        """Return who was blamed for what, over all lives of the coordinator."""
        marks = [line.partition("blamed: ") for line in self.log_of("coordinator").splitlines()]
        return [cause for _, mark, cause in marks if mark]

    def hello_s(self, name: str) -> float:
        """Return when the coordinator heard the first hello of a receiver, by the machine's clock."""
        marks = [line.split() for line in self.log_of("coordinator").splitlines()]
        return next(float(words[0]) for words in marks if words[2:4] == ["hello", name])

    def states(self) -> set[str]:
        """Return the states in which the coordinator sees replicas."""
        return {member.state for member in self.status("coordinator").members.values()}

    def status(self, name: str) -> Any:
        return self.service(name).status()

    def end(self) -> None:
        """Let all end as the control plane does; each must end by itself."""
        names = [name for name in self.names() if name != "coordinator"]
        for name in names:
            self.party(name).signal(signal.SIGTERM)
        for name in [*names, "coordinator"]:
            party = self.party(name)
            if name == "coordinator":
                party.signal(signal.SIGTERM)
            party.process.join(WAIT_S)
            assert party.process.exitcode == 0, f"{name} ended with {party.process.exitcode}"

    def close(self) -> None:
        for party in self.others.values():
            party.kill()
        self.cluster.close()


@contextmanager
def running_stage(folder: Path, num_replicas: int = 2, **kwargs: Any) -> Iterator[Stage]:
    stage = Stage(folder, num_replicas, **kwargs)
    try:
        yield stage
    finally:
        stage.close()


def wait_seconds(seconds: float) -> None:
    """Let time pass, because the fault is that it passes."""
    time.sleep(seconds)
