"""Reader of selected answers from a run's journal, live or ended.

Owns the choice of answers, and what to do where a payload is gone or the model has no tokenizer here.
Invariant: the run is only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.cli.audit.report import RunPast, opened_past
from asyncrl.cli.exits import say
from asyncrl.cli.rollouts.fates import Fate, FateBook, Rollout, order_rollouts
from asyncrl.cli.rollouts.pieces import pieces_of
from asyncrl.cli.rollouts.sheet import Entry, Sheet
from asyncrl.core.errors import WireError
from asyncrl.core.experience import decode_group
from asyncrl.core.files.printable import printable
from asyncrl.page.rollouts import decoder_of

MAX_DROPPED_GROUPS = 4096
"""Of the newest ones; older payloads are long gone."""


@dataclass(frozen=True)
class Choice:
    """Selection of answers.

    Attributes:
        step: None for the newest that was trained; of dropped groups, for all.
        order: `worst` or `best` reward first; empty for the journal's order.
        limit: Maximum number of answers.
    """

    step: int | None
    order: str
    is_dropped: bool
    limit: int


def make_sheet(folder: Path, choice: Choice) -> Sheet:
    """Read the journal of the run in `folder` and return the chosen answers.

    Raises:
        ConfigError: It keeps no journal, or has no such step.
        CheckpointError: The journal is damaged.
    """
    with opened_past(folder) as past:
        book = FateBook(past.events(), past.start(), past.config.staleness.max_lag)
        title, fates = _choose(book, choice)
        rollouts, gone = _collect(book, past, fates)
    if choice.order:
        rollouts = order_rollouts(rollouts, choice.order)
    shown = rollouts[: choice.limit]
    decode = decoder_of(Path(past.config.model.path), say) if shown else str
    entries = [Entry(one, printable(decode(one.prompt_ids)), pieces_of(one, decode)) for one in shown]
    return Sheet(folder.name, title, entries, len(rollouts), gone)


def _choose(book: FateBook, choice: Choice) -> tuple[str, list[Fate]]:
    order = f", {choice.order} first" if choice.order else ""
    if choice.is_dropped:
        when = "" if choice.step is None else f" while step {choice.step} was in the making"
        return f"dropped groups{when}{order}", book.dropped(choice.step)[:MAX_DROPPED_GROUPS]
    step = book.newest_step if choice.step is None else choice.step
    return f"step {step}{order}", book.of_step(step)


def _collect(book: FateBook, past: RunPast, fates: Sequence[Fate]) -> tuple[list[Rollout], list[Fate]]:
    """Return the answers of the groups whose payload is there and can be read, and the other groups."""
    found = past.scan.find_payloads([fate.key for fate in fates])
    rollouts: list[Rollout] = []
    gone = []
    for fate in fates:
        try:
            if fate.key not in found:
                raise WireError("its payload is gone")
            group = decode_group(found[fate.key])
        except WireError:  # also one of an older asyncrl, which this one does not read
            gone.append(fate)
            continue
        rollouts += book.rollouts_of(fate, group)
    return rollouts, gone
