"""An advantage that can be made slow while a run goes on, for the test that a fleet follows its load."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from learner.algorithms.advantage import Advantage, AdvantageInput

VARIABLE = "SLOW_LEARNER"
"""Names a file with the seconds that each step is to take longer."""


def slow(x: AdvantageInput) -> Advantage:
    """Wait if the file is there, and return 0 for every token."""
    path = Path(os.environ[VARIABLE])
    if path.exists():
        time.sleep(float(path.read_text()))
    zeros_N = torch.zeros_like(x.rewards_N)
    return Advantage(zeros_N, zeros_N)
