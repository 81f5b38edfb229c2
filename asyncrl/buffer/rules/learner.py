"""Rules of a learner towards the buffer: what is due after a step, and how long it waits for a batch (pure).

Owns no step and no clock: `learner.leader` and the planner's learner own theirs and ask here. Must never be
written a second time.
"""

from __future__ import annotations

from collections.abc import Iterable

RESERVE_WAIT_S = 0.5
"""How long a reservation may lie at the buffer."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.32
"""Between two looks for a free buffer of the publisher: a transfer takes milliseconds, or many seconds."""


def publish_pause_s(num_looks: int) -> float:
    """Return the pause after `num_looks` looks in a row, at least one, that found no free buffer.

    >>> [publish_pause_s(looks) for looks in (1, 2, 3, 40)]
    [0.01, 0.02, 0.04, 0.32]
    """
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_looks - 1, 20)))


def reserve_wait_s(num_looks: int) -> float:
    """Return how long a reservation may lie at the buffer.

    Args:
        num_looks: Looks in a row that found no free buffer for the newest weights; 0 once they are published.
    """
    return publish_pause_s(num_looks) if num_looks else RESERVE_WAIT_S


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
