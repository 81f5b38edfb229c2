"""Rules of a learner towards the buffer: what is due after a step, and how long it waits for a batch (pure).

Owns no step and no clock: `learner.leader` and the planner's learner own theirs and ask here. Must never be
written a second time.
"""

from __future__ import annotations

from collections.abc import Iterable

RESERVE_WAIT_S = 0.5
"""Time that a reservation may wait at the buffer."""


class Publishing:
    """A learner's publishes: which weights are out, and the evaluations due.

    Weights that find no free buffer stay unpublished, and the newest go as soon as there is one; the learner
    waits for that and for its next batch at a time.

    >>> publishing = Publishing(eval_every=5)
    >>> publishing.stand_at(3)
    >>> publishing.is_due(3)
    True
    >>> publishing.take(4), publishing.is_due(4)
    (False, False)
    >>> publishing.take(6)
    True

    Args:
        eval_every: Steps between two evaluations, 0 for none. last_step: Of the run, evaluated as well.
    """

    def __init__(self, eval_every: int, last_step: int | None = None) -> None:
        self._eval_every, self._last_step = eval_every, last_step
        self._published_step = self._evaluated_step = -1

    def stand_at(self, step: int) -> None:
        """Take up the weights of `step`, of which nothing is published yet."""
        self._published_step, self._evaluated_step = -1, step - 1

    def is_due(self, step: int) -> bool:
        """Tell whether the weights after `step` steps are to be published."""
        return step != self._published_step

    def take(self, step: int) -> bool:
        """Note that the publisher has taken the weights of `step`; tell whether they are to be evaluated."""
        before, self._evaluated_step = self._evaluated_step, step
        self._published_step = step
        return is_evaluation_due(step, before, self._eval_every, self._last_step)

    def lose(self) -> None:
        """Note that the publisher has lost the newest weights: they are due again."""
        self._published_step = -1


def must_resume(steps_trained: int, *, has_checkpoint: bool) -> bool:
    """Tell whether a learner that opens has to take the ledger back to where it stands."""
    return bool(steps_trained) or has_checkpoint


def is_evaluation_due(step: int, evaluated_step: int, every: int, last_step: int | None = None) -> bool:
    """Tell whether the weights after `step` steps are to be evaluated.

    Args:
        evaluated_step: The step at which that was asked last; `step` - 1 right after a start.
        every: Steps between two evaluations, 0 for none. last_step: Of the run, which is evaluated as well.

    >>> [step for step in range(1, 12) if is_evaluation_due(step, step - 1, every=5, last_step=11)]
    [5, 10, 11]
    """
    if not every:
        return False
    return step // every > evaluated_step // every or step == last_step


def is_checkpoint_due(step: int, every: int) -> bool:
    """Tell whether there is to be a checkpoint of the weights after `step` steps."""
    return step % every == 0


def kept_checkpoints(step: int, older: Iterable[int], keep: int) -> list[int]:
    """Return the steps of the checkpoints that stay once that of `step` is committed, ascending.

    Args:
        older: Steps of the checkpoints that may be gone back to; later ones than `step` belong to a branch
            that a resume has abandoned.
    """
    return [*sorted(one for one in older if one < step), step][-keep:]
