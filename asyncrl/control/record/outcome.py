"""`outcome.json`: how a run has ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from asyncrl.core.files.durable import replace_text
from asyncrl.core.states import RunState

if TYPE_CHECKING:
    from asyncrl.control.record.rundir import RunDir


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """End of a run, or the end in progress.

    Attributes:
        service: The failed service. tail: The last lines of that service's log.
        would_repeat: The next start would meet the same failure.
        is_removed: The run's folder was removed meanwhile.
        command: Starts the run once more; only in memory of the process that started or found it.
    """

    state: RunState
    error: str = ""
    service: str = ""
    tail: tuple[str, ...] = ()
    would_repeat: bool = False
    is_removed: bool = False
    command: str = ""

    def as_values(self) -> dict[str, object]:
        """Return the fields in JSON."""
        found: dict[str, object] = msgspec.to_builtins(self)
        unsaid = ("command",) if self.state is RunState.FAILED else ("command", "would_repeat", "is_removed")
        return {name: value for name, value in found.items() if name not in unsaid}


def read_outcome(folder: RunDir) -> Outcome | None:
    """Return the outcome of the run in `folder`, None while it lives, or if it is unknown."""
    try:
        return msgspec.json.decode(folder.outcome.read_bytes(), type=Outcome)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


def write_outcome(folder: RunDir, outcome: Outcome) -> str:
    """Write down how a run ended: in the room that was reserved for it, and also if its folder was removed.

    Returns:
        Why that is not possible, empty if it is done.
    """
    try:
        folder.path.mkdir(exist_ok=True)
        folder.reserve.unlink(missing_ok=True)
        replace_text(folder.outcome, json.dumps(outcome.as_values(), indent=2) + "\n", is_synced=True)
    except OSError as error:
        return f"{error}"
    return ""
