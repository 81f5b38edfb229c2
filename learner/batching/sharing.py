"""Choice whether a model computes shared prompts once; see `shared_prompts.py`.

Must never choose by a batch: what cannot share does not share at any step, and says why once.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path

import torch

from asyncrl.core.config.tree import LearnerSection
from asyncrl.models.architectures import EXPERT_KEYS

log = logging.getLogger(__name__)


def can_share(
    config: LearnerSection, model: Path, device: torch.device, *, is_varlen: bool, problem: str = ""
) -> bool:
    """Tell whether a model computes prompts once; why not is logged once.

    Args:
        model: Its folder. A mixture of experts does not: its auxiliary losses are means over the tokens that
            a router sees, where a prompt would weigh less, and rows that share may be routed differently.
        is_varlen: Attention is by the kernel for variable lengths.
        problem: Of the model, as its backend says.
    """
    obstacles = {
        "learner.shared_prompt is off": config.shared_prompt == "off",
        "learner.cp cuts rows into pieces": config.cp > 1,
        "learner.compile would compile each tree anew": config.compile,
        "learner.kernels is te, whose attention takes rows alone": config.kernels == "te",
        "the losses of its experts are about the tokens of each row": _is_mixture(model),
        "this GPU has no kernel for variable lengths in this dtype": device.type == "cuda" and not is_varlen,
        problem: bool(problem),
    }
    reason = next((reason for reason, is_so in obstacles.items() if is_so), None)
    if reason is not None:
        _say(f"{model.name}: a prompt is computed for each of its rows: {reason}")
    return reason is None


def _is_mixture(model: Path) -> bool:
    table = json.loads((model / "config.json").read_text())
    return any(one.get(key) for one in (table, table.get("text_config") or {}) for key in EXPERT_KEYS)


@functools.cache
def _say(sentence: str) -> None:
    log.info("%s", sentence)
