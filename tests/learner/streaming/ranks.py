"""Programs of learner ranks in tests of streaming: one step whole and in parts, the last of one group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner.backend import LearnerBackend, Models, Placement
from learner.fsdp2.groups import join_group
from learner.orders import Train
from learner.report import Stopwatch, reduce_over_ranks
from learner.step import train_step
from learner.stream import StreamedStep
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import StoredGroups, open_backend, open_fsdp2, open_objective

PARTS = ([2, 4], [0, 3, 5], [1])
MAX_PROMPT = 6


def run_streamed(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return the metrics of one step, from the weights of the start."""
    opener, group = open_backend, None
    if job["backend"] == "fsdp2":
        opener, group = open_fsdp2, join_group(placement, gpus=0, seed=0)
    policy = opener(Path(job["model"]), placement, minibatches=1, warmup_steps=0)
    found = take(policy, PARTS if job["name"] == "parts" else ())
    policy.close()
    if group is not None:
        group.stop()
    return found


def take(policy: LearnerBackend, parts: tuple[list[int], ...]) -> dict[str, float]:
    """Train one step on six groups, in `parts` or whole."""
    groups, objective = make_groups(6, versions=(1, 2)), open_objective()
    orders = [
        Train(
            step=2,
            token=1,
            tickets=[groups[index].ticket for index in sorted(part)],
            num_tokens=[groups[index].num_tokens for index in sorted(part)],
            versions=[(1, 0), (2, 1)],
            is_first=at == 0,
            is_last=at == max(len(parts) - 1, 0),
        )
        for at, part in enumerate(parts or [range(6)])
    ]
    given = (StoredGroups(groups), Models(policy), objective)
    if parts:
        streamed = StreamedStep(*given, Stopwatch(), MAX_PROMPT)
        for order in orders:
            streamed.add(order)
        _, result = streamed.finish()
    else:
        result = train_step(orders[0], *given, 1, Stopwatch(), MAX_PROMPT)
    return reduce_over_ranks(policy, result.metrics, result.weight)
