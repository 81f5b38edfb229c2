"""Entry point of the simulator: `python -m tests.simulation [--scope sync] [--seeds 100]`."""

from __future__ import annotations

import logging
import sys

import torch

from tests.simulation.command import main

if __name__ == "__main__":
    logging.getLogger().setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
