"""Sandboxes on this machine, by namespaces of Linux: made for each call, by bubblewrap or `child.py` itself.

Between two calls a sandbox is an archive in memory: no process, no folder. Invariant: what comes back from
a sandbox is read within bounds and never unpacked outside of one.
"""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path, PurePosixPath

import msgspec

from asyncrl.core.errors import ConfigError
from rollout_service.reaping import kill_and_reap
from rollout_service.sandbox.child import DEVICES, ETC, HEAD, HOME, USER_ID
from rollout_service.sandbox.contract import Command, Completed, SandboxFailed, SandboxSettings

CHILD = Path(__file__).with_name("child.py")
PYTHON = f"{sys.base_prefix}/bin/python3"
PATH = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"
START_S = 20.0
"""Of isolating, unpacking and packing, besides the commands' own deadlines."""
ARCHIVE_ROOM_BYTES = 64 << 20
"""Heads of an archive's files, at most so many."""
EMPTY = bytes(2 * tarfile.BLOCKSIZE)
"""An archive without files."""
NONE, NAMESPACES, BUBBLEWRAP = "none", "namespaces", "bubblewrap"


class _Reply(msgspec.Struct):
    problem: str
    results: list[Completed]
    lost: str = ""


@functools.cache
def find_way() -> str:
    """Return how this machine isolates, tried once. Raises ConfigError with the reasons: it cannot.

    root needs no bubblewrap, which would leave its number of processes without a limit.
    """
    has_bubblewrap = os.geteuid() != 0 and shutil.which("bwrap") is not None
    reasons = []
    for way in (BUBBLEWRAP, NAMESPACES) if has_bubblewrap else (NAMESPACES,):
        try:
            done = subprocess.run(
                command_line(way, SandboxSettings()),
                input=_message([Command(["true"])], EMPTY),
                capture_output=True,
                timeout=START_S,
                env={},
                check=False,
            )
            num_bytes, _ = HEAD.unpack(done.stdout[: HEAD.size])
            reply = msgspec.json.decode(done.stdout[HEAD.size : HEAD.size + num_bytes], type=_Reply)
        except struct.error:
            reasons.append(f"{way}: {done.stderr.decode(errors='replace').strip()[-300:]}")
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{way}: {error}")
        else:
            if not reply.problem:
                return way
            reasons.append(f"{way}: {reply.problem}")
    raise ConfigError(
        f"this machine cannot isolate code: {'; '.join(reasons)}",
        hint="Install bubblewrap, allow user namespaces, or set isolate: false to run code without isolation",
    )


def command_line(
    way: str, settings: SandboxSettings, argv: Sequence[str] = (), home: str = HOME, env: Sequence[str] = ()
) -> list[str]:
    """Return the arguments of a sandbox's process; with `argv` it passes its input and output on to that."""
    folders = [sys.base_prefix, *settings.folders]
    told = {"folders": folders, "way": way, "home": home, "path": PATH, "argv": [*argv], "env": [*env]}
    child = [PYTHON, "-I", "-S", str(CHILD), json.dumps(asdict(settings) | told)]
    return child if way != BUBBLEWRAP else _bubblewrap(settings, folders, child)


def _bubblewrap(settings: SandboxSettings, folders: Sequence[str], child: Sequence[str]) -> list[str]:
    etc = [f"/etc/{name}" for name in (*ETC, *(["resolv.conf"] if settings.network else []))]
    shown = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", *folders, *etc, str(CHILD))
    binds = [word for path in shown for word in ("--ro-bind-try", path, path)]
    devices = [word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
    size = ("--size", str(settings.files_bytes), "--tmpfs")
    return [
        *(shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--disable-userns"),
        *(["--share-net"] if settings.network else []),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox"),
        *("--uid", str(USER_ID), "--gid", str(USER_ID), "--proc", "/proc", *binds, *devices),
        *("--symlink", "/tmp", "/dev/shm", "--symlink", "/proc/self/fd", "/dev/fd"),
        *(*size, "/tmp", *size, HOME, "--remount-ro", "/", "--", *child),
    ]


def make_sandboxes(told: Mapping[str, object]) -> LocalSandboxes:
    """Return the maker of sandboxes that a configuration describes. Raises ConfigError."""
    known = [field.name for field in fields(SandboxSettings)]
    if unknown := told.keys() - known:
        raise ConfigError(f"a sandbox has no setting {sorted(unknown)}", hint=f"It takes {', '.join(known)}")
    try:
        return LocalSandboxes(msgspec.convert(told, SandboxSettings))
    except msgspec.ValidationError as error:
        raise ConfigError(f"the settings of a sandbox: {error}") from error


class LocalSandboxes:
    """Maker of sandboxes with the same settings.

    Raises:
        ConfigError: This machine cannot isolate, and `isolate` is not false; or there is no such folder.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        for folder in settings.folders:
            if not Path(folder).is_dir():
                raise ConfigError(f"the folder {folder} of a sandbox does not exist")
        self.settings = settings
        self.way = find_way() if settings.isolate else NONE
        self.permits = asyncio.Semaphore(settings.workers)

    def create(self, snapshot: bytes = EMPTY) -> LocalSandbox:
        """Return a sandbox, empty or with the files of a snapshot."""
        return LocalSandbox(self, snapshot)

    def wrap(self, argv: Sequence[str], env: Sequence[str] = ()) -> list[str]:
        """Return the arguments of a process that runs a server in a sandbox, over its standard streams.

        `env` names variables of that process which the server sees; of all others it sees none.
        """
        return list(argv) if self.way == NONE else command_line(self.way, self.settings, argv, env=env)


class LocalSandbox:
    """A sandbox of this machine; methods as of `Sandbox`."""

    def __init__(self, maker: LocalSandboxes, archive: bytes) -> None:
        self._maker = maker
        self._archive = archive
        self._process: Process | None = None
        self._is_destroyed = False

    @property
    def is_sealed(self) -> bool:
        return self._maker.way != NONE and not self._maker.settings.network

    async def exec(self, *commands: Command) -> list[Completed]:
        async with self._maker.permits:
            if self._is_destroyed:
                raise SandboxFailed("the sandbox is destroyed")
            if self._maker.way != NONE:
                return await self._run(commands, HOME)
            with tempfile.TemporaryDirectory(prefix="asyncrl-sandbox-") as home:
                return await self._run(commands, home)

    def write(self, files: Mapping[str, bytes]) -> None:
        archive = io.BytesIO(self._archive)
        with tarfile.open(fileobj=archive, mode="a") as packed:
            for name, content in files.items():
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or not path.parts:
                    raise ValueError(f"a file of a sandbox cannot be called {name!r}")
                member = tarfile.TarInfo(str(path))
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
        self._archive = archive.getvalue()

    def read(self, name: str) -> bytes:
        with tarfile.open(fileobj=io.BytesIO(self._archive)) as packed:
            member = next((one for one in reversed(packed.getmembers()) if one.name == name), None)
            if member is None or not (member.isreg() or member.islnk()):
                raise FileNotFoundError(f"the sandbox has no file {name!r}")
            stream = packed.extractfile(member)
            assert stream is not None, "it is a file"
            return stream.read()

    def snapshot(self) -> bytes:
        return self._archive

    async def destroy(self) -> None:
        self._is_destroyed, self._archive = True, EMPTY
        if self._process is not None:
            await kill_and_reap(self._process)

    async def _run(self, commands: Sequence[Command], home: str) -> list[Completed]:
        line = command_line(self._maker.way, self._maker.settings, home=home)
        process = self._process = await asyncio.create_subprocess_exec(
            *line, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env={}, cwd="/", start_new_session=True
        )
        try:
            async with asyncio.timeout(START_S + sum(command.deadline_s for command in commands)):
                reply, archive = await self._talk(process, _message(commands, self._archive))
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError, ValueError, struct.error) as error:
            raise SandboxFailed(f"the sandbox failed: {type(error).__name__}: {error}") from error
        finally:
            self._process = None
            await kill_and_reap(process)
        if reply.problem or self._is_destroyed:
            raise SandboxFailed(f"the sandbox failed: {reply.problem or 'destroyed'}")
        results = [_as_text(result) for result in reply.results]
        if not reply.lost:
            self._archive = archive
        elif results:
            told = f"{results[-1].stderr}\n{reply.lost}: those of before are kept"
            results[-1] = msgspec.structs.replace(results[-1], stderr=told)
        return results

    async def _talk(self, process: Process, message: bytes) -> tuple[_Reply, bytes]:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        process.stdin.write(message)
        await process.stdin.drain()
        num_bytes, archive_bytes = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
        most = self._maker.settings.files_bytes + ARCHIVE_ROOM_BYTES
        if max(num_bytes, archive_bytes) > most:
            raise ValueError(f"an answer of {num_bytes} and {archive_bytes} bytes is too long")
        reply = msgspec.json.decode(await process.stdout.readexactly(num_bytes), type=_Reply)
        return reply, await process.stdout.readexactly(archive_bytes)


def _message(commands: Sequence[Command], archive: bytes) -> bytes:
    told = [
        {"argv": list(one.argv), "stdin": one.stdin.decode("latin-1"), "deadline_s": one.deadline_s}
        for one in commands
    ]
    text = json.dumps({"commands": told}).encode()
    return HEAD.pack(len(text), len(archive)) + text + archive


def _as_text(result: Completed) -> Completed:
    out, err = (one.encode("latin-1").decode(errors="replace") for one in (result.stdout, result.stderr))
    return msgspec.structs.replace(result, stdout=out, stderr=err)
