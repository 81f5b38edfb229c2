"""One rank of a replay, `python -m learner.record.rank ORDER`; `learner.record.processes` starts it.

Owns what the process prints: rank 0 a JSON line per compared step; every rank the error that has ended it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from asyncrl.core import errors as named_errors
from asyncrl.core.errors import AsyncrlError
from learner.backend import Placement
from learner.record.batch_store import FOLDER, BatchStore
from learner.record.comparison import ComparedStep
from learner.record.plan import Plan
from learner.record.processes import ERROR
from learner.record.replay import replay
from learner.record.settings import configure


def main(given: str) -> None:
    """Be one rank of a replay."""
    order = json.loads(given)
    fields = order["plan"]
    plan = Plan(**{**fields, "folder": Path(fields["folder"])})
    placement = Placement(**order["placement"])
    tell = _print_step if placement.rank == 0 else lambda step: print(step, file=sys.stderr, flush=True)
    try:
        settings = BatchStore(plan.folder / FOLDER).read_settings(plan.settings)
        config = configure(plan.folder, settings, order["overrides"])
        replay(plan, config, placement, tell=tell)
    except AsyncrlError as error:
        print(json.dumps(_describe_error(error)), flush=True)
        raise


def _print_step(step: ComparedStep) -> None:
    print(json.dumps(asdict(step)), flush=True)


def _describe_error(error: AsyncrlError) -> dict[str, str]:
    """Return an error as `processes` reads it: of the nearest class that all packages know."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == named_errors.__name__]
    return {ERROR: kinds[0], "message": error.message, "hint": error.hint}


if __name__ == "__main__":
    main(sys.argv[1])
