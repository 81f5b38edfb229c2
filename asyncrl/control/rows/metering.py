"""Rates of a run: of the rollout side, from the replicas' cumulative counters, and of its steps (pure)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping

from asyncrl.buffer.ledger.tickets import DropReason
from asyncrl.control.record.syncing import weights_metrics
from asyncrl.core.metrics.metric import Row
from asyncrl.core.status.replica import ReplicaStatus
from asyncrl.core.status.service import FinishedEvaluation
from asyncrl.core.status.statuses import Statuses

WINDOW_S = 2.0
_PART_COUNT, _PART_SUM, _REWARD_ERRORS = "part count/", "part sum/", "reward errors/"
_OUTCOMES = "outcomes/"
_IDLE = "idle/"
_CACHE_COUNTS = ("prompt_tokens", "cached_tokens", "preemptions")
_OVERRIDDEN, _LIMIT = "overridden/", "limit/"


class Meter:
    """Turns counters into rates over the last `WINDOW_S` seconds, or since the row before if longer."""

    def __init__(self) -> None:
        self._past: list[tuple[float, dict[str, float]]] = []
        self._last: dict[str, ReplicaStatus] = {}
        self._ended: dict[str, float] = defaultdict(float)
        self._first: float | None = None
        self._row_before: tuple[float, float] | None = None

    def note(self, now: float, statuses: Statuses) -> None:
        """Take note of when the first token came: before it there is no rate, only a start."""
        if self._row_before is None:
            tokens = sum(engine.tokens for engine in statuses.engines.values())
            if tokens == 0 or self._first is None:
                self._first = now

    def update(self, now: float, statuses: Statuses) -> dict[str, float]:
        """Take in the statuses of time `now` (seconds) and return the rollout side's metrics."""
        # A replica that is silent for a pulse, or has left, keeps its last count: the sum must not fall.
        for name, status in statuses.told_replicas.items():
            if status.engine is not None:
                self._take(name, status)
        totals = rollout_totals(self._last.values())
        totals = {key: totals.get(key, 0.0) + self._ended[key] for key in totals.keys() | self._ended.keys()}
        self._past.append((now, totals))
        while len(self._past) > 2 and now - self._past[1][0] > WINDOW_S:
            self._past.pop(0)
        # The first time, shares and means are those since the replicas' start, rates since the first token.
        start: tuple[float, dict[str, float]] = (now if self._first is None else self._first, {})
        then, before = self._past[0] if len(self._past) > 1 else start
        gain = {key: total - before.get(key, 0.0) for key, total in totals.items()}
        gain |= {key: max(0.0, change) for key, change in gain.items() if not key.startswith(_PART_SUM)}
        return (
            _overlong_metrics(gain)
            | _reward_metrics(gain, totals)
            | _gateway_metrics(totals)
            | weights_metrics(statuses)
            | _idle_metrics(gain)
            | _cache_metrics(gain, totals, statuses)
            | {
                **self._since_row(now, totals["tokens"], start[0]),
                "perf/rollout_tokens_per_s": gain["tokens"] / (now - then) if now > then else 0.0,
                "perf/rollout_replicas": float(len(statuses.replicas)),
            }
            | _buffer_metrics(statuses)
        )

    def _since_row(self, now: float, tokens: float, first: float) -> dict[str, float]:
        """Return tokens and seconds since the row before: what the rate of a whole run is made of."""
        then, before = self._row_before or (first, 0.0)
        self._row_before = (now, tokens)
        return {
            "perf/rollout_tokens": max(0.0, tokens - before),
            "perf/rollout_tokens_s": max(0.0, now - then),
        }

    def _take(self, name: str, status: ReplicaStatus) -> None:
        """Keep a replica's newest counts; those of an incarnation that has ended stay in the sums."""
        before = self._last.get(name)
        if before is not None and _wall_s(status) < _wall_s(before):
            for key, total in rollout_totals([before]).items():
                self._ended[key] += total
        self._last[name] = status


def _wall_s(status: ReplicaStatus) -> float:
    return 0.0 if status.engine is None else status.engine.wall_s


def _buffer_metrics(statuses: Statuses) -> dict[str, float]:
    """Return the state of the buffer; all 0 while it says nothing."""
    buffer = statuses.buffer
    counters = {} if buffer is None else buffer.counters
    return {
        "training/epoch": 0.0 if buffer is None else epoch_of(buffer.prompts_drawn, buffer.num_prompts),
        **{f"buffer/{name}": float(n) for name, n in counters.items() if name.startswith("placed/")},
        "buffer/depth": 0.0 if buffer is None else float(buffer.stored_groups),
        **dropped_by_reason({} if buffer is None else buffer.dropped),
        "buffer/residue": 0.0 if buffer is None else float(buffer.residue),
    }


def _idle_metrics(gain: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the replicas' time, which add up to 1; all 0 while none has passed."""
    wall = gain["busy_s"] + gain["idle_s"]
    shares = {
        "perf/rollout_busy_share": gain["busy_s"],
        "perf/rollout_idle_share": gain["idle_s"],
        **{f"perf/rollout_idle/{cause}": seconds for cause, seconds in sorted(_named(gain, _IDLE))},
    }
    return {name: seconds / wall if wall else 0.0 for name, seconds in shares.items()}


def _cache_metrics(gain: Mapping[str, float], totals: Mapping[str, float], statuses: Statuses) -> Row:
    """Return hits, preemptions and use of the KV caches, and limits; nothing from engines that tell none."""
    found = statuses.cache_gauges()
    if found:
        found["perf/rollout_preemptions"] = totals["preemptions"]
    found |= {f"perf/rollout_limit/{reason}": count for reason, count in _named(totals, _LIMIT)}
    prompted = gain.get("prompt_tokens")
    return found | ({"perf/rollout_cache_hit_share": gain["cached_tokens"] / prompted} if prompted else {})


def _overlong_metrics(gain: dict[str, float]) -> dict[str, float]:
    """Return the penalties of overlong answers; none where rewards are not shaped."""
    if not gain["scored"]:
        return {}
    return {
        "rollout/overlong_share": gain["overlong"] / gain["scored"],
        "rollout/overlong_penalty": gain["taken_off"] / gain["scored"],
    }


def _reward_metrics(gain: Mapping[str, float], totals: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of each reward part in the window, and the failures so far by kind."""
    found = {
        f"reward/{name}/mean": gain[f"{_PART_SUM}{name}"] / count
        for name, count in _named(gain, _PART_COUNT)
        if count
    }
    found |= {f"rollout/rewards/{name}": count for name, count in _named(totals, _OUTCOMES)}
    return found | {f"rollout/reward_errors/{kind}": count for kind, count in _named(totals, _REWARD_ERRORS)}


def _gateway_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Return how many sampling parameters of agents were replaced so far; nothing without a gateway."""
    if not totals["gateways"]:
        return {}
    counts = dict(_named(totals, _OVERRIDDEN))
    by_parameter = {f"gateway/overridden/{name}": count for name, count in counts.items()}
    return {"gateway/overridden": sum(counts.values()), **by_parameter}


def _named(values: Mapping[str, float], prefix: str) -> list[tuple[str, float]]:
    return [(key.removeprefix(prefix), value) for key, value in values.items() if key.startswith(prefix)]


def dropped_by_reason(dropped: Mapping[str, int]) -> dict[str, float]:
    """Return how many groups were dropped so far, for every reason that there is."""
    return {f"buffer/dropped/{reason.value}": float(dropped.get(reason.value, 0)) for reason in DropReason}


def epoch_of(num_drawn: int, num_prompts: int) -> float:
    """Return the traversal of the data, from 0, that the last drawn prompt belongs to."""
    return float(max(0, num_drawn - 1) // max(1, num_prompts))


def rollout_totals(replicas: Iterable[ReplicaStatus]) -> dict[str, float]:
    """Return generated tokens, busy and idle seconds, and what rewards and shaping did, over all replicas."""
    totals: dict[str, float] = dict.fromkeys(
        ("tokens", "busy_s", "idle_s", "scored", "overlong", "taken_off", "gateways"), 0.0
    )
    for key, value in (pair for replica in replicas for pair in _counts_of(replica)):
        totals[key] = totals.get(key, 0.0) + value
    return totals


def _counts_of(replica: ReplicaStatus) -> Iterator[tuple[str, float]]:
    yield from ((name, count) for name, count in replica.counters.items() if name.startswith(_LIMIT))
    if (engine := replica.engine) is not None:
        yield from (("tokens", engine.tokens), ("busy_s", engine.busy_s), ("idle_s", engine.idle_s))
        yield from ((_IDLE + cause, seconds) for cause, seconds in engine.idle_by_cause.items())
        if engine.cache is not None:
            yield from ((name, getattr(engine.cache, name)) for name in _CACHE_COUNTS)
    if (shaping := replica.shaping) is not None:
        yield from (("scored", shaping.scored), ("overlong", shaping.overlong))
        yield "taken_off", shaping.taken_off
    if (reward := replica.reward) is not None:
        for name, (count, total) in reward.parts.items():
            yield from ((_PART_COUNT + name, count), (_PART_SUM + name, total))
        yield from ((_REWARD_ERRORS + kind, count) for kind, count in reward.errors.items())
        for source, outcomes in reward.sources.items():
            yield from ((f"{_OUTCOMES}{source}/{outcome}", count) for outcome, count in outcomes.items())
    if (gateway := replica.gateway) is not None:
        yield "gateways", 1.0
        yield from ((_OVERRIDDEN + name, count) for name, count in gateway.overridden.items())


EVALUATION_ID = "val/id"
ACCURACY = "val-core/held_out/acc/mean@"
"""And the number of answers per prompt."""


def evaluation_row(evaluation: FinishedEvaluation) -> Row:
    """Return the metrics row of a finished evaluation: its metrics under verl's validation names."""
    return {
        "training/global_step": evaluation.step,
        EVALUATION_ID: evaluation.id,
        "val/version": evaluation.version,
        **{name: value for name, value in evaluation.metrics.items() if name.startswith("val-")},
    }


def evaluation_ids(rows: Iterable[Row]) -> set[int]:
    """Return the ids of the evaluations that are recorded in `rows`."""
    return {int(row[EVALUATION_ID]) for row in rows if EVALUATION_ID in row}


def accuracy(row: Mapping[str, float]) -> float | None:
    """Return the share of held-out prompts that were answered right, if the row has it."""
    names = (name for name in row if name.startswith(ACCURACY) and "/" not in name[len(ACCURACY) :])
    found = next(names, None)
    return None if found is None else float(row[found])


LEAST_STEPS = 100
MIN_STEPS, MAX_STEPS = 3, 2000
"""Steps from which on there is an estimate, and that are remembered; that of an incarnation is no pace."""


class Pace:
    """Estimates the time that is left.

    >>> pace = Pace()
    >>> for second in range(10):
    ...     pace.note(2.0 * second, second, is_working=True)
    >>> pace.time_left_s(19)
    20.0
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=MAX_STEPS)
        self._worked_s = 0.0
        self._noted: float | None = None

    def note(self, now: float, step: int, *, is_working: bool) -> None:
        """Take note that `step` steps are done at time `now` (seconds)."""
        if self._noted is not None and is_working:
            self._worked_s += max(0.0, now - self._noted)
        self._noted = now
        if self._steps and step < self._steps[-1][1]:  # a rollback, or a learner that was started again
            self._steps.clear()
        if not self._steps or step > self._steps[-1][1]:
            self._steps.append((self._worked_s, step))

    def time_left_s(self, steps: int) -> float | None:
        """Return the seconds until `steps` steps are done, None while too little is known."""
        timed = list(self._steps)[1:]  # the first entry is where this incarnation began
        if len(timed) <= MIN_STEPS:
            return None
        newest = timed[-max(LEAST_STEPS, len(timed) // 2) :]
        (then, first), (last_s, last) = newest[0], newest[-1]
        per_step_s = (last_s - then) / (last - first)
        since_s = min(self._worked_s - last_s, per_step_s)
        return max(0.0, (steps - last) * per_step_s - since_s)
