"""Evaluations, recounted from the journal's turns alone (pure).

It shares no code with the ledger. Invariant: an order ends once, all its parts at the version that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.planner.faults.checks.violation import Violation

NODE, ASKED, REFUSED = "val-aux/sim/node/mean", "val-aux/sim/asked/mean", "val-aux/num_refused"
"""What a result tells: the mean of the nodes that answered, which prompts, and parts without a result."""


def mark_of(prompt: int) -> float:
    """Return what an answer to a prompt adds to `ASKED`: no two sums of single answers are alike."""
    return float(4**prompt)


@dataclass
class _Order:
    step: int
    num_parts: int
    served: int | None = None
    holders: dict[int, str] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


@dataclass
class EvaluationBook:
    """The account so far.

    Attributes:
        open: Orders that have not ended. steps: Of all orders, by id.
        results: (version, metrics) of those that were answered.
        fresh: Ids of results that nobody has judged yet.
    """

    open: dict[int, _Order] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    results: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)

    def request(self, number: int, step: int, num_parts: int = 1) -> None:
        """An order is given."""
        if number != len(self.steps) + 1:
            raise Violation("eval", f"evaluation {number} was ordered after {len(self.steps)}")
        if any(one.step == step for one in self.open.values()):
            raise Violation("eval", f"evaluation {number} of step {step} was ordered while another one waits")
        self.steps[number], self.open[number] = step, _Order(step, num_parts)

    def give(self, number: int, replica: str, part: int = 0, version: int | None = None) -> None:
        """A part is handed out, or taken back where `replica` is empty."""
        one = self._expect(number, part)
        if not replica:
            one.holders.pop(part, None)
            return
        if part in one.holders or replica in one.holders.values():
            raise Violation(
                "eval", f"part {part} of {number} was given to {replica}, at work are {one.holders}"
            )
        if one.served not in (None, version):
            raise Violation(
                "eval", f"part {part} of {number} was given at version {version}, not {one.served}"
            )
        one.holders[part], one.served = replica, version

    def restart(self, number: int) -> None:
        """All that was answered is thrown away."""
        one = self._expect(number, None)
        if one.holders:
            raise Violation("eval", f"evaluation {number} began anew while {one.holders} were at work")
        one.served, one.done = None, set()

    def finish_part(self, number: int, part: int, version: int, *_: Any) -> None:
        """A part is answered."""
        one = self._expect(number, part)
        self._check_version(number, one, version)
        one.holders.pop(part, None)
        one.served = version
        one.done.add(part)

    def finish(self, number: int, version: int, metrics: Sequence[tuple[str, float]]) -> None:
        """The last part is answered."""
        one = self._expect(number, None)
        self._check_version(number, one, version)
        if len(one.done) + 1 != one.num_parts:
            raise Violation(
                "eval", f"evaluation {number} ended with {len(one.done) + 1} of {one.num_parts} parts"
            )
        del self.open[number]
        self.results[number] = (version, dict(metrics))
        self.fresh.append(number)

    def resume(self, step: int) -> None:
        """The run goes back: what was ordered for later steps is ordered again as they come."""
        self.open = {number: one for number, one in self.open.items() if one.step <= step}

    def _expect(self, number: int, part: int | None) -> _Order:
        one = self.open.get(number)
        if one is None or part in one.done or not 0 <= (part or 0) < one.num_parts:
            raise Violation("eval", f"part {part} of evaluation {number} is none that waits")
        return one

    @staticmethod
    def _check_version(number: int, one: _Order, version: int) -> None:
        if one.served not in (None, version):
            raise Violation("eval", f"evaluation {number} of version {one.served} has an answer of {version}")


def judge(metrics: Mapping[str, float], node: int, num_prompts: int, *, may_be_refused: bool) -> str:
    """Return what is wrong with a result of weights `node`, or "".

    Args:
        may_be_refused: Whether a part of it can have had no usable result.
    """
    if may_be_refused:
        return "" if set(metrics) == {REFUSED} else f"it has figures, {dict(metrics)}, of an unusable part"
    if REFUSED in metrics:
        return f"a part was refused: {dict(metrics)}"
    if any(value != node for name, value in metrics.items() if name.startswith(NODE)):
        return f"other weights than {node} answered: {dict(metrics)}"
    if metrics[ASKED] != sum(map(mark_of, range(num_prompts))):
        return f"not each prompt was answered once: {dict(metrics)}"
    return ""
