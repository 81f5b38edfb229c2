"""The probe: does the model that was just loaded say what the learner's model says?

Runs where an engine loads. The learner ships its log-probs of some rows of tokens with each version, and the
loaded model computes its own. The first probe that agrees is kept: those after it are judged by what has
changed since (`weight_sync.memory.agreement`). Imports no engine.

Shapes: R rows of L tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from asyncrl.core.errors import SyncError
from weight_sync.memory.agreement import TOLERANCES, Tolerance, find_disagreement, is_check_due
from weight_sync.memory.manifest import Probe

Row = tuple[int, ...]
Measure = Callable[[Sequence[Row], float], torch.Tensor | None]
"""(rows, temperature) -> log-probs [R, L - 1]; None on a worker where no logits arrive."""


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without its package."""
    return str(dtype).removeprefix("torch.")


class ProbeCheck:
    """Compares the probes of one engine's versions with the learner's, and with the first of them.

    Attributes:
        gap: Mean difference at the last one that passed, in nats per token; None where another worker judges.
    """

    def __init__(self) -> None:
        self.gap: float | None = None
        self._first: dict[Row, list[float]] = {}
        self._num_passed = 0
        self._passed_step: int | None = None

    def check(self, measure: Measure, precision: str, probe: Probe, step: int) -> None:
        """Return if the model of `measure`, with weights of `step`, agrees with `probe` or no check is due.

        `precision` is one of `TOLERANCES`: the name of a dtype, or of a quantization.
        Collective over the workers that share the model, as all of them load the same versions.

        Raises:
            SyncError: It does not, or its attention is of a kind that cannot be probed.
        """
        if not is_check_due(step, probe.every, self._num_passed, self._passed_step):
            return
        self._passed_step = None
        rows, wanted = zip(*probe.rows(), strict=True)
        found = measure(rows, probe.temperature)
        if found is not None:  # else the logits are gathered on another worker, which judges
            differences = {
                row: [ours - theirs for ours, theirs in zip(mine, learners, strict=True)]
                for row, mine, learners in zip(rows, found.tolist(), wanted, strict=True)
            }
            self._judge(differences, TOLERANCES[precision])
        self._num_passed, self._passed_step = self._num_passed + 1, step

    def _judge(self, differences: dict[Row, list[float]], tolerance: Tolerance) -> None:
        first = [
            value for row, now in differences.items() for value in self._first.get(row, [None] * len(now))
        ]
        now = [value for row in differences.values() for value in row]
        if why := find_disagreement(tolerance, now, first if self._first else None):
            raise SyncError(
                f"the probe does not match, engine and learner hold different weights: {why}",
                hint="They compute different models (compare dtypes and configurations), or the engine keeps "
                "an old copy of a tensor. weight_sync.probe_every: 0 turns the check off",
            )
        self.gap = fmean(map(abs, now))
        self._first = self._first or differences
