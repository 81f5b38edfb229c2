"""`asyncrl replay`: recorded steps trained again, and what differs from the record."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from asyncrl.cli import exits
from asyncrl.core.variants import function

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
        exits.show(*_lines(found, shows_difference))
    return exits.OK if found.is_exact else exits.FAILED


def _describe_state(found: Comparison) -> str:
    what = "optimizer, critic, generators and controllers"
    compared = [step.step + 1 for step in found.steps if step.has_state]
    if not compared:
        these = "this step" if len(found.steps) == 1 else "any of these steps"
        return f"{what} were not compared: the run has no checkpoint after {these}"
    checkpoints = "the checkpoint" if len(compared) == 1 else "the checkpoints"
    return f"{what}: bit by bit those of {checkpoints} of {_name_steps(compared)}"


def _without_nan(value: object) -> object:
    """Return `value` with null for every number that JSON has no word for."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(found: Comparison, shows_difference: bool) -> list[str]:
    if found.is_exact:
        return [_describe_equality(found), _describe_state(found)]
    lines = []
    for on_the_way in (True, False):
        differing = found.first_to_differ(on_the_way=on_the_way)
        if differing is not None:
            where = f" on the way to step {found.first}" if on_the_way else ""
            first, *others = differing.differences
            lines.append(f"first difference{where}: step {differing.step}, {first}")
            lines += [f"  {other}" for other in others] if shows_difference else []
    return lines


def _describe_equality(found: Comparison) -> str:
    steps = [step.step for step in found.steps]
    with_weights = [step.step for step in found.steps if step.has_weights]
    what = "all metrics"
    if with_weights == steps:
        what += " and the weights"
    elif with_weights:
        what += f", and the weights after {_name_steps(with_weights)},"
    equal = f"{_name_steps(steps)}: {what} are bit by bit those of the run"
    return equal if with_weights else f"{equal}; it recorded no weights there"


def _name_steps(steps: Sequence[int]) -> str:
    named: str = function("learner.record.batch_store:name_steps")(steps)
    return named
