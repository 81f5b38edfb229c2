"""The metrics of a learner step, under verl's names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from asyncrl.experience import Group
from learner.batch import PackedBatch


class Stopwatch:
    """Seconds per stage of one step; stages do not overlap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time of the block to `stage`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Return `timing_s/<stage>` and start anew."""
        found = {f"timing_s/{stage}": seconds for stage, seconds in self.seconds.items()}
        self.seconds = {}
        return found


def describe_batch(groups: Sequence[Group], batch: PackedBatch) -> dict[str, float]:
    """Return rewards, response and prompt lengths and version spans of a batch.

    Lengths are in tokens; `response_length/clip_ratio` is the share cut at the token limit.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    lengths = [trajectory.num_tokens for trajectory in trajectories]
    rewards = [trajectory.reward for trajectory in trajectories]
    num_spans = [len(trajectory.spans) for trajectory in trajectories]
    cut = [trajectory.finish_reason == "length" for trajectory in trajectories]
    return {
        **_spread("critic/rewards", rewards),
        **_spread("critic/score", rewards),
        **_spread("response_length", lengths),
        **_spread("prompt_length", [len(group.prompt_ids) for group in groups]),
        **_spread("training/off_policy/trajectory_spans", num_spans),
        "response_length/clip_ratio": float(np.mean(cut)) if cut else 0.0,
        "perf/total_num_tokens": float(batch.num_tokens),
    }


def merge_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the optimizer updates of a step."""
    names = updates[0] if updates else {}
    merged = {name: float(np.mean([update[name] for update in updates])) for name in names}
    return merged | {"actor/num_updates": float(len(updates))}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }
