"""Failure report of a run: one paragraph (error, place, saved state, next command) and the log's last lines.

Reads the run's folder only, so that a run without a watching terminal is reported as well.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from asyncrl.control.record.live import read_live
from asyncrl.control.record.outcome import Outcome, read_outcome
from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.control.rows.recorder import training_rows
from asyncrl.control.rows.row_files import is_evaluation, iterate_rows, newest_rows
from asyncrl.core.config.load import load_resolved
from asyncrl.core.errors import ConfigError
from asyncrl.core.files.printable import ESCAPED, INDENTED, printable
from asyncrl.core.states import RunState
from asyncrl.core.variants import journal_facts

SHOWN_LINES = 20
TOLD_CHARACTERS = 80
"""Of a reason that a log repeats."""
CARRIED = "(?:{} cannot go on: )?"


def paragraph(folder: RunDir, outcome: Outcome | None = None, num_lines: int = SHOWN_LINES) -> str:
    """Return what to tell of the failed run in `folder`; the lines of its log follow, each behind a bar.

    Args:
        outcome: Where it is known.
        num_lines: Of the log, at most.
    """
    outcome = outcome or read_outcome(folder) or Outcome(state=RunState.FAILED)
    service = outcome.service
    where = f" in {service}" if service else ""
    reason = (outcome.error or "without a message").rstrip(".")
    error = printable(_without_repetition(reason, service), INDENTED)
    if outcome.is_removed:
        again = outcome.command or "asyncrl up CONFIG"
        return f"the run failed: {error}. What it had saved is gone with it. To begin anew: {again}"
    is_forgetful = _keeps_no_journal(folder)
    sentences = [
        f"the run failed{where}: {error}.",
        _saved(folder, is_forgetful),
        _account(folder),
        _again(folder, is_forgetful, would_repeat=outcome.would_repeat),
    ]
    tail = _that_says_more(list(outcome.tail) or folder.tail(service), error)
    log = folder.log(service) if service else folder.logs
    if not tail or not num_lines:
        return " ".join(sentences)
    lines = [" ".join(sentences), f"The last lines of {log}:"]
    return "\n".join([*lines, *(f"  | {printable(line, ESCAPED)}" for line in tail[-num_lines:])])


def end_of(folder: RunDir) -> str:
    """Return how the run in `folder`, which is over, ended, and how to go on; empty if unknown."""
    name = f"run '{folder.path.name}'"
    if (outcome := read_outcome(folder)) is not None:
        if outcome.state == RunState.FAILED:
            return paragraph(folder, outcome, num_lines=0)
        if outcome.state == RunState.FINISHED:
            return f"{name} has ended: it finished; see {folder.path}"
        return f"{name} has ended: it was {outcome.state}. To go on: {command_of(folder)}"
    if (live := read_live(folder.live)) is None:
        return ""
    rows = training_rows(newest_rows(folder.metrics))
    where = f"at step {int(rows[-1]['training/global_step'])}" if rows else "before its first step"
    return (
        f"{name} was cut short {where}: its head process {live.pid} was killed, or the machine went down. "
        f"{next_start_of(folder)}"
    )


def next_start_of(folder: RunDir) -> str:
    """Return what the next start of the run in `folder` does, and the command."""
    saved = sorted(found.name for found in folder.checkpoints.glob("step-*"))
    if not saved or _keeps_no_journal(folder):
        return f"No checkpoint was written; to begin anew: {command_of(folder)}"
    step = int(saved[-1].removeprefix("step-"))
    return f"To go on from the checkpoint of step {step}: {command_of(folder)}"


def _without_repetition(error: str, service: str) -> str:
    """Return the error without the name of its service, and of classes that only carry another error on.

    >>> _without_repetition("rollout.0 failed: ServiceFailed: rollout.0 cannot go on: no reward", "rollout.0")
    'no reward'
    """
    pattern = (
        rf"^(?:{re.escape(service)} )?(?:failed: )?(?:ServiceFailed: )?{CARRIED.format(re.escape(service))}"
    )
    return re.sub(pattern, "", error) or error


def _that_says_more(tail: list[str], error: str) -> list[str]:
    """Return the log's lines; none if they are the traceback of `error`, which is told already."""
    reason = error.partition(";")[0]
    is_told = bool(reason) and any(reason[:TOLD_CHARACTERS] in line for line in tail)
    return [] if is_told else tail


def _again(folder: RunDir, is_forgetful: bool, *, would_repeat: bool) -> str:
    if would_repeat:
        return f"It would fail in the same way again: mend that first; then {command_of(folder)}"
    return f"{'To begin anew' if is_forgetful else 'To go on'}: {command_of(folder)}"


def command_of(folder: RunDir) -> str:
    """Return the command that starts the run in `folder` once more."""
    live = read_live(folder.live)
    place = ["--set", f"run.dir={folder.path.parent}"]
    return (live.command if live is not None else "") or shlex.join(
        ["asyncrl", "up", str(folder.resolved), *place]
    )


def _keeps_no_journal(folder: RunDir) -> bool:
    try:
        return not journal_facts(load_resolved(folder.path).buffer.journal).keeps_past
    except ConfigError:  # a folder without its configuration, or another asyncrl's
        return False


def _saved(folder: RunDir, is_forgetful: bool) -> str:
    rows = (row for row in iterate_rows(folder.metrics) if not is_evaluation(row))
    last = max((int(row["training/global_step"]) for row in rows), default=0)
    saved = sorted(found.name for found in folder.checkpoints.glob("step-*"))
    trained = f"step {last} was the last on record" if last else "no step was trained"
    if not saved:
        return f"Saved: no checkpoint; {trained}."
    step = int(saved[-1].removeprefix("step-"))
    if is_forgetful:
        what = "a run with buffer.journal: none cannot go on from it, but 'asyncrl export' takes it"
        return f"Saved: the checkpoint of step {step} in {folder.checkpoints / saved[-1]}; {trained}; {what}."
    again = f"; steps {step + 1} to {last} are trained again from the journal" if last > step else ""
    return f"Saved: the checkpoint of step {step} in {folder.checkpoints / saved[-1]}; {trained}{again}."


def _account(folder: RunDir) -> str:
    """The summary tells of this start only if it was written in it: who died at once wrote none."""
    ledger = (read_json(folder.summary) or {}).get("ledger") or {}
    live = read_live(folder.live)
    began = (live.began if live is not None else None) or 0.0
    if ledger.get("issued") is None or not _is_later(folder.summary, began):
        return f"Account of the prompts: asyncrl inspect account {folder.path}."
    dropped = sum((ledger.get("dropped") or {}).values())
    residue = (read_json(folder.summary) or {}).get("ledger_residue")
    return (
        f"Account of the prompts: {ledger['issued']} issued, {ledger['trained']} trained, {dropped} dropped, "
        f"residue {residue}."
    )


def _is_later(path: Path, time_s: float) -> bool:
    return path.exists() and path.stat().st_mtime >= time_s
