"""Signals that the guard watches, each with its limit and its distance from the run's usual values (pure).

Owns the detectors. Must never act. A value beyond its limit is a finding; it is severe if it is also
`z_score` robust deviations (median and MAD of the last steps) from the usual, `FAR` times beyond, or lasting,
or is of a kind that has no harmless cause: of these, one value that is `FAR` beyond needs no median.
Invariant: until `warmup_steps` values are known only the fixed limits count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from asyncrl.core.config.sections.guard import WAYS
from asyncrl.core.config.tree import GuardSection, LimitSection
from weight_sync.memory.agreement import TOLERANCES, Tolerance

FAR = 10.0
ABSOLUTE = ("kl_spike", "clip_fraction", "value_clip_fraction", "low_ess")
"""Kinds whose limit means the same in every run: no run has a scale of its own."""
LASTING_STEPS = 5
"""Window in steps: an `ABSOLUTE` kind that is beyond its limit in most of them is severe."""
WINDOW_STEPS = 50
MAD_TO_DEVIATION = 1.4826
"""Standard deviation over MAD of a normal distribution."""
SMALLEST_RISE, SMALLEST_FALL = 0.2, 0.05
"""Least deviation, as a share of the median, for values that may grow without bound or fall to 0.

A run of nearly equal values makes no finding out of noise.
"""
UNUSUAL = 3.0
FINITE_PREFIXES = ("actor/", "critic/", "rollout_corr/")
MAY_BE_NAN = ("critic/score", "critic/rewards")
"""verl's names that are not a number where a batch has no row to average."""
SPEED_PREFIXES = ("perf/", "timing_s/", "timing_per_token_ms/")
"""Prefixes of metrics that no change of the training improves."""
GAP, GAP_TOKENS = "weights/engine_gap_mean", "weights/engine_gap_tokens"
GAP_STEPS = 5
"""The first gaps, whose median later ones are compared with: one step alone may be far from it."""
REWARD = "critic/rewards/mean"
SPIKES = ("kl_spike", "grad_norm_spike")
CERTAIN = ("weights_differ", "unsampled_tokens", "wrong_direction", "large_steps")
"""Kinds that need no comparison with the past: nothing but a fault makes them."""
UNMENDED = ("weights_differ", "unsampled_tokens", "wrong_direction")
"""Kinds whose fault is in the code: no other rate, no step back and no skipped update mends them."""
UNLESS_RISEN = {"entropy_collapse": REWARD}
"""A metric by kind of finding: where it is above what it was at first, the kind is success and not told."""
OTHER = "limit"
"""The kind of a limit that has no explanation of its own."""
KINDS = {
    ("actor/step_kl", "max"): "large_steps",
    ("actor/step_gain", "min"): "wrong_direction",
    ("actor/unsampled_share", "max"): "unsampled_tokens",
    ("actor/ppo_kl", "max"): "kl_spike",
    ("rollout_corr/kl", "max"): "kl_spike",
    ("actor/grad_norm", "max"): "grad_norm_spike",
    ("critic/grad_norm", "max"): "grad_norm_spike",
    ("actor/grad_norm", "max_times"): "grad_norm_spike",
    ("critic/grad_norm", "max_times"): "grad_norm_spike",
    ("actor/pg_clipfrac", "max"): "clip_fraction",
    ("critic/vf_clipfrac", "max"): "value_clip_fraction",
    ("actor/entropy", "min"): "entropy_collapse",
    ("actor/entropy", "min_share"): "entropy_collapse",
    ("rollout_corr/rollout_is_eff_sample_size", "min"): "low_ess",
    ("perf/throughput", "min"): "low_throughput",
    ("perf/throughput", "min_share"): "low_throughput",
    (GAP, "max"): "weights_differ",
}
"""Kind of a metric beyond its limit, by metric and form of the limit."""


@dataclass(frozen=True)
class Signal:
    """A metric with a limit.

    Attributes:
        way: The form of the limit, as in the configuration.
        limit: In the metric's unit, or a share of its first values, or a multiple of its last ones.
        over_steps: Values whose median is compared with it.
        tolerance: In place of `limit`, one that follows from the first values.
    """

    kind: str
    metric: str
    way: str
    limit: float
    over_steps: int = 1
    tolerance: Tolerance | None = None

    @property
    def is_upper(self) -> bool:
        """Whether values above the limit are findings; else those below."""
        return self.way.startswith("max")

    @property
    def is_spike(self) -> bool:
        """Whether a value in the run's usual range is no finding, even beyond the limit."""
        return self.kind in SPIKES

    @property
    def can_act(self) -> bool:
        """Whether a severe finding may change the training."""
        return not self.metric.startswith(SPEED_PREFIXES)


@dataclass(frozen=True)
class Finding:
    """Finding of one step.

    Attributes:
        limit: The limit that it is beyond, NaN where there is none.
        z: Robust z-score, None before the warm-up is over.
    """

    kind: str
    metric: str
    value: float
    limit: float = math.nan
    z: float | None = None
    is_severe: bool = False


def make_signals(section: GuardSection, precision: str) -> tuple[Signal, ...]:
    """Return what is watched in a run of `precision` (see `TOLERANCES`), apart from values not finite."""
    limits = section.limits.items()
    found = [_make_signal(metric, limit) for metric, limit in limits if limit is not None]
    if GAP not in section.limits:
        tolerance = TOLERANCES[precision]
        found.append(Signal("weights_differ", GAP, "max", tolerance.first, tolerance=tolerance))
    return tuple(found)


def _make_signal(metric: str, limit: LimitSection) -> Signal:
    ((way, value),) = [(way, value) for way, value in limit.as_written().items() if way in WAYS]
    return Signal(KINDS.get((metric, way), OTHER), metric, way, value, limit.over_steps)


class Past:
    """The values of one metric, by step: the usual ones of the newest, the first ones, the last ones."""

    def __init__(self, warmup_steps: int, smallest_deviation: float, over_steps: int = 1) -> None:
        self._warmup_steps = warmup_steps
        self._smallest_deviation = smallest_deviation
        self._over_steps = over_steps
        self._values: list[tuple[int, float]] = []
        self._first: list[tuple[int, float]] = []
        self._last: list[tuple[int, float]] = []

    @classmethod
    def of(cls, signal: Signal, warmup_steps: int) -> Past:
        """Return the empty past of a signal."""
        return cls(warmup_steps, SMALLEST_RISE if signal.is_upper else SMALLEST_FALL, signal.over_steps)

    def add(self, step: int, value: float, *, is_usual: bool = True) -> None:
        self._last = [*self._last, (step, value)][-max(self._over_steps, self._warmup_steps, LASTING_STEPS) :]
        if not is_usual:
            return
        if len(self._first) < self._warmup_steps:
            self._first.append((step, value))
        self._values = [*self._values, (step, value)][-max(WINDOW_STEPS, self._warmup_steps) :]

    def forget_from(self, step: int) -> None:
        """Forget the values of `step` and later ones: a rollback abandons them."""
        self._first, self._values, self._last = (
            [pair for pair in pairs if pair[0] < step] for pairs in (self._first, self._values, self._last)
        )

    @property
    def is_warm(self) -> bool:
        return len(self._values) >= self._warmup_steps

    @property
    def first(self) -> float | None:
        """Median of the first values; None before the warm-up is over."""
        is_known = len(self._first) >= self._warmup_steps
        return median(value for _, value in self._first) if is_known else None

    @property
    def baseline(self) -> float | None:
        """Median of the first `GAP_STEPS` values, or of those that there are."""
        return median(value for _, value in self._first[:GAP_STEPS]) if self._first else None

    @property
    def has_risen(self) -> bool:
        """Whether the last values are above the first ones by more than these differ among themselves."""
        first = self.first
        if first is None:
            return False
        spread = MAD_TO_DEVIATION * median(abs(value - first) for _, value in self._first)
        return median(value for _, value in self._last) > first + max(
            spread, self._smallest_deviation * abs(first)
        )

    @property
    def usual(self) -> float:
        return median(value for _, value in self._values)

    @property
    def deviation(self) -> float:
        """Robust standard deviation."""
        usual = self.usual
        spread = MAD_TO_DEVIATION * median(abs(value - usual) for _, value in self._values)
        return max(spread, self._smallest_deviation * abs(usual), 1e-9)

    def z(self, value: float) -> float | None:
        return (value - self.usual) / self.deviation if self.is_warm else None

    def level(self, value: float) -> float | None:
        """Return what is compared with the limit, `value` being the newest; None while there are too few."""
        return self._median(value, self._over_steps)

    def lasting(self, value: float) -> float | None:
        """Return the median of `LASTING_STEPS`, `value` being the newest; None while there are too few."""
        return self._median(value, LASTING_STEPS)

    def _median(self, value: float, number: int) -> float | None:
        values = [*(found for _, found in self._last), value]
        return median(values[-number:]) if len(values) >= number else None


def read_value(signal: Signal, metrics: Mapping[str, float]) -> float | None:
    """Return the signal's value; None if it is not there, not finite, or of too few tokens.

    A KL estimate may be negative: its size is returned.
    """
    value = metrics.get(signal.metric)
    if value is None or not math.isfinite(value):
        return None
    if signal.tolerance is not None and metrics.get(GAP_TOKENS, math.inf) < signal.tolerance.num_tokens:
        return None
    return abs(value) if signal.kind == "kl_spike" else value


def limit_of(signal: Signal, past: Past) -> float | None:
    """Return the limit in the metric's unit; None while a relative one has nothing to relate to."""
    if signal.tolerance is not None:
        return signal.tolerance.largest_mean(past.baseline)
    if signal.way == "min_share":
        return None if past.first is None else signal.limit * past.first
    if signal.way == "max_times":
        return signal.limit * past.usual if past.is_warm else None
    return signal.limit


def severe_limit(signal: Signal, past: Past, z_score: float) -> float | None:
    """Return the value beyond which a single one is severe; None where none is."""
    limit = limit_of(signal, past)
    if limit is None or not signal.can_act:
        return None
    if signal.kind in CERTAIN:
        return limit
    if signal.over_steps > 1:
        return _far_beyond(signal, limit)
    if not past.is_warm:
        far = _far_beyond(signal, limit)
        return far if math.isfinite(far) else None
    if signal.is_upper:
        far = _far_beyond(signal, max(limit, past.usual))
        return max(limit, min(far, past.usual + z_score * past.deviation))
    far = _far_beyond(signal, min(limit, past.usual))
    return min(limit, max(far, past.usual - z_score * past.deviation))


def _far_beyond(signal: Signal, base: float) -> float:
    """Return what is `FAR` times beyond `base`, on the side that is watched; infinite where `base` is 0."""
    if base == 0:
        return math.inf if signal.is_upper else -math.inf
    if signal.is_upper:
        return base + (FAR - 1) * abs(base)
    return base / FAR if base > 0 else base * FAR


def judge_value(signal: Signal, value: float, past: Past, z_score: float) -> Finding | None:
    """Return what is to be said about the newest value, if anything."""
    limit, level = limit_of(signal, past), past.level(value)
    if limit is None:
        return None
    if signal.kind in CERTAIN and _is_beyond(signal, value, _far_beyond(signal, limit)):
        level = value
    if level is None or not _is_beyond(signal, level, limit):
        return None
    z = past.z(level)
    if signal.is_spike and z is not None and abs(z) < UNUSUAL:
        return None
    bound = severe_limit(signal, past, z_score)
    lasting = past.lasting(value)
    is_lasting = signal.kind in ABSOLUTE and lasting is not None and _is_beyond(signal, lasting, limit)
    lasts = signal.over_steps > 1 or is_lasting
    is_severe = bound is not None and (_is_beyond(signal, level, bound) or lasts)
    return Finding(signal.kind, signal.metric, level, limit, z, is_severe)


def _is_beyond(signal: Signal, value: float, limit: float) -> bool:
    return value > limit if signal.is_upper else value < limit


def find_not_finite(metrics: Mapping[str, float]) -> Iterator[Finding]:
    """Yield the metrics of training that are NaN or infinite."""
    for name, value in metrics.items():
        is_watched = name.startswith(FINITE_PREFIXES) and not name.startswith(MAY_BE_NAN)
        if is_watched and isinstance(value, float) and not math.isfinite(value):
            yield Finding("not_finite", name, value, is_severe=True)
