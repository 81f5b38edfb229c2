"""`python -m asyncrl.sim.faults SEED`: play a seed again, twice, and print what happened."""

from __future__ import annotations

import sys

from asyncrl.sim.faults.command import main

if __name__ == "__main__":
    sys.exit(main())
