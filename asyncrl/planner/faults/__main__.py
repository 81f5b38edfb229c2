"""`python -m asyncrl.planner.faults SEED`: play a seed again, twice, and print what happened."""

from __future__ import annotations

import sys

from asyncrl.planner.faults.command import main

if __name__ == "__main__":
    sys.exit(main())
