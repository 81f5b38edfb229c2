"""Fault points strike at the named place, once, whom they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from asyncrl.core.runtime.faults import VARIABLE, fault_point, is_wanted, set_hook

PROGRAM = """
from asyncrl.core.runtime.faults import fault_point
for step in (1, 2):
    for bucket in (0, 1):
        print(step, bucket, flush=True)
        fault_point("receiver.bucket", step, bucket)
print("end")
"""


def run(fault: str) -> subprocess.Popen[str]:
    environment = {**os.environ, VARIABLE: fault}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_a_process_dies_at_the_first_pass_at_a_step_or_at_a_place_within_it():
    for fault, lines in (("receiver.bucket", 1), ("receiver.bucket@2", 3), ("receiver.bucket@2.1", 4)):
        process = run(fault)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL and len(output.splitlines()) == lines


def test_a_process_that_stops_goes_on_from_there_and_does_not_stop_again():
    process = run("stop:receiver.bucket")
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert process.stdout is not None and process.stdout.readline() == "1 0\n"
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and output.splitlines()[-1] == "end"


def test_each_of_several_faults_strikes_once():
    process = run("stop:receiver.bucket@1.1 stop:receiver.bucket@2")
    for _ in range(2):
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.splitlines() == ["1 0", "1 1", "2 0", "2 1", "end"]


def test_another_process_can_be_struck_from_a_point():
    victim = subprocess.Popen(["sleep", "60"])
    process = run(f"kill:receiver.bucket@1.1:{victim.pid}")
    output, _ = process.communicate(timeout=60)
    assert victim.wait(60) == -signal.SIGKILL
    assert process.returncode == 0 and output.splitlines()[-1] == "end"


def test_other_names_and_places_are_not_wanted(monkeypatch):
    monkeypatch.setenv(VARIABLE, "stop:receiver.bucket@2.1:77")
    assert is_wanted("receiver.bucket", 2, 1)
    assert not is_wanted("receiver.bucket", 2, 0) and not is_wanted("receiver.bucket", 21)
    assert not is_wanted("publisher.bucket", 2, 1)


def test_a_hook_is_called_at_each_point_and_the_environment_is_not_heeded(monkeypatch):
    passed: list[tuple[str, tuple[int | None, ...]]] = []
    monkeypatch.setenv(VARIABLE, "learner.updated@3")
    before = set_hook(lambda name, place: passed.append((name, place)))
    try:
        fault_point("learner.updated", 3)
        assert not is_wanted("learner.updated", 3)
    finally:
        assert set_hook(before) is not None
    assert passed == [("learner.updated", (3,))] and is_wanted("learner.updated", 3)
