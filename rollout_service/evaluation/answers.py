"""Final answer of a response in canonical form, so that equal answers compare equal (maj@k).

A reward with a rule for the final answer names it in its record; under any other reward the whole text
counts, without white space around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.core.experience import Trajectory
from asyncrl.core.variants import function
from rollout_service.rewards.variants import REWARDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Extract = Callable[[str], str | None]
"""From a response to what it states, None if it states nothing."""


def choose_extract(functions: Sequence[str]) -> Extract:
    """Return the rule of the first reward that has one, else the stripped text itself.

    Args:
        functions: Names in `reward.fn`, in order.
    """
    rules = (REWARDS[name].answer for name in functions if name in REWARDS)
    found: Extract = next((function(rule) for rule in rules if rule), _strip)
    return found


def _strip(response: str) -> str | None:
    return response.strip() or None


def make_stater(
    tokenizer: PreTrainedTokenizerBase, functions: Sequence[str]
) -> Callable[[Trajectory], str | None]:
    """Return what reads an answer in short off a trajectory: off what the model wrote in its last turn."""
    extract = choose_extract(functions)

    def state_answer(trajectory: Trajectory) -> str | None:
        ids = trajectory.response_ids[_last_turn(trajectory)]
        return extract(str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)))

    return state_answer


def _last_turn(trajectory: Trajectory) -> slice:
    """Return where the last tokens lie that were sampled one after the other."""
    sampled = np.flatnonzero(trajectory.loss_mask)
    if not len(sampled):
        return slice(0, 0)
    gaps = np.flatnonzero(np.diff(sampled) > 1)
    start = sampled[gaps[-1] + 1] if len(gaps) else sampled[0]
    return slice(int(start), int(sampled[-1]) + 1)
