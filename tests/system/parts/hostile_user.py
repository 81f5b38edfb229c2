"""Another user of a run's machine: takes what he can get, and leaves in the way what he can.

`python -m tests.system.parts.hostile_user UID` does what he can against the user `UID` for each line of its
input, and answers with a line of JSON: what he got hold of, and which of his own things somebody has opened.
A line has names that he can guess. What comes up in the folders of all users he attacks at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import resource
import select
import shutil
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PLACES = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))
GARBAGE = (
    b"",
    os.urandom(300),
    b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48),
    b"\0" * 10 + b"\xff" * 300,
    b"*1\r\n$4\r\nINFO\r\n",
)
"""Nothing, noise, and the first words of HTTP, gRPC, ZMQ, binary protocols and Redis."""
OPEN, ACCESS, CREATE, MOVED_TO = 0x20, 0x1, 0x100, 0x80
EVENT = struct.Struct("iIII")
EVIL = b"EVIL" * 64
LISTENING = "0A"


@dataclass
class Hostile:
    """What he watches, has made and has got.

    Attributes:
        got: What he could open, change or reach of the victim's, with how.
        taken: When each path was changed that he has made, for somebody to take for his own.
        seen: Names that have come up.
    """

    victim: int
    got: set[str] = field(default_factory=set)
    taken: dict[Path, int] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    held: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.watch: int = libc.inotify_init1(os.O_NONBLOCK)
        wanted = OPEN | ACCESS | CREATE | MOVED_TO
        self._folders = {libc.inotify_add_watch(self.watch, bytes(place), wanted): place for place in PLACES}
        self._kinds = itertools.cycle((self._folder, self._file, self._link, self._socket))
        self._own = [place / f"evil-{os.getpid()}" for place in PLACES]
        for folder in self._own:
            folder.mkdir()
            (folder / "bait").write_bytes(EVIL)
            (folder / "bait").chmod(0o666)

    def pounce(self) -> None:
        """Go at what has just come up, and note what of his own somebody has opened."""
        for path, what in self._events():
            if path in self.taken:
                self.opened |= {str(path)} if what & (OPEN | ACCESS) else set()
            elif what & (CREATE | MOVED_TO) and self._is_victims(path):
                self.seen.add(path.name)
                self.attack(path)

    def strike(self, names: list[str]) -> None:
        """Do all that he can at this moment."""
        self.pounce()
        for place in PLACES:
            for path in filter(self._is_victims, place.iterdir()):
                self.seen.add(path.name)
                self.attack(path)
        lines = Path("/proc/net/unix").read_text().splitlines()
        for path in filter(
            self._is_victims, {*self._look_into(), *(Path(line.split()[-1]) for line in lines)}
        ):
            self.attack(path)
        self._connect()
        for name in (*names, *sorted(self.seen)):
            self.take(name)

    def attack(self, path: Path) -> None:
        """Try what could harm the owner of `path`, and all below it; whatever comes of it is undone."""
        acts: dict[str, Callable[[], object]] = {
            "read": lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)),
            "write": lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)),
            "make": lambda: os.rmdir(_made(path / "evil")),
            "rename": lambda: os.rename(_renamed(path), path),
            "connect": lambda: _connected(str(path)).close(),
        }
        for name, act in acts.items():
            with contextlib.suppress(OSError):
                act()
                self.got.add(f"{name} {path}")
        with contextlib.suppress(OSError):
            for inner in path.iterdir() if not path.is_symlink() else ():
                self.attack(inner)

    def take(self, name: str) -> None:
        """Make what somebody could take for a name of his own, in every place."""
        names = (name, f"{name}-0", f"{name}-publisher-legacy", f"sem.{name}", f"sem.{name}-publisher.0-x")
        for path in (place / one for place, one in itertools.product(PLACES, names)):
            if path in self.taken:
                continue
            with contextlib.suppress(OSError):
                next(self._kinds)(path)
                self.taken[path] = path.lstat().st_mtime_ns

    def leave(self) -> None:
        """Remove all that he has made."""
        for path in self.taken:
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if stat.S_ISDIR(path.lstat().st_mode) else path.unlink()
        for folder in self._own:
            shutil.rmtree(folder)

    def _file(self, path: Path) -> None:
        os.link(path.parent / self._own[0].name / "bait", path)  # made without opening it

    def _folder(self, path: Path) -> None:
        path.mkdir()
        path.chmod(0o777)

    def _link(self, path: Path) -> None:
        path.symlink_to("/dev/shm")

    def _socket(self, path: Path) -> None:
        end = socket.socket(socket.AF_UNIX)
        end.bind(str(path))
        path.chmod(0o777)
        end.listen()
        self.held.append(end)

    def used(self) -> list[str]:
        """Return what of his somebody has opened, or put something into."""
        changed = {path for path, at in self.taken.items() if path.lstat().st_mtime_ns != at}
        return sorted({*self.opened, *map(str, changed)})

    def callers(self) -> int:
        """Return how many have connected to his sockets."""
        ends = [end for end in self.held if end.family == socket.AF_UNIX]
        return len(select.select(ends, [], [], 0)[0])

    def _events(self) -> Iterator[tuple[Path, int]]:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.watch, 1 << 16):
                at = 0
                while at < len(data):
                    watch, what, _, length = EVENT.unpack_from(data, at)
                    at += EVENT.size + length
                    name = data[at - length : at].rstrip(b"\0")
                    if watch in self._folders:
                        yield self._folders[watch] / os.fsdecode(name), what

    def _is_victims(self, path: Path) -> bool:
        try:
            return path.lstat().st_uid == self.victim
        except OSError:
            return False

    def _look_into(self) -> set[Path]:
        """Try to look into the victim's processes; return the paths that their arguments name."""
        named = set[Path]()
        for process in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
            if not self._is_victims(process):
                continue
            for name in ("environ", "mem", "maps", "fd", "cwd", "root"):
                with contextlib.suppress(OSError):
                    inner = process / name
                    found = os.listdir(inner) if inner.is_dir() else inner.open("rb").read(1)
                    self.got |= {f"look into {inner}"} if found else set()
            with contextlib.suppress(OSError):
                arguments = (process / "cmdline").read_text(errors="replace").split("\0")
                named |= {Path(part) for one in arguments for part in one.split("=") if part.startswith("/")}
        return named

    def _connect(self) -> None:
        """Say something that nobody waits for to whoever listens, and stay connected to him."""
        self.held = [end for end in self.held if end.family == socket.AF_UNIX]
        for name, host in (("tcp", "127.0.0.1"), ("tcp6", "::1")):
            rows = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
            ports = {
                int(row[1].rpartition(":")[2], 16)
                for row in rows
                if row[3] == LISTENING and int(row[7]) == self.victim
            }
            for port, said in itertools.product(ports, GARBAGE):
                with contextlib.suppress(OSError):
                    end = socket.create_connection((host, port), timeout=0.5)
                    self.held.append(end)
                    end.sendall(said)


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _renamed(path: Path) -> Path:
    gone = path.with_name(f"{path.name}.gone")
    path.rename(gone)
    return gone


def _connected(path: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    end.connect(path)
    return end


def main() -> None:
    os.umask(0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    hostile = Hostile(int(sys.argv[1]))
    try:
        serve(hostile)
    finally:
        hostile.leave()


def serve(hostile: Hostile) -> None:
    """Strike for each line of input, and lie in wait between them."""
    while True:
        ready, _, _ = select.select([sys.stdin, hostile.watch], [], [])
        hostile.pounce()
        if sys.stdin not in ready:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        hostile.strike(line.split())
        told = {"got": sorted(hostile.got), "used": hostile.used(), "callers": hostile.callers()}
        counts = {name: len(getattr(hostile, name)) for name in ("seen", "taken", "held")}
        print(json.dumps(told | counts), flush=True)


if __name__ == "__main__":
    main()
