"""`asyncrl replay`: recorded steps trained again, and what differs from the record."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from asyncrl.cli import exits
from asyncrl.cli.services import function

if TYPE_CHECKING:
    from learner.record.comparison import Comparison


def print_replay(
    run: str,
    runs_dir: str,
    first: int | None,
    num_steps: int | None,
    overrides: Sequence[str],
    *,
    shows_difference: bool,
    as_json: bool,
) -> int:
    """Replay, print what came of it, and return the exit code: 1 if anything differs."""
    found: Comparison = function("learner.record.replay:replay_run")(
        run, runs_dir, first, num_steps, overrides=overrides, stops=shows_difference, say=exits.say
    )
    if as_json:
        print(json.dumps(_without_nan(asdict(found) | {"is_exact": found.is_exact}), allow_nan=False))
    else:
        print("\n".join(_lines(found, shows_difference)))
    return exits.OK if found.is_exact else exits.FAILED


def _describe_state(found: Comparison) -> str:
    what = "optimizer, critic, generators and controllers"
    compared = [step.step + 1 for step in found.steps if step.has_state]
    if not compared:
        return f"{what} were not compared: the run has no checkpoint after one of these steps"
    return f"{what}: bit by bit those of the checkpoints of steps {', '.join(map(str, compared))}"


def _without_nan(value: Any) -> Any:
    """Return `value` with null for every number that JSON has no word for."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(found: Comparison, shows_difference: bool) -> list[str]:
    last, num_weights = found.steps[-1].step, sum(step.has_weights for step in found.steps)
    difference = found.first_difference()
    if difference is None:
        weights = f"the weights of {num_weights} of {len(found.steps)} steps"
        return [
            f"steps {found.began_at} to {last}: all metrics and {weights} are bit by bit those of the run",
            _describe_state(found),
        ]
    step, metric = difference
    lines = [f"first difference: step {step}, {metric}"]
    if shows_difference:
        lines += [f"  {other}" for compared in found.steps for other in compared.differences[1:]]
    return lines
