"""The learning rate of a learner step: linear warm-up, then constant or a cosine (pure).

Shared by every backend. Counts learner steps, never optimizer updates: all minibatches of a step take
the same rate. Invariant: no step has a rate of 0 unless `min_lr_ratio` is 0 and the last step is past.
"""

from __future__ import annotations

import math

from asyncrl.core.config.tree import LearnerSection


def schedule_lr(peak: float, step: int, config: LearnerSection) -> float:
    """Return the learning rate of learner step `step`, counted from 0.

    It rises linearly over `warmup_steps` to `peak`, which the first step after them has too. From there
    on `cosine` goes down half a cosine to `min_lr_ratio` times the peak at step `config.steps`, and
    stays there (arXiv:1608.03983, without restarts). As in transformers and verl, but for the warm-up:
    theirs begins with a step of rate 0 or of the minimum.
    """
    if step < config.warmup_steps:
        return peak * ((step + 1) / config.warmup_steps)
    if config.lr_schedule == "constant":
        return peak
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    height = (1.0 + math.cos(math.pi * min(1.0, progress))) / 2
    return peak * (height + config.min_lr_ratio * (1.0 - height))
