"""Escapes from a sandbox that were tried: each ends with `held`, and the machine is as before."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout_service.sandbox.contract import Command, Completed, SandboxFailed
from rollout_service.sandbox.local import LocalSandbox
from tests.rollout.sandbox.ways import ALL, SHORT, enter, with_marker

MIB = 1 << 20
NAMES = [pytest.param(way, marks=[] if way in SHORT else pytest.mark.long) for way in ALL]


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return enter(request.param, monkeypatch)


def tried(box: LocalSandbox, code: str, *arguments: object, deadline_s: float = 60.0) -> Completed:
    command = Command(["python3", "-c", code, *map(str, arguments)], deadline_s=deadline_s)
    return asyncio.run(box.exec(command))[0]


REFUSED = """
import sys, os, ctypes, socket, subprocess
def held(act):
    try: found = act()
    except (OSError, ValueError): return
    if found != -1: print("escaped:", act.__code__.co_firstlineno, found)
libc = ctypes.CDLL(None, use_errno=True)
"""
"""`held` is silent about what raises, or returns -1."""

CODES = {
    "write outside": """
for path in ("/x", "/usr/x", "/etc/passwd", "/etc/x", "/proc/x", "/srv/x", "/dev/x", sys.prefix + "/x"):
    held(lambda: open(path, "a"))
held(lambda: open(sys.argv[1] + "/kept", "a"))
held(lambda: os.unlink(sys.argv[1] + "/kept"))
held(lambda: os.chmod(sys.argv[1], 0o777))
""",
    "read the host": """
for path in (sys.argv[2] + "/secret", "/etc/shadow", "/proc/1/environ", "/proc/1/mem", "/proc/kcore"):
    held(lambda: open(path, "rb").read(1))
for path in ("/proc/1/root/usr", "/proc/1/cwd/", "/proc/1/fd", "/root/.ssh", "/sys/kernel", "/var/lib"):
    held(lambda: os.listdir(path))
if "PLANTED" in os.environ or os.uname().nodename == sys.argv[3]: print("escaped: environment")
""",
    "change the kernel's settings": """
for path in ("sysrq-trigger", "sys/kernel/core_pattern", "sys/kernel/hostname", "sys/vm/drop_caches",
    "sys/user/max_user_namespaces", "1/oom_score_adj"):
    held(lambda: os.write(os.open("/proc/" + path, os.O_WRONLY), b"0"))
""",
    "gain rights": """
for act in (os.setuid, os.setgid, os.seteuid): held(lambda: act(0))
for flags in (0x10000000, 0x20000, 0x40000000): held(lambda: libc.unshare(flags))
held(lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
held(lambda: libc.umount2(b"/proc", 2))
held(lambda: libc.mount(None, b"/usr", None, 0x1020, None))
held(lambda: os.chroot("/tmp"))
held(lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)))
held(lambda: libc.sethostname(b"x", 1))
for pid in ("self", "1"):
    told = dict(line.split()[:2] for line in open(f"/proc/{pid}/status") if line.startswith(("Cap", "NoNew")))
    if told["NoNewPrivs:"] != "1": print("escaped: new privileges")
    if any(int(told[kind], 16) for kind in ("CapPrm:", "CapEff:", "CapAmb:")): print("escaped: capabilities")
""",
    "other processes": """
import signal
pids = [int(one) for one in os.listdir("/proc") if one.isdigit()]
if len(pids) > 3 or int(sys.argv[4]) in pids: print("escaped:", pids)
held(lambda: libc.ptrace(16, 1, 0, 0))
os.kill(1, signal.SIGKILL); os.kill(1, signal.SIGTERM); os.kill(os.getppid(), signal.SIGSTOP)
held(lambda: os.kill(int(sys.argv[4]), 0) if int(sys.argv[4]) not in pids else -1)
held(lambda: open("/dev/tty"))
if len(os.listdir("/proc/self/fd")) > 4: print("escaped: descriptors", os.listdir("/proc/self/fd"))
""",
    "network": """
socket.setdefaulttimeout(5)
for place in (("127.0.0.1", int(sys.argv[5])), ("1.1.1.1", 53)):
    held(lambda: socket.create_connection(place))
held(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + sys.argv[6]))
if [name for _, name in socket.if_nameindex() if name != "lo" and not name.endswith("0")]: print("escaped")
""",
}


@pytest.mark.parametrize("name", CODES)
def test_it_is_held(make: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "1")
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for folder in (shown, hidden):
        folder.mkdir()
        folder.chmod(0o777)
    for parent in (*tmp_path.parents, tmp_path):
        if os.access(parent, os.W_OK) and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o755)
    (shown / "kept").write_text("1")
    (hidden / "secret").write_text("1")
    abstract = f"w{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{abstract}")
        local.listen()
        told = (shown, hidden, os.uname().nodename, os.getpid(), server.getsockname()[1], abstract)
        found = tried(make(folders=[str(shown)]).create(), f"{REFUSED}{CODES[name]}\nprint('held')", *told)
    assert (found.stdout, found.stderr) == ("held\n", "")
    assert [path.name for path in shown.iterdir()] == ["kept"] and (shown / "kept").read_text() == "1"


def test_processes_are_limited_and_all_end_with_the_call(make: Any) -> None:
    code = """
import os, time
born = 0
for _ in range(500):
    try: pid = os.fork()
    except OSError: break
    if not pid: os.setsid(); time.sleep(600)
    born += 1
print(born)
"""
    marker = f"fork-{time.monotonic_ns()}"
    found = tried(make(processes=20).create(), code, marker)
    assert found.code == 0 and 10 <= int(found.stdout) <= 20
    assert not with_marker(marker)


def test_nothing_outlives_a_deadline_however_it_leaves_its_parent(make: Any) -> None:
    code = """
import os, signal, sys, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
if not os.fork():
    os.setsid()
    if not os.fork(): print("lives", flush=True); time.sleep(600)
time.sleep(600)
"""
    marker = f"late-{time.monotonic_ns()}"
    found = tried(make().create(), code, marker, deadline_s=2.0)
    assert (found.ended, found.stdout) == ("timeout", "lives\n")
    assert not with_marker(marker)


def test_a_sandbox_whose_owner_is_killed_ends(make: Any) -> None:
    marker = f"owner-{time.monotonic_ns()}"
    line = make().wrap(["python3", "-c", "import time; time.sleep(600)", marker])
    code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)"
    owner = subprocess.Popen([sys.executable, "-c", code, *line])
    end = time.monotonic() + 60
    while not inner(marker) and time.monotonic() < end:
        time.sleep(0.05)
    assert inner(marker), "it runs"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    while with_marker(marker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not with_marker(marker)


def inner(marker: str) -> list[int]:
    """Return the sandbox's own command among the processes that name it."""
    return [pid for pid in with_marker(marker) if psutil.Process(pid).cmdline()[0] == "python3"]


def test_files_and_temporary_files_are_limited_and_too_many_are_not_kept(make: Any) -> None:
    code = """
import os, sys
for folder in ("/tmp", os.environ["HOME"]):
    total = 0
    try:
        for number in range(1000):
            with open(f"{folder}/{number}", "wb") as file: file.write(bytes(1 << 20))
            total += 1
    except OSError as error: print(total, error.errno)
try: open("/tmp/big", "wb").truncate(1 << 40)
except OSError as error: print(error.errno)
"""
    box = make(files_bytes=4 * MIB).create()
    box.write({"old": b"1"})
    found = tried(box, code)
    assert found.stdout.splitlines() == ["4 28", "3 28", "27"], "no room twice, and a file that is too large"
    sparse = "for n in range(9): open(str(n), 'wb').truncate(1 << 20)"
    assert "those of before are kept" in tried(box, f"import os; os.system('rm *')\n{sparse}").stderr
    assert box.read("old") == b"1"


def test_memory_is_limited_for_one_process_and_for_all(make: Any) -> None:
    box = make(memory_bytes=128 * MIB).create()
    assert "MemoryError" in tried(box, "x = bytearray(1 << 30)").stderr
    many = """
import os, time
for _ in range(8):
    if not os.fork(): x = bytearray(os.urandom(1)) * (50 << 20); time.sleep(600)
time.sleep(600)
"""
    assert tried(box, many).ended == "memory"


def test_output_without_an_end_is_cut(make: Any) -> None:
    found = tried(make(output_bytes=1000).create(), "while True: print('x' * 999)")
    assert len(found.stdout) == 1000 and len(found.stderr) <= 1000 and found.code != 0


def test_links_lead_nowhere_outside(make: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("1")
    box = make().create()
    code = "import os, sys; os.symlink(sys.argv[1], 'link'); os.symlink('/usr', 'folder'); os.mkfifo('fifo')"
    assert tried(box, code, tmp_path / "secret").code == 0
    for name in ("link", "folder", "fifo", "folder/bin/sh", "../secret", str(tmp_path / "secret")):
        with pytest.raises(FileNotFoundError):
            box.read(name)
    for name in ("../x", "/x", "a/../../x", ""):
        with pytest.raises(ValueError, match="cannot be called"):
            box.write({name: b""})
    fork = make().create(box.snapshot())
    fork.write({"folder/x": b"1"})
    with pytest.raises(SandboxFailed, match="folder/x"):
        tried(fork, "")
    assert tried(box, "print(open('link').read())").code == 1


def test_a_program_that_was_made_set_uid_is_an_ordinary_one(make: Any) -> None:
    code = """
import os, shutil, subprocess
shutil.copy("/usr/bin/id", "id"); os.chmod("id", 0o4755)
print(subprocess.run(["./id", "-u"], capture_output=True, text=True).stdout.strip())
"""
    assert tried(make().create(), code).stdout == "1000\n"
