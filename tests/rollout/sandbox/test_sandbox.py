"""Contract of a sandbox: files and snapshots, ends of commands, failures of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import ConfigError
from rollout_service.sandbox import local
from rollout_service.sandbox.contract import Command, Completed, SandboxFailed, SandboxSettings
from rollout_service.sandbox.local import LocalSandbox, LocalSandboxes
from tests.rollout.sandbox.ways import with_marker

BOTH = pytest.mark.parametrize("isolate", [True, False])


def sh(text: str, **told: Any) -> Command:
    return Command(["sh", "-c", text], **{"deadline_s": 60.0, **told})


def make(**settings: Any) -> LocalSandboxes:
    return LocalSandboxes(SandboxSettings(**settings))


def run(box: LocalSandbox, *commands: Command) -> list[Completed]:
    return asyncio.run(box.exec(*commands))


@BOTH
def test_files_stay_from_one_call_to_the_next_and_processes_do_not(isolate: bool) -> None:
    box = make(isolate=isolate).create()
    box.write({"in/data.txt": b"\x00 1\n"})
    (first,) = run(box, sh("cat in/data.txt > out; mkdir d; ln -s ../out d/link; chmod 0 out; sleep 654.5 &"))
    assert (first.code, first.stderr, first.ended) == (0, "", "")
    assert box.read("out") == b"\x00 1\n", "what its owner has shut off is kept"
    (second,) = run(box, sh("cat d/link; rm d/link"))
    assert second.stdout == "\x00 1\n"
    assert not with_marker("654.5")


@BOTH
def test_a_snapshot_is_a_value_from_which_a_sandbox_is_forked(isolate: bool) -> None:
    maker = make(isolate=isolate)
    box = maker.create()
    run(box, sh("echo 1 > x"))
    kept = box.snapshot()
    run(box, sh("echo 2 > x"))
    fork = maker.create(kept)
    assert (box.read("x"), fork.read("x")) == (b"2\n", b"1\n")
    fork.write({"x": b"3"})
    assert (run(fork, sh("cat x"))[0].stdout, maker.create(kept).read("x")) == ("3", b"1\n")


@BOTH
def test_each_command_is_told_how_it_ended(isolate: bool) -> None:
    found = run(
        make(isolate=isolate).create(),
        sh("cat; echo \xe4 >&2; exit 3", stdin=b"\xff1"),
        sh("kill -9 $$"),
        Command(["no-such-program"]),
        sh("sleep 600", deadline_s=0.2),
        sh("exit 0"),
    )
    assert [(one.code, one.ended) for one in found] == [
        (3, ""),
        (-9, ""),
        (127, ""),
        (-9, "timeout"),
        (0, ""),
    ]
    assert (found[0].stdout, found[0].stderr) == ("\ufffd1", "\xe4\n")
    assert "no-such-program" in found[2].stderr


def test_a_sandbox_that_fails_itself_says_so_and_keeps_its_files() -> None:
    box = make().create()
    box.write({"x": b"1"})

    async def work() -> None:
        call = asyncio.create_task(box.exec(sh("sleep 600")))
        while box._process is None:
            await asyncio.sleep(0.01)
        os.kill(box._process.pid, signal.SIGKILL)
        await call

    with pytest.raises(SandboxFailed, match="IncompleteRead"):
        asyncio.run(work())
    assert run(box, sh("cat x"))[0].stdout == "1"


def test_a_sandbox_that_is_destroyed_ends_what_runs() -> None:
    box = make().create()

    async def work() -> None:
        call = asyncio.create_task(box.exec(sh("sleep 655.5")))
        while not with_marker("655.5"):
            await asyncio.sleep(0.01)
        await box.destroy()
        await call

    with pytest.raises(SandboxFailed):
        asyncio.run(work())
    with pytest.raises(SandboxFailed, match="destroyed"):
        run(box, sh("true"))


def test_an_answer_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import sys; sys.stdout.buffer.write(bytes.fromhex('{local.HEAD.pack(1 << 40, 0).hex()}'))"
    monkeypatch.setattr(local, "command_line", lambda *_, **__: ["python3", "-c", f"{code}; input()"])
    with pytest.raises(SandboxFailed, match="too long"):
        run(make().create(), sh("true"))


def test_a_machine_that_cannot_isolate_is_told_and_refused_unless_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "CHILD", Path("/no/such/file"))
    local.find_way.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"cannot isolate code: namespaces: .*no/such/file") as told:
            make()
        assert "isolate: false" in told.value.hint
        assert make(isolate=False).way == "none"
    finally:
        local.find_way.cache_clear()


def test_limits_under_which_nothing_works_are_refused() -> None:
    for limits in (
        {"memory_bytes": 1},
        {"files_bytes": 1},
        {"processes": 0},
        {"workers": 0},
        {"folders": ["x"]},
    ):
        with pytest.raises(ConfigError, match="within these limits"):
            SandboxSettings(**limits)
    with pytest.raises(ConfigError, match="does not exist"):
        make(folders=["/no/such/folder"])


def test_the_network_can_be_had() -> None:
    (found,) = run(make(network=True).create(), sh("cat /proc/net/dev; ls /etc/resolv.conf"))
    assert found.stdout.count(":") > run(make().create(), sh("cat /proc/net/dev"))[0].stdout.count(":")
