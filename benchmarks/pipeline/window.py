"""Window of a run, between two of its steps: from the learner's rows and the replicas' own accounts.

Owns the figures of one case, their names and units. Invariant: all of them are of the same steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.core.status.replica import EngineStatus

TRAINING = ("timing_s/old_log_prob", "timing_s/update_actor")
BUSY = "busy"
"""The share of the replicas' time in which they had a request in flight, beside the causes of the rest."""
TRAINED = "staleness/trained_tokens"
ESS = "rollout_corr/rollout_is_eff_sample_size"


@dataclass(frozen=True)
class Sample:
    """Engine statuses of the replicas at `time_s` of the wall clock, as in the learner's rows.

    Attributes:
        dropped_groups: Groups dropped by the buffer until then.
    """

    time_s: float
    replicas: Mapping[str, EngineStatus]
    dropped_groups: int = 0


@dataclass(frozen=True)
class Window:
    """The figures of consecutive steps.

    Attributes:
        num_steps: Number of steps.
        step_s: Mean seconds per step.
        tokens: Mean sampled tokens per step, masked ones included.
        trained_tokens: Mean tokens per step that entered the loss.
        training_s: t: mean seconds per step in which the model computed.
        busy_s: Mean seconds per step in which a replica had a request in flight, of one replica.
        tokens_per_busy_s: Tokens that all replicas sampled per second in which they were busy.
        exposed_sync_s: Mean seconds per step that the learner spent on handing weights over, or waited to.
        step_samples_s: Each step's seconds.
        trained_samples_per_s: Each step's trained tokens per second.
        shares: Further figures by name, see `read_window`.
    """

    num_steps: int
    step_s: float
    tokens: float
    trained_tokens: float
    training_s: float
    busy_s: float
    tokens_per_busy_s: float
    exposed_sync_s: float
    step_samples_s: tuple[float, ...] = ()
    trained_samples_per_s: tuple[float, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def generation_s(self) -> float:
        """g: what the step's tokens take at the rate that the replicas had while they were busy."""
        return self.tokens / self.tokens_per_busy_s if self.tokens_per_busy_s else 0.0


def read_window(rows: Sequence[Mapping[str, Any]], samples: Sequence[Sample], first: int) -> Window:
    """Return the figures of the steps from `rows[first]` on; the time begins at the end of the one before.

    `shares` are `learner/<stage>` (of the step's time), `rollout/<BUSY or cause>` (of the replicas'),
    `lag_share/<lag>`, `lag_mean`, `masked_share`, `ess` (if the correction makes it), `longest_tokens`;
    `requests_running`, of all replicas while they were busy; `unused_tokens_per_step`, which were sampled and
    not handed to the learner, and `dropped_groups_per_step`, what the buffer dropped.
    """
    measured, began_s, ended_s = rows[first:], rows[first - 1]["time"], rows[-1]["time"]
    elapsed_s, count = ended_s - began_s, len(rows) - first
    before = max((one for one in samples if one.time_s <= began_s), key=_time, default=samples[0])
    after = min((one for one in samples if one.time_s >= ended_s), key=_time, default=samples[-1])
    between_s, num_replicas = after.time_s - before.time_s, len(after.replicas)
    spent = _account(before, after)
    sampled = sum(after.replicas[name].tokens - before.replicas[name].tokens for name in after.replicas)
    busy_s = spent[BUSY] / num_replicas
    tokens = _mean(measured, TRAINED) + _mean(measured, "staleness/masked_tokens")
    watched = [one for one in samples if before.time_s <= one.time_s <= after.time_s]
    return Window(
        num_steps=count,
        step_s=elapsed_s / count,
        tokens=tokens,
        trained_tokens=_mean(measured, TRAINED),
        training_s=sum(_mean(measured, name) for name in TRAINING),
        busy_s=busy_s * elapsed_s / between_s / count,
        tokens_per_busy_s=sampled / busy_s if busy_s else 0.0,
        exposed_sync_s=_mean(measured, "weights/publish_s") + _mean(measured, "timing_s/wait_publisher"),
        step_samples_s=tuple(row["timing_s/step"] for row in measured),
        trained_samples_per_s=tuple(row[TRAINED] / row["timing_s/step"] for row in measured),
        shares={
            **_learner_shares(measured),
            **{f"rollout/{cause}": spent[cause] / between_s / num_replicas for cause in sorted(spent)},
            **_of_lags(measured),
            "masked_share": _masked(measured),
            **({"ess": _mean(measured, ESS)} if any(ESS in row for row in measured) else {}),
            "longest_tokens": _mean(measured, "response_length/max"),
            "requests_running": _running(watched),
            "unused_tokens_per_step": sampled * elapsed_s / between_s / count - tokens,
            "dropped_groups_per_step": (after.dropped_groups - before.dropped_groups) / count,
        },
    )


def _time(sample: Sample) -> float:
    return sample.time_s


def _running(samples: Sequence[Sample]) -> float:
    """Return the mean number of requests in flight, of all replicas, over the samples with any."""
    running = [sum(status.in_flight_requests for status in one.replicas.values()) for one in samples]
    return statistics.fmean(count for count in running if count) if any(running) else 0.0


def _account(before: Sample, after: Sample) -> dict[str, float]:
    """Return the replicas' seconds by what they went by with."""
    spent: dict[str, float] = {BUSY: 0.0}
    for name, status in after.replicas.items():
        earlier = before.replicas[name]
        spent[BUSY] += status.busy_s - earlier.busy_s
        for cause, seconds in status.idle_by_cause.items():
            spent[cause] = spent.get(cause, 0.0) + seconds - earlier.idle_by_cause.get(cause, 0.0)
    return spent


def _mean(rows: Sequence[Mapping[str, Any]], name: str, default: float = 0.0) -> float:
    return statistics.fmean(row.get(name, default) for row in rows)


def _masked(rows: Sequence[Mapping[str, Any]]) -> float:
    masked = _mean(rows, "staleness/masked_tokens")
    return masked / max(1.0, masked + _mean(rows, TRAINED))


def _learner_shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of each of the learner's stages in the steps' time."""
    names = sorted({name for row in rows for name in row if name.startswith("timing_s/")} - {"timing_s/step"})
    step_s = _mean(rows, "timing_s/step")
    return {name.replace("timing_s/", "learner/", 1): _mean(rows, name) / step_s for name in names}


def _of_lags(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    prefix = "staleness/lag_share/"
    names = sorted({name for row in rows for name in row if name.startswith(prefix)})
    found = {name.removeprefix("staleness/"): _mean(rows, name) for name in names}
    return {"lag_mean": _mean(rows, "staleness/lag_mean"), **found}
