"""Content of `asyncrl inspect rollouts`, before a terminal or a page renders it (pure).

Owns the wording of an answer's headline and of the fate of its group, and the plain values of `--json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.cli.rollouts.fates import WHY_DROPPED, Fate, Rollout
from asyncrl.cli.rollouts.pieces import Piece
from asyncrl.core.files.printable import ESCAPED, printable


@dataclass(frozen=True)
class Entry:
    """One answer, as text."""

    rollout: Rollout
    prompt: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Sheet:
    """All that is shown.

    Attributes:
        num_answers: That the choice had, before the limit.
        gone: Groups whose payload is not in the journal any more, or never was.
    """

    run: str
    title: str
    entries: Sequence[Entry]
    num_answers: int
    gone: Sequence[Fate]


def headline_of(entry: Entry) -> str:
    """Return who an answer is and what it earned, on one line."""
    fate, trajectory = entry.rollout.fate, entry.rollout.trajectory
    parts = [f"{name} {value:.4g}" for name, value in trajectory.reward_parts.items()]
    turns = f"{trajectory.num_turns} turns" if trajectory.num_turns > 1 else ""
    fields = [
        f"ticket {fate.ticket}, attempt {fate.attempt}, sample {entry.rollout.sample}",
        f"reward {trajectory.reward:.4g} (mean of its group {entry.rollout.group_mean:.4g})",
        f"reason {trajectory.reason}" if trajectory.reason else "",
        ", ".join(parts),
        f"ended by {trajectory.finish_reason}",
        turns,
        f"{trajectory.num_tokens} tokens",
        fate.state if fate.state != "trained" else "",
    ]
    return " · ".join(printable(part, ESCAPED) for part in fields if part)


def masks_line_of(entry: Entry) -> str:
    """Return how many tokens are not trained, and why; empty if all are."""
    masks = [piece.mask for piece in entry.pieces if piece.mask]
    if not masks:
        return ""
    reasons = ", ".join(f"{masks.count(why)} {why}" for why in dict.fromkeys(masks))
    return f"{len(masks)} of {len(entry.pieces)} tokens not trained: {reasons}"


def fate_line_of(fate: Fate) -> str:
    """Return what became of a group whose text is not there, or that was dropped."""
    if not fate.reason:
        why = "its text is not kept any more, or is of another schema"
        return f"ticket {fate.ticket}: {fate.state} at step {fate.step}, {why}"
    making = f" while step {fate.step} was in the making" if fate.step >= 0 else ""
    given_up = "; its prompt is given up" if fate.is_given_up else ""
    reason = printable(fate.reason, ESCAPED)
    why = WHY_DROPPED.get(reason, reason)
    return f"ticket {fate.ticket}: dropped ({reason}){making}: {why}{given_up}"


def values_of(sheet: Sheet) -> dict[str, object]:
    """Return the sheet as plain values."""
    return {
        "run": sheet.run,
        "title": sheet.title,
        "num_answers": sheet.num_answers,
        "answers": [_entry_values(entry) for entry in sheet.entries],
        "gone": [_fate_values(fate) for fate in sheet.gone],
    }


def _fate_values(fate: Fate) -> dict[str, object]:
    return {
        "ticket": fate.ticket,
        "attempt": fate.attempt,
        "state": fate.state,
        "step": fate.step,
        "reason": fate.reason,
        "is_given_up": fate.is_given_up,
    }


def _entry_values(entry: Entry) -> dict[str, object]:
    rollout, trajectory = entry.rollout, entry.rollout.trajectory
    spans = [
        {"version": one.span.version, "start": one.span.start, "end": one.span.end, "lag": one.lag}
        for one in rollout.spans
    ]
    return {
        **_fate_values(rollout.fate),
        "sample": rollout.sample,
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "reward_reason": trajectory.reason,
        "group_mean": rollout.group_mean,
        "finish_reason": trajectory.finish_reason,
        "num_turns": trajectory.num_turns,
        "prompt": entry.prompt,
        "prompt_ids": list(rollout.prompt_ids),
        "response_ids": trajectory.response_ids.tolist(),
        "texts": [piece.text for piece in entry.pieces],
        "logprobs": [piece.logprob for piece in entry.pieces],
        "masks": [piece.mask for piece in entry.pieces],
        "spans": spans,
    }
