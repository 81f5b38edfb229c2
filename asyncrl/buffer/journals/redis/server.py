"""A private Redis server for one buffer: `buffer.url: managed`.

Owns one server process and its folder: configuration, append-only file, log, and who runs it. It
listens on loopback only and wants a password that is made for it, which no process of another user is sent;
the default user is off. Invariant: at most one server works in the folder, and the buffer that finds one of
an earlier start goes on with it.
A server whose files were removed keeps nothing: it is ended, and another one is started.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from asyncrl.buffer.journals.journal import Fsync
from asyncrl.buffer.journals.redis.link import OWN, LinkDown, RedisLink, Refusal, find_server
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.service import SERVICE_VARIABLE

log = logging.getLogger(__name__)

USER = "asyncrl"
START_DEADLINE_S = 60.0
"""A server reads its append-only file before it answers: some hundred MB/s."""
ANSWER_DEADLINE_S = 1.0
_NUM_WORDS = 2
"""Lines of the log that are quoted: the last one may only say that the server ends."""
_APPENDFSYNC = {"everysec": "everysec", "always": "always", "never": "no"}
_RIGHTS = "~asyncrl:* &* +@all -@dangerous -@admin +info"


@dataclass(frozen=True)
class _Running:
    """Process that works in the folder. `began` tells it from a later one of the same pid."""

    pid: int
    began: float
    port: int
    password: str


class RedisServer:
    """See the module. `ensure` starts it.

    Args:
        folder: Made if it is missing, readable for its owner only.
        executable: Of the server; found by `find_server` if none is given.
    """

    def __init__(self, folder: Path, fsync: Fsync = "everysec", executable: str | None = None) -> None:
        self._folder = folder.absolute()
        self._fsync = fsync
        self._executable = executable or find_server()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._has_answered = False
        self._log_start = 0
        self._running = before = self._read()
        self._password = before.password if before else secrets.token_urlsafe(32)
        self._port = before.port if before else 0

    @property
    def url(self) -> str:
        """With user and password: not to be logged."""
        return f"redis://{USER}:{self._password}@127.0.0.1:{self._port}/0#{OWN}"

    @property
    def pid(self) -> int | None:
        """Of the living server, None if there is none."""
        running = self._known()
        return running.pid if running is not None and self._is_alive(running) else None

    def ensure(self, patience_s: float = START_DEADLINE_S) -> bool:
        """Start the server unless it runs, and return whether it was started.

        Args:
            patience_s: Time to wait for the first answer of a server. It may read its append-only file for
                longer; connecting to it reports that.

        Raises:
            ServiceFailed: It cannot be started, or ends before it answers; in the words of its log.
        """
        if self._has_answered and not self._has_files():
            log.error("the files of %s were removed: it is started anew", self._folder)
            self.stop()
        is_started = False
        for _ in range(3):  # another process may take the port in between
            if self.pid is None:
                self._start()
                is_started = True
            if self._has_answered or self._await_answer(patience_s):
                return is_started
        raise ServiceFailed(
            f"{Path(self._executable).name} ends at once: {self._last_words()}",
            hint=f"Read redis.log in {self._folder}",
        )

    def _has_files(self) -> bool:
        return self._read() is not None and any(self._folder.rglob("*.aof"))

    def _last_words(self) -> str:
        with (self._folder / "redis.log").open(errors="replace") as file:
            file.seek(self._log_start)
            lines = file.read().splitlines()
        found = (re.match(r"\d+:\w .{20,30} # (?!WARNING)(.*)", line) for line in lines)
        warnings = [one[1] for one in found if one]
        return "; ".join(warnings[-_NUM_WORDS:] or lines[-_NUM_WORDS:])

    def stop(self, deadline_s: float = 10.0) -> None:
        """End the server by its pid, after it has written its pending data."""
        running = self._known()
        if running is None or not self._is_alive(running):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGTERM)
        end = time.monotonic() + deadline_s
        while self._is_alive(running):
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running.pid, signal.SIGKILL)
            time.sleep(0.01)

    def _start(self) -> None:
        """Start a process; the folder is made again, the run's own is not.

        Raises:
            ServiceFailed: The disk is full, or the run's folder is gone.
        """
        self._has_answered = False
        self._port = self._port if _is_free(self._port) else _free_port()
        try:
            for folder in (self._folder.parent, self._folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._write(self._folder / "redis.conf", self._configuration())
            self._launch()
        except OSError as error:
            raise ServiceFailed(
                f"{Path(self._executable).name} cannot be started: {error}", hint=f"See {self._folder}"
            ) from None

    def _launch(self) -> None:
        with (self._folder / "redis.log").open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                [self._executable, str(self._folder / "redis.conf")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is the buffer's affair
                env={name: value for name, value in os.environ.items() if name != SERVICE_VARIABLE},
            )
        began = psutil.Process(self._process.pid).create_time()
        self._running = _Running(self._process.pid, began, self._port, self._password)
        self._write(self._folder / "server.json", json.dumps(asdict(self._running)))
        log.info("started %s with pid %d at 127.0.0.1:%d", self._executable, self._process.pid, self._port)

    def _configuration(self) -> str:
        password_digest = hashlib.sha256(self._password.encode()).hexdigest()
        lines = {
            "bind": "127.0.0.1",
            "port": self._port,
            "protected-mode": "yes",
            "daemonize": "no",
            "set-proc-title": "no",  # it would take the place of the run's mark in the environment
            "dir": json.dumps(str(self._folder)),
            "save": '""',
            "appendonly": "yes",
            "appendfsync": _APPENDFSYNC[self._fsync],
            "aof-load-truncated": "yes",
            "auto-aof-rewrite-min-size": "256mb",  # payloads come and go: it grows fast and shrinks well
            "maxmemory-policy": "noeviction",
        }
        users = ["user default off", f"user {USER} on #{password_digest} {_RIGHTS}"]
        return "\n".join([*(f"{key} {value}" for key, value in lines.items()), *users, ""])

    def _write(self, path: Path, text: str) -> None:
        temporary = path.with_suffix(".new")
        temporary.unlink(missing_ok=True)  # the mode of one that another process left would stay
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(path)

    def _read(self) -> _Running | None:
        try:
            return _Running(**json.loads((self._folder / "server.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):  # torn by a power cut: the server is gone too
            return None

    def _known(self) -> _Running | None:
        """Return the server that works in the folder, or the last known one."""
        return self._read() or self._running

    def _is_alive(self, running: _Running) -> bool:
        if self._process is not None and self._process.pid == running.pid:
            return self._process.poll() is None
        try:
            process = psutil.Process(running.pid)
            is_same = abs(process.create_time() - running.began) < 1.0
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def _await_answer(self, patience_s: float) -> bool:
        """Wait until the server answers or `patience_s` is over; return False if it ended."""
        link, end = RedisLink(self.url, ANSWER_DEADLINE_S), time.monotonic() + patience_s
        while self.pid is not None:
            try:
                link.connect()
                link.call("PING")
                self._has_answered = True
            except (*LinkDown, Refusal):
                time.sleep(0.01)
            finally:
                link.close()
            if self._has_answered or time.monotonic() > end:
                return True
        return False


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return port != 0


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
