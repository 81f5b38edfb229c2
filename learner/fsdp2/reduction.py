"""Metrics over microbatches and ranks, each reduced by its name's rule.

What is reduced as maximum or minimum says `asyncrl.core.metrics.extreme_of`; all else is summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from asyncrl.core.metrics import extreme_of
from learner.fsdp2.groups import RankGroup

_RULES = (
    (None, dist.ReduceOp.SUM, torch.sum),
    ("max", dist.ReduceOp.MAX, torch.amax),
    ("min", dist.ReduceOp.MIN, torch.amin),
)


def reduce_metrics(metrics: Mapping[str, Sequence[torch.Tensor]], group: RankGroup) -> dict[str, float]:
    """Return one value per name from the values of this rank's microbatches; collective."""
    reduced: dict[str, float] = {}
    for rule, op, combine in _RULES:
        names = sorted(name for name in metrics if extreme_of(name) == rule)
        if names:
            values = torch.stack(
                [combine(torch.stack([v.detach() for v in metrics[name]])) for name in names]
            )
            reduced.update(zip(names, group.all_reduce(values, op).tolist(), strict=True))
    return reduced


def average_metrics(metrics: Mapping[str, float], weight: float, group: RankGroup) -> dict[str, float]:
    """Return metrics over all ranks: max, min, or the mean by `weight`; collective."""
    total = float(group.all_reduce(torch.tensor([weight], dtype=torch.float64))[0])
    share = weight / total if total else 1.0 / group.size
    # A rank without weight adds nothing to a mean, even if its value is not a number.
    shares = {name: value * share if share else 0.0 for name, value in metrics.items()}
    shares |= {name: value for name, value in metrics.items() if extreme_of(name)}
    tensors = {name: [torch.tensor(value, dtype=torch.float64)] for name, value in shares.items()}
    return reduce_metrics(tensors, group)
