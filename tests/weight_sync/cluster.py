"""The three services as real processes, forked from one server that has torch imported already.

Every child ends with its test: it is killed by pid, and its segments are removed.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.core.config.tree import Config
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.faults import VARIABLE
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.sockets.keys import RunKeys
from asyncrl.core.staleness import PolicyVersion
from asyncrl.core.status.service import MemberStatus, kind_of
from asyncrl.core.status.statuses import KINDS
from weight_sync import composition, control_composition
from weight_sync.memory import segments
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.staging import Staged, open_tensors
from weight_sync.protocol.rounds import Timing
from weight_sync.publisher_client import PublisherClient

WAIT_S = 60.0
TIMING = Timing(deadline_s=10.0, offer_s=5.0, settle_s=1.0, silence_s=6.0, dead_s=60.0)
"""For parties that live: on a busy machine one may say nothing for seconds."""
HASTY: dict[str, Any] = {
    "timing": Timing(deadline_s=8.0, offer_s=3.0, settle_s=2.0, silence_s=2.0, dead_s=30.0),
    "lost_s": 2.0,
}
"""For tests in which a party is lost: they wait until the others have noticed."""

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.weight_sync.cluster", "tests.weight_sync.faults.parties"])


@dataclass(frozen=True)
class Fault:
    """What a receiver does to itself when it has received `bucket` of version `number`; None is any."""

    kind: str
    number: int | None
    bucket: int | None = 0
    seconds: float = 0.0
    gate: Path | None = None
    """What `hold` waits at, for as long as the file is there; it makes it itself."""

    def __call__(self, number: int, bucket: int, data: torch.Tensor) -> None:
        if self.number not in (None, number) or self.bucket not in (None, bucket):
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "flip":
            data[7] ^= 1
        elif self.kind == "slow":
            time.sleep(self.seconds)
        elif self.kind == "hold":
            assert self.gate is not None
            self.gate.touch()
            gate = self.gate
            wait_until(lambda: not gate.exists(), "the test to let it go on")


def _no_fault(number: int, bucket: int, data: torch.Tensor) -> None:
    return


@dataclass(frozen=True)
class Role:
    """What a child runs."""

    context: ServiceContext
    timing: Timing
    fault: Callable[[int, int, torch.Tensor], None] = _no_fault
    num_segments: int = 3
    lost_s: float = 2.0
    log_path: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    node: str | None = None


def serve(role: Role, test: Connection) -> None:
    """Entry of a child process."""
    os.environ.update(role.environment)
    stop = prepare_child(role.log_path)
    if role.context.kind == "weight_sync":
        service: Any = control_composition.build_coordinator(role.context, role.timing)
    elif role.context.kind == "publisher":
        service = composition.build_publisher(role.context, role.num_segments, role.node)
    else:
        service = composition.build_receiver(role.context, role.lost_s, role.fault, role.node)
    test.send(service.status().address)
    threading.Thread(target=follow_test, args=(test, stop), daemon=True).start()
    service.run(stop)


def prepare_child(log_path: Path | None) -> threading.Event:
    """Return the event that SIGTERM sets; log to `log_path`, stamped with the machine's monotonic clock."""
    torch.set_num_threads(1)
    stop = ThreadEvent()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if log_path is not None:
        handler = logging.FileHandler(log_path)
        handler.setFormatter(_MonotonicFormatter("%(name)s %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    return stop


class _MonotonicFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{time.monotonic():.3f} {super().format(record)}"


def follow_test(test: Connection, stop: threading.Event) -> None:
    """Take up the environment that the test sends; its end of the pipe closing is the sign to end."""
    try:
        while True:
            os.environ.update(test.recv())
            test.send("armed")
    except (EOFError, OSError):
        stop.set()


def fork(target: Callable[[Any, Connection], None], role: Any) -> tuple[Any, Connection]:
    """Start a child that runs `target`; return it and this side of its pipe."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=target, args=(role, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


@dataclass
class Party:
    """One running process and the pipe to it, which ends it when it closes."""

    process: Any
    lifeline: Connection

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def arm(self, fault: str) -> None:
        """Have it strike at a point that it will pass, see `asyncrl.core.runtime.faults`."""
        self.lifeline.send({VARIABLE: fault})
        assert self.lifeline.poll(WAIT_S), "the child did not take up its fault"
        self.lifeline.recv()

    def kill(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
            self.process.join(WAIT_S)
        self.lifeline.close()

    def end(self) -> None:
        """Ask it to stop, as the control plane does."""
        self.signal(signal.SIGTERM)
        self.process.join(WAIT_S)
        assert self.process.exitcode == 0


@dataclass
class Child(Party):
    """One running service."""

    kind: str
    address: str
    client: Client

    def status(self) -> Any:
        """Return the status of its kind."""
        told = self.client.call("status", deadline_s=WAIT_S).args
        return msgspec.convert(told, KINDS[self.kind])

    def kill(self) -> None:
        super().kill()
        self.client.close()


class Cluster:
    """A coordinator, a publisher and receivers of one run.

    Args:
        node_of: Returns the node's mark of a service; by default each is on a node of its own, so that bytes
            are sent. None lets it look for one.
    """

    def __init__(
        self,
        timing: Timing = TIMING,
        num_segments: int = 3,
        bucket_bytes: int = 4096,
        parallelism: int = 1,
        socket_dir: Path | None = None,
        lost_s: float = 8.0,
        services: Sequence[str] = ("weight_sync.0", "publisher.0"),
        encoding: str = "full",
        run_id: str = "",
        keys: RunKeys | None = None,
        folder: str | None = None,
        node_of: Callable[[str], str | None] = str,
        num_stripes: int = 1,
    ) -> None:
        self._num_stripes = num_stripes
        self._node_of = node_of
        self._socket_dir = socket_dir
        self._lost_s = lost_s
        self.timing = timing
        self.bucket_bytes = bucket_bytes
        self.children: dict[str, Child] = {}
        self._handoffs: list[PublisherClient] = []
        config = Config.model_validate(
            {
                "model": {"path": "builtin:digit_sort"},
                "data": {"train": "builtin:digit_sort"},
                "reward": {"fn": "digit_sort"},
                "weight_sync": {
                    "deadline_s": timing.deadline_s,
                    "bucket_bytes": bucket_bytes,
                    "parallelism": parallelism,
                    "encoding": encoding,
                    "folder": folder,
                },
            }
        )
        self._own_dir = None if socket_dir else tempfile.TemporaryDirectory(prefix="asyncrl-test-")
        run_dir = socket_dir or Path(self._own_dir.name if self._own_dir else "")
        self._context = ServiceContext(
            config, "weight_sync.0", run_dir, run_id or uuid.uuid4().hex[:8], keys=keys
        )
        self._num_segments = num_segments
        for name in services:
            self.start(name)

    @property
    def shm_prefix(self) -> str:
        return self._context.shm_prefix

    def set_model(self, folder: Path) -> None:
        """Give the services that are started from now on a model that they know the size of."""
        config = self._context.config
        section = config.model.model_copy(update={"path": str(folder), "dtype": "float32"})
        self._context = replace(self._context, config=config.model_copy(update={"model": section}))

    @property
    def coordinator(self) -> Child:
        return self.children["weight_sync.0"]

    @property
    def publisher(self) -> Child:
        return self.children["publisher.0"]

    def start(
        self,
        name: str,
        fault: Callable[[int, int, torch.Tensor], None] = _no_fault,
        environment: dict[str, str] | None = None,
        *,
        by_folder: bool = False,
    ) -> Child:
        """Start a service and wait until it listens; `by_folder` is for receivers."""
        bind = self.address_of(name) if self._socket_dir else "tcp://127.0.0.1:*"
        addresses = {child: self.children[child].address for child in self.children}
        if self._socket_dir and "weight_sync.0" not in addresses:
            addresses["weight_sync.0"] = self.address_of("weight_sync.0")
        config = self._context.config
        if by_folder:
            section = config.weight_sync.model_copy(update={"backend": "folder"})
            config = config.model_copy(update={"weight_sync": section})
        context = replace(self._context, name=name, addresses=addresses, bind=bind, config=config)
        if context.kind == "publisher":
            context = replace(context, rank=context.index, world_size=self._num_stripes)
        log_path = self._socket_dir / f"{name}.log" if self._socket_dir else None
        role = Role(
            context,
            self.timing,
            fault,
            self._num_segments,
            self._lost_s,
            log_path,
            environment or {},
            self._node_of(name),
        )
        process, lifeline = fork(serve, role)
        assert lifeline.poll(WAIT_S), f"{name} did not start"
        address = lifeline.recv()
        client = Client(ThreadRuntime(), address, self._context.client_keys)
        self.children[name] = Child(process, lifeline, kind_of(name), address, client)
        return self.children[name]

    def address_of(self, name: str) -> str:
        """Return where a service will listen; known before it is started if there is a socket folder."""
        assert self._socket_dir is not None
        return f"ipc://{self._socket_dir / name}"

    def publisher_client(self, token: int = 1, **kwargs: Any) -> PublisherClient:
        address, keys = self.publisher.address, self._context.client_keys
        made = PublisherClient(
            ThreadRuntime(), address, self.shm_prefix, self.bucket_bytes, token, keys=keys, **kwargs
        )
        self._handoffs.append(made)
        return made

    def members(self) -> dict[str, MemberStatus]:
        return dict(self.coordinator.status().members)

    def wait_for_members(self, *names: str) -> None:
        wait_until(lambda: set(names) <= set(self.members()), f"{names} to join")

    def close(self) -> None:
        for publisher_client in self._handoffs:
            publisher_client.close()
        for child in self.children.values():
            child.kill()
        shutil.rmtree(segments.SHM_DIR / self.shm_prefix, ignore_errors=True)
        if self._own_dir is not None:
            self._own_dir.cleanup()


@contextmanager
def running_cluster(**kwargs: Any) -> Iterator[Cluster]:
    cluster = Cluster(**kwargs)
    try:
        yield cluster
    finally:
        cluster.close()


def files_under(folder: Path) -> list[Path]:
    """The files under `folder`, by name; what is removed meanwhile does not count."""
    found = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.is_file())


def wait_until(is_true: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    """Wait for a condition, by deadline.

    Time in which some process waited for a processor does not count, up to twice `wait_s`: what the services'
    own deadlines promise comes later on a machine that lets them run later.
    """
    start, stalled = time.monotonic(), stalled_s()
    while not is_true():
        passed = time.monotonic() - start
        counted = max(passed / 3, passed - (stalled_s() - stalled))
        assert counted < wait_s, f"waited {counted:.2f} s of {passed:.2f} s for {what}"
        time.sleep(0.005)


def stalled_s() -> float:
    """Return for how long a process that could run waited for a processor, since the machine's start.

    0 where the kernel does not say (Linux without pressure stall information).
    """
    try:
        text = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return 0.0
    return int(text.split("total=")[1].split()[0]) / 1e6


def model(number: int, scale: int = 1) -> list[tuple[str, torch.Tensor]]:
    """A tiny model whose contents depend on the version: odd sizes, a scalar, two dtypes, an empty one."""
    generator = torch.Generator().manual_seed(number)
    return [
        ("embed", torch.randn(61 * scale, 33, generator=generator)),
        ("norm", torch.randn(33, generator=generator).to(torch.bfloat16)),
        ("scale", torch.tensor(float(number))),
        ("empty", torch.empty(0, 4)),
        ("head", torch.randn(33, 61 * scale, generator=generator).to(torch.bfloat16)),
    ]


def take(receiver: Child, serving: int = 0, wait_s: float = WAIT_S) -> Staged | None:
    """Do as a replica does: ask for the next version."""
    reply = receiver.client.call("next_staged", deadline_s=wait_s + 5, serving=serving, wait_s=wait_s)
    if not reply.args["path"]:
        return None
    manifest = Manifest.from_bytes(reply.frames[0])
    return Staged(manifest.version, reply.args["path"], manifest)


def report_loaded(receiver: Child, number: int, ok: bool = True, error: str = "") -> None:
    receiver.client.call("loaded", deadline_s=WAIT_S, number=number, ok=ok, error=error)


def load(receiver: Child, serving: int = 0, wait_s: float = WAIT_S) -> PolicyVersion:
    """Take the next version, compare every tensor with what was published, and report it as loaded."""
    staged = take(receiver, serving, wait_s)
    assert staged is not None, "nothing was staged in time"
    check(staged)
    report_loaded(receiver, staged.version.number)
    return staged.version


def check(staged: Staged, scale: int = 1) -> None:
    """Assert that a copy holds exactly the tensors of its version."""
    wanted = model(staged.version.number, scale)
    found = list(open_tensors(staged))
    assert [name for name, _ in found] == [name for name, _ in wanted]
    for (name, tensor), (_, published) in zip(found, wanted, strict=True):
        assert tensor.dtype == published.dtype and tensor.shape == published.shape, name
        assert torch.equal(tensor, published), name
