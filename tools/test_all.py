"""Runner of the long tests: one file at a time, resumable, with the time of each.

    python tools/test_all.py [--minutes M] [--again] [FILE...]

A file that passed for the same content of the repository is not run again, unless `--again`. With
`--minutes`, the files of `TELLING` alone, in that order, while there is time. Records and logs are in
`build/test-all/`. The exit status is 1 if a file failed, or if the working tree is not as committed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "test-all"
RECORD = FOLDER / "record.jsonl"
PART_DEADLINE_S = 3600.0
SESSION_MARK = "ASYNCRL_TEST_SESSION"
"""Variable that marks the processes of a session of tests, see `tests/leftovers.py`."""
TELLING = (
    "tests/system/faults/test_learner_crashes.py",
    "tests/system/exactness/test_exactness.py",
    "tests/rollout/engine/test_weight_families.py",
    "tests/learner/backends/test_device.py",
    "tests/docs/test_pages.py",
    "tests/simulation/test_mutants.py",
    "tests/buffer/killed/test_killed.py",
    "tests/system/exactness/test_replay.py",
    "tests/system/exactness/test_older_run.py",
    "tests/system/operating/test_operating.py",
    "tests/system/faults/test_redis_journal.py",
    "tests/system/exactness/test_determinism.py",
    "tests/system/faults/test_interruption.py",
    "tests/system/faults/test_blame.py",
    "tests/buffer/hostile/test_key_holders.py",
)
"""Tests that a change breaks first, which take minutes, not hours."""


@dataclass(frozen=True)
class Outcome:
    """Result of one run of one file; `tree` names the content of the repository."""

    file: str
    tree: str
    status: int
    seconds: float
    summary: str


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="of long tests; all by default")
    parser.add_argument("--minutes", type=float, help="start no file after these, and the telling ones only")
    parser.add_argument("--again", action="store_true", help="also what has passed")
    given = parser.parse_args(arguments)
    tree, begun = _git("rev-parse", "HEAD^{tree}"), time.monotonic()
    if not tree or _git("status", "--porcelain"):
        print("the working tree is not as committed: commit first, so that the record says what ran")
        return 1
    files = given.files or (TELLING if given.minutes else find_files())
    passed = (
        {} if given.again else {one.file: one for one in read_record() if one.tree == tree and not one.status}
    )
    outcomes = []
    for number, file in enumerate(files, 1):
        if given.minutes and time.monotonic() - begun > 60 * given.minutes:
            print(f"{len(files) - number + 1} files are left out: {given.minutes:g} minutes are over")
            break
        outcome = passed.get(file) or run_part(file, tree)
        outcomes.append(outcome)
        word = "FAILED" if outcome.status else "passed before" if file in passed else "passed"
        print(
            f"[{number}/{len(files)}] {file}: {word} ({outcome.seconds:.0f} s): {outcome.summary}", flush=True
        )
    failed = [one.file for one in outcomes if one.status]
    total = sum(one.seconds for one in outcomes)
    print(f"{len(outcomes)} files in {total / 60:.1f} minutes, {len(failed)} failed: {' '.join(failed)}")
    return int(bool(failed))


def find_files() -> list[str]:
    """Return the files that hold long tests, in order."""
    command = [sys.executable, "-m", "pytest", "-m", "long", "--collect-only", "-q", "-n", "0"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"the tests cannot be collected:\n{found.stdout}{found.stderr}")
    return sorted({line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line})


def read_record() -> list[Outcome]:
    """Return what was run before."""
    if not RECORD.exists():
        return []
    return [Outcome(**json.loads(line)) for line in RECORD.read_text().splitlines()]


def run_part(file: str, tree: str) -> Outcome:
    """Run the long tests of `file`, with the output in a log of its own, and write down what they came to."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    log, begun = FOLDER / (file.replace("/", "-") + ".log"), time.monotonic()
    command = [sys.executable, "-m", "pytest", "-m", "long", "--durations=10", "-n", "0", file]
    mark = secrets.token_hex(8)
    environment = os.environ | {SESSION_MARK: mark}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(PART_DEADLINE_S)
        except BaseException as error:  # Ctrl-C too: it has a session of its own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60.0)
            end_marked(mark)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = -signal.SIGKILL
    lines = log.read_text(errors="replace").splitlines()
    outcome = Outcome(file, tree, status, time.monotonic() - begun, lines[-1].strip("= ") if lines else "")
    with RECORD.open("a") as record:
        record.write(json.dumps(asdict(outcome)) + "\n")
    return outcome


def end_marked(mark: str) -> None:
    """End the processes that a part has left: those of a run have a session of their own."""
    entry = f"{SESSION_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is gone, or another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if found.returncode else found.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
