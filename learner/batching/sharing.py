"""Choice whether a model computes shared prompts once; see `shared_prompts.py`.

Must never choose by a batch: what cannot share does not share at any step, and says why once.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch

from asyncrl.core.config.tree import LearnerSection

log = logging.getLogger(__name__)


def can_share(
    config: LearnerSection, model: Path, device: torch.device, *, is_varlen: bool, problem: str = ""
) -> bool:
    """Tell whether a model computes prompts once; why not is logged once.

    Args:
        model: Its folder.
        is_varlen: Attention is by the kernel for variable lengths.
        problem: Of the model, as its backend says.
    """
    obstacles = {
        "learner.shared_prompt is off": config.shared_prompt == "off",
        "learner.cp cuts rows into pieces": config.cp > 1,
        "learner.compile would compile each tree anew": config.compile,
        "learner.kernels is te, whose attention takes rows alone": config.kernels == "te",
        "this GPU has no kernel for variable lengths in this dtype": device.type == "cuda" and not is_varlen,
        problem: bool(problem),
    }
    reason = next((reason for reason, is_so in obstacles.items() if is_so), None)
    if reason is not None:
        _say(f"{model.name}: a prompt is computed for each of its rows: {reason}")
    return reason is None


@functools.cache
def _say(sentence: str) -> None:
    log.info("%s", sentence)
