"""Entry point of the simulator: `python -m tests.simulation [--scope sync] [--seeds 100]`."""

from __future__ import annotations

import sys

from tests.simulation.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
