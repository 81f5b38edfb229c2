"""Final answer of a response in canonical form, so that equal answers compare equal (maj@k).

A reward with a rule for the final answer provides it; under any other reward the whole text counts, without
white space around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.core.experience import Trajectory
from rollout_service.rewards.competition_math import find_box, normalize
from rollout_service.rewards.dapo_math import INVALID, judge
from rollout_service.rewards.gsm8k import extract_flexible, extract_strict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Extract = Callable[[str], str | None]
"""From a response to what it states, None if it states nothing."""


def extract_boxed(response: str) -> str | None:
    """Return what the last box holds, in one way of writing it."""
    boxed = find_box(response)
    if boxed is None:
        return None
    try:
        return normalize(boxed)
    except ValueError:  # it is compared as it stands then
        return boxed


def extract_dapo(response: str) -> str | None:
    """Return what DAPO's rule reads as the final answer."""
    _, prediction = judge(response, "")
    return None if prediction == INVALID else prediction


EXTRACTS: Mapping[str, Extract] = {
    "gsm8k": extract_strict,
    "gsm8k_flexible": extract_flexible,
    "math": extract_boxed,
    "math_verify": extract_boxed,
    "math_dapo": extract_dapo,
}
"""By the registered name of the reward."""


def choose_extract(functions: Sequence[str]) -> Extract:
    """Return the rule of the first reward that has one, else the stripped text itself.

    Args:
        functions: Names in `reward.fn`, in order.
    """
    return next((EXTRACTS[name] for name in functions if name in EXTRACTS), _strip)


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
