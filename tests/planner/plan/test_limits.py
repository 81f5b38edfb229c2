"""Limits of the user that are too low for any run are told before Ray meets them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from asyncrl.planner.plan.footprint.estimate import CHECKS
from asyncrl.planner.plan.machine import MIN_FILES, check_limits
from tests.other_user import SOMEBODY

SAID = """
import os, sys
from asyncrl.planner.plan.machine import check_limits
os.seteuid(int(sys.argv[1]))
print("".join(check_limits(None)))
"""


def say(files: tuple[int, int] | None = None, processes: int | None = None, user: int = 0) -> str:
    """Return what a process with these limits is told; what it lowers it cannot raise again."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
        if processes is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))

    command = [sys.executable, "-c", SAID, str(user)]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_limits_are_checked_before_a_run_is_started() -> None:
    assert check_limits in CHECKS


def test_too_few_files_are_told_and_a_soft_limit_is_not() -> None:
    few = MIN_FILES - 1
    assert say((few, resource.getrlimit(resource.RLIMIT_NOFILE)[1])) == "", "services raise it themselves"
    told = say((few, few))
    assert f"may open {few} files" in told and "ulimit -Hn" in told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_too_few_processes_are_told_to_whom_they_limit() -> None:
    assert say(processes=100) == "", "root is not limited"
    told = say(processes=100, user=SOMEBODY)
    assert "may have 100 processes and threads" in told and "ulimit -u" in told
