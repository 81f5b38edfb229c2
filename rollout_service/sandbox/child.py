"""Process of a sandbox: isolates itself, unpacks the files, runs commands, packs the files again.

It is run by path with its settings as one argument, and imports the standard library only. As the first
process of a namespace of processes it ends everything that a command left. Order: namespaces, a root of
read-only folders, an ordinary user without capabilities, then the commands. Invariant: nothing of a command
runs before all of that holds; what fails before is told as `problem`.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import BinaryIO, TypedDict

HEAD = struct.Struct(">QQ")
"""Before each message: bytes of its JSON, bytes of the archive after it."""
HOME, USER_ID, NOBODY = "/sandbox", 1000, 65534
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
NEW_OTHERS = 0x00020000 | 0x20000000 | 0x08000000 | 0x04000000 | 0x02000000
"""Mounts, processes, IPC, host name, control groups."""
PRIVATE, BIND, MOVE_AWAY = 0x40000 | 0x4000, 0x1000 | 0x4000, 2
NO_SETUID, NO_DEVICES, NO_PROGRAMS = 2, 4, 8
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, RECURSIVE, READ_ONLY = 442, 0x8000, 1 | 2 | 4
"""Read-only, no set-uid, no devices; the number of the call is the same on every machine (Linux 5.12)."""
PARENT_DEATH, DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38
CAPABILITIES_3 = 0x20080522
ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d")
DEVICES = ("null", "zero", "full", "random", "urandom")
MAX_INODES = 16384
POLL_S, FOREVER_S = 0.1, 1e8
ENVIRONMENT = {"HOME": HOME, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
libc = ctypes.CDLL(None, use_errno=True)


class Settings(TypedDict):
    """`SandboxSettings` and what `local.command_line` adds to them."""

    way: str
    network: bool
    folders: list[str]
    files_bytes: int
    memory_bytes: int
    processes: int
    output_bytes: int
    path: str
    home: str
    env: list[str]
    argv: list[str]


class Order(TypedDict):
    """A `Command`, its input as a character per byte."""

    argv: list[str]
    stdin: str
    deadline_s: float


class Failed(Exception):
    """The sandbox cannot be made, or its files cannot be kept."""


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises Failed."""
    given = [one.encode() if isinstance(one, str) else one for one in arguments]
    if getattr(libc, name)(*given) == -1:
        raise Failed(f"{name}{arguments[:3]}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Mount. Raises Failed."""
    call("mount", source, target, kind, ctypes.c_ulong(flags), data)


def make_read_only(target: str, flags: int = RECURSIVE) -> None:
    """Make a mount, and those below it, read-only."""
    attributes = struct.pack("4Q", READ_ONLY, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, -100, target, flags, attributes, ctypes.c_size_t(32))


def become_user(outer_id: int, outer_group: int) -> None:
    """Be an ordinary user of this namespace of users."""
    call("prctl", DUMPABLE, 1, 0, 0, 0)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{USER_ID} {outer_id} 1")
    Path("/proc/self/gid_map").write_text(f"{USER_ID} {outer_group} 1")


def isolate(settings: Settings) -> None:
    """Return in the first process of new namespaces; the one that began waits for it and ends.

    root itself builds the root folder, so that it may bind what others cannot reach, and becomes `nobody`:
    the kernel limits the number of everybody's processes but root's.
    """
    is_root = os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split()[:2] == ["0", "0"]
    flags = NEW_OTHERS | (0 if settings["network"] else NEW_NETWORK)
    ids = (NOBODY, NOBODY) if is_root else (os.geteuid(), os.getegid())
    call("unshare", flags if is_root else flags | NEW_USER)
    if not is_root:
        become_user(*ids)
    call("prctl", PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
    if first := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    build_root(settings)
    if is_root:
        os.setgroups([])
        os.setresgid(*ids[:1] * 3)
        os.setresuid(*ids[1:] * 3)
        call("unshare", NEW_USER)
        become_user(*ids)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def build_root(settings: Settings) -> None:
    """Make a root of its own: system folders read-only, empty home and `/tmp`, its own `/proc`."""
    root = "/sys"  # there on every machine, and nothing of it is needed
    mount("none", "/", None, PRIVATE)
    mount("none", root, "tmpfs", NO_SETUID, "mode=755,size=1m")
    size = f"mode=1777,size={settings['files_bytes']},nr_inodes={MAX_INODES}"
    for folder in (HOME, "/tmp"):
        os.makedirs(root + folder)
        mount("none", root + folder, "tmpfs", NO_SETUID | NO_DEVICES, size)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        else:
            bind(root, f"/{name}")
    for path in ("/usr", *settings["folders"], *(f"/etc/{name}" for name in ETC)):
        bind(root, path)
    if settings["network"]:
        bind(root, "/etc/resolv.conf")
    for name in DEVICES:
        bind(root, f"/dev/{name}", is_device=True)
    os.symlink("/tmp", f"{root}/dev/shm")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    Path(f"{root}/etc/passwd").write_text(f"sandbox:x:{USER_ID}:{USER_ID}::{HOME}:/bin/sh\n")
    os.mkdir(f"{root}/proc")
    mount("none", f"{root}/proc", "proc", NO_SETUID | NO_DEVICES | NO_PROGRAMS)
    call("sethostname", "sandbox", 7)
    os.chdir(root)
    call("syscall", PIVOT_ROOT[platform.machine()], ".", ".")
    call("umount2", ".", MOVE_AWAY)
    os.chdir("/")
    make_read_only("/", 0)


def bind(root: str, path: str, is_device: bool = False) -> None:
    """Show a file or folder of the machine at the same place below `root`, read-only."""
    target = root + path
    if not os.path.lexists(path) or os.path.exists(target):
        return
    os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(path):
        Path(target).touch()
    mount(path, target, None, BIND)
    if not is_device:
        make_read_only(target)


def give_up_rights() -> None:
    """Drop every capability, for good, and be invisible to the processes that are started from here on."""
    data = struct.pack("6I", *[0] * 6)
    call("capset", struct.pack("Ii", CAPABILITIES_3, 0), data)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    Path("/proc/self/oom_score_adj").write_text("1000")
    call("prctl", DUMPABLE, 0, 0, 0, 0)
    call("prctl", PARENT_DEATH, signal.SIGKILL, 0, 0, 0)


def limit(settings: Settings, deadline_s: float) -> None:
    """Limit the process that becomes a command."""
    cpu_s = int(deadline_s) + 2
    limits = {
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: settings["files_bytes"],
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if os.getppid() == 1:  # else those of the whole user would be counted
        limits[resource.RLIMIT_NPROC] = settings["processes"] + 2
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))


def run(settings: Settings, command: Order) -> dict[str, object]:
    """Run one command to its end and that of all it started; return its fields of `Completed`."""
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
    os.write(files[0], command["stdin"].encode("latin-1"))
    os.lseek(files[0], 0, os.SEEK_SET)
    ended, process = "", None
    try:
        process = subprocess.Popen(
            command["argv"],
            stdin=files[0],
            stdout=files[1],
            stderr=files[2],
            cwd=os.environ["HOME"],
            preexec_fn=lambda: limit(settings, command["deadline_s"]),
            start_new_session=True,
        )
        ended = watch(process, settings["memory_bytes"], command["deadline_s"])
    except (OSError, ValueError) as error:
        os.write(files[2], str(error).encode("utf-8", "replace"))
    code = end_all(process)
    out, err = (read_output(file, settings["output_bytes"], file == files[2]) for file in files[1:])
    for file in files:
        os.close(file)
    return {"code": code, "stdout": out, "stderr": err, "ended": ended}


def watch(process: subprocess.Popen[bytes], memory_bytes: int, deadline_s: float) -> str:
    """Wait for a command; return why it must be ended, empty if it has ended by itself."""
    while deadline_s > 0:
        try:
            process.wait(min(POLL_S, deadline_s))
            return ""
        except subprocess.TimeoutExpired:
            deadline_s -= POLL_S
            if os.getpid() == 1 and resident_bytes() > memory_bytes:
                return "memory"
    return "timeout"


def resident_bytes() -> int:
    """Return the memory of all processes of this sandbox."""
    pages = 0
    for path in Path("/proc").glob("[0-9]*/statm"):
        try:
            pages += int(path.read_text().split()[1]) if path.parent.name != "1" else 0
        except (OSError, IndexError):  # it has ended meanwhile
            continue
    return pages * resource.getpagesize()


def end_all(process: subprocess.Popen[bytes] | None) -> int:
    """Kill what is left of a command and of all it started; return its exit code."""
    is_first = os.getpid() == 1  # only there does -1 mean the processes of this sandbox
    with contextlib.suppress(ProcessLookupError):
        if is_first:
            os.kill(-1, signal.SIGKILL)
        elif process is not None:
            os.killpg(process.pid, signal.SIGKILL)
    code = 127 if process is None else process.wait()
    with contextlib.suppress(ChildProcessError):
        while is_first:
            os.waitpid(-1, 0)
    return code


def read_output(file: int, num_bytes: int, is_end: bool) -> str:
    """Return the beginning of an output, or its end; a character per byte."""
    size = os.fstat(file).st_size
    return os.pread(file, num_bytes, max(0, size - num_bytes) if is_end else 0).decode("latin-1")


def pack(folder: str, limit_bytes: int) -> bytes:
    """Return files, folders and links below `folder` as an archive. Raises Failed."""
    packed, num_bytes = io.BytesIO(), 0
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for parent, folders, files in os.walk(folder):
            for path in (os.path.join(parent, name) for name in folders + files):
                stat = os.lstat(path)
                if not os.path.islink(path):  # what its owner has shut off is kept too
                    os.chmod(path, stat.st_mode | (0o700 if os.path.isdir(path) else 0o600))
                num_bytes += stat.st_size
                if num_bytes > limit_bytes:
                    raise Failed(f"the files are over {limit_bytes} bytes")
                archive.add(path, os.path.relpath(path, folder), recursive=False)
    return packed.getvalue()


def receive(stream: BinaryIO) -> tuple[dict[str, list[Order]], bytes]:
    """Return a message and its archive."""
    length, archive_bytes = HEAD.unpack(stream.read(HEAD.size))
    return json.loads(stream.read(length)), stream.read(archive_bytes)


def send(message: dict[str, object], archive: bytes = b"") -> None:
    """Send a message and its archive."""
    text = json.dumps(message).encode()
    sys.stdout.buffer.write(HEAD.pack(len(text), len(archive)) + text + archive)
    sys.stdout.buffer.flush()


def main(settings: Settings) -> None:
    """Answer one message; with `argv` in the settings become that command instead, within the same limits."""
    try:
        if settings["way"] == "namespaces":
            isolate(settings)
        give_up_rights()
        kept = {name: os.environ[name] for name in settings["env"]}
        os.environ.clear()
        os.environ.update(kept | ENVIRONMENT | {"PATH": settings["path"], "HOME": settings["home"]})
        if argv := settings["argv"]:
            os.chdir(os.environ["HOME"])
            process = subprocess.Popen(argv, preexec_fn=lambda: limit(settings, FOREVER_S))
            watch(process, settings["memory_bytes"], FOREVER_S)
            os._exit(end_all(process) & 0xFF)
        message, archive = receive(sys.stdin.buffer)
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            if hasattr(tarfile, "tar_filter"):  # from Python 3.11.4
                packed.extraction_filter = tarfile.tar_filter
            packed.extractall(settings["home"])
        results = [run(settings, command) for command in message["commands"]]
    except (Failed, OSError, KeyError, tarfile.TarError) as error:
        send({"problem": f"{type(error).__name__}: {error}", "results": []})
        return
    try:
        send({"problem": "", "results": results}, pack(settings["home"], settings["files_bytes"]))
    except (Failed, OSError) as error:
        send({"problem": "", "results": results, "lost": str(error)})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
