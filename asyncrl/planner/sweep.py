"""Sweep over alternative bounds, fleets and splits, and a recommendation in words.

Every choice is simulated with the same rates, until its speed is known to `GOOD_NOISE` or has cost enough;
choices that differ by less than the noise are called equal. A split moves GPUs between learner and replicas:
the learner's seconds per token are taken to fall as its share of them grows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from asyncrl.planner.outcome import Outcome
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import Setting
from asyncrl.planner.simulation import MAX_PERIOD, Simulation, count_warm_up, find_period

MAX_LAGS = (0, 1, 2, 4, 8)
GOOD_NOISE = 0.015
"""Relative standard error of step time and trained tokens/s at which a simulation may end."""
MORE_STEPS = 40
MAX_STEPS = 2000
MAX_EVENTS = 50_000
"""One to two seconds of a core, after which a simulation ends however noisy it is."""
GOOD_ENOUGH = 0.95
"""Of the best throughput: the lowest bound, and the fewest replicas, that reach so much are recommended."""
SAFE_LAG = 4
SAFE_LAG_SOURCE = "AReaL (arXiv 2505.24298) saw accuracy hold up to a lag of 4"


@dataclass(frozen=True)
class Choice:
    """One point of the sweep: the value that differs, and its outcome.

    Attributes:
        axis: `max_lag`, `replicas` or `split`.
        learner_share: Factor on the learner's present hardware.
    """

    axis: str
    max_lag: int
    replicas: int
    learner_share: float
    outcome: Outcome

    @property
    def label(self) -> str:
        """Label of the value that differs."""
        if self.axis == "split":
            return f"{self.replicas} replicas, learner x {self.learner_share:.2g}"
        return f"{self.axis} {getattr(self, self.axis)}"


def predict(setting: Setting, rates: Rates, seed: int, steps: int) -> Outcome:
    """Simulate one choice for `steps` or a few more; raises ConfigError if it would stand still."""
    return Simulation(setting, rates, seed, count_steps(setting, rates, steps)).run_to_end()


def settle(setting: Setting, rates: Rates, seed: int, least: int) -> Outcome:
    """Simulate one choice for `least` steps or more, until its speed is known or has cost enough.

    Raises:
        ConfigError: It would stand still.
    """
    simulation, outcome, least_more = Simulation(setting, rates, seed, MAX_STEPS), None, least
    while outcome is None or _is_worth_more(simulation, outcome, least_more):
        outcome = simulation.run_to_step(count_steps(setting, rates, least_more))
        least_more = len(simulation.watch.records) + MORE_STEPS
    return outcome


def _is_worth_more(simulation: Simulation, outcome: Outcome, num_steps: int) -> bool:
    if simulation.watch.is_over or num_steps > MAX_STEPS - MAX_PERIOD:
        return False
    return outcome.noise > GOOD_NOISE and outcome.num_events < MAX_EVENTS


def count_steps(setting: Setting, rates: Rates, least: int) -> int:
    """Return how many steps to simulate: those that count hold whole periods of what seldom happens."""
    period = find_period(setting, rates)
    if not period:
        return least
    return next(steps for steps in itertools.count(least) if (steps - count_warm_up(steps)) % period == 0)


def sweep(
    setting: Setting,
    rates: Rates,
    *,
    learner_units: float | None,
    seed: int = 0,
    steps: int = 60,
    say: Callable[[str], None] = lambda line: None,
) -> list[Choice]:
    """Simulate other bounds, other numbers of replicas, and other splits of the same hardware.

    Args:
        learner_units: The learner's hardware, in replicas' worth; None where it cannot be split.
        steps: To simulate at least.
    """
    choices: list[Choice] = []
    known: dict[tuple[int, int, float], Outcome] = {}
    for axis, other, factor in _variants(setting, learner_units):
        say(f"simulating {axis}: max_lag {other.ledger.max_lag}, {other.replicas} replicas")
        point = (other.ledger.max_lag, other.replicas, factor)
        if point not in known:
            rates_of = replace(rates, step_s_per_token=rates.step_s_per_token / factor)
            known[point] = settle(other, rates_of, seed, steps)
        choices.append(Choice(axis, *point, known[point]))
    return choices


def find_present(choices: Sequence[Choice], setting: Setting) -> Outcome:
    """Return what came of the configuration as it is, which every sweep holds."""
    return next(one for one in choices if one.axis == "replicas" and one.replicas == setting.replicas).outcome


def _variants(setting: Setting, learner_units: float | None) -> Iterator[tuple[str, Setting, float]]:
    for max_lag in sorted({*MAX_LAGS, setting.ledger.max_lag}):
        yield "max_lag", replace(setting, ledger=replace(setting.ledger, max_lag=max_lag)), 1.0
    now = setting.replicas
    for replicas in sorted({max(1, now // 2), now, now + max(1, now // 2), 2 * now}):
        yield "replicas", with_replicas(setting, replicas), 1.0
    if learner_units is None:
        return
    for replicas in sorted({max(1, now // 2), now - 1, now + 1, now + max(1, now // 2)} - {0, now}):
        share = (learner_units + now - replicas) / learner_units
        if share >= 0.25:
            yield "split", with_replicas(setting, replicas), share


def with_replicas(setting: Setting, replicas: int) -> Setting:
    """Return the setting with another fleet."""
    return replace(setting, replicas=replicas)


def recommend(base: Outcome, choices: Sequence[Choice], setting: Setting) -> list[str]:
    """Return sentences: which bound, fleet and split to take, and what that costs."""
    lines = [_bottleneck(base)]
    lines += _on_max_lag([one for one in choices if one.axis == "max_lag"], setting.ledger.max_lag)
    lines += _on_replicas([one for one in choices if one.axis == "replicas"], setting.replicas)
    lines += _on_split([one for one in choices if one.axis == "split"], base)
    lines += _on_interruptions(base, setting)
    noise = max((_noise(one.outcome, base) for one in choices), default=0.0)
    if noise > 1 - GOOD_ENOUGH:
        lines.append(f"Some of these are known to {noise:.0%} only: what differs by less is called equal.")
    if base.buffer_load > 0.5:
        lines.append(
            f"The buffer works {base.buffer_load:.0%} of its time: larger groups mean fewer requests."
        )
    return lines


def _bottleneck(base: Outcome) -> str:
    learner, replicas = base.learner_idle, base.replica_idle
    shares = f"the learner waits {learner:.0%} of its time, the replicas {replicas:.0%} of theirs"
    if max(learner, replicas) < 0.1:
        return f"Balanced: {shares}."
    if learner > 0.1 and replicas > 0.1:
        return f"Both sides wait: {shares}. The bound and the longest answers hold up both."
    slow = "Generation" if learner > replicas else "The learner"
    return f"{slow} is the bottleneck: {shares}."


def _on_max_lag(choices: Sequence[Choice], now: int) -> list[str]:
    if not choices:
        return []
    chosen = _first_good(choices)
    sync = next((one for one in choices if one.max_lag == 0), None)
    speed_up = f", {_useful(chosen) / _useful(sync):.2f} x the synchronous run" if sync else ""
    lag = chosen.outcome
    cost = f"at a mean lag of {lag.lag_mean:.2f} with {lag.masked_share:.1%} of the tokens masked"
    lines = [f"max_lag {chosen.max_lag}: {_useful(chosen):.4g} trained tokens/s{speed_up}, {cost}."]
    more = next((one for one in choices if one.max_lag > chosen.max_lag), None)
    if more is not None:
        gain = _tell_change(more.outcome, chosen.outcome)
        lines.append(
            f"  A bound of {more.max_lag} would give {gain} for a mean lag of {more.outcome.lag_mean:.2f}."
        )
    if chosen.max_lag > SAFE_LAG:
        lines.append(f"  That is beyond what is known to be safe: {SAFE_LAG_SOURCE}.")
    return lines if chosen.max_lag != now else [f"Keep {lines[0]}", *lines[1:]]


def _on_replicas(choices: Sequence[Choice], now: int) -> list[str]:
    if len(choices) < 2:
        return []
    chosen = _first_good(choices)
    base = next(one for one in choices if one.replicas == now)
    is_noise = _useful(chosen) <= _useful(base) * (1 + _noise(chosen.outcome, base.outcome))
    if chosen.replicas == now or (chosen.replicas > now and is_noise):
        return [f"Keep {now} replicas: more of them would not be 5 % faster."]
    change = _tell_change(chosen.outcome, base.outcome)
    return [f"{chosen.replicas} replicas instead of {now} would give {change}."]


def _on_split(choices: Sequence[Choice], base: Outcome) -> list[str]:
    if not choices:
        return []
    best = max(choices, key=_useful)
    gain = _useful(best) / base.trained_per_s - 1
    if gain < max(1 - GOOD_ENOUGH, _noise(best.outcome, base)):
        return ["Keep the split: no other one of the same hardware is 5 % faster."]
    split = f"{best.replicas} replicas and a learner of {best.learner_share:.2g} times the GPUs"
    scales = "taking the learner to scale with its GPUs"
    return [f"Of the same hardware, {split} would give {gain:+.1%} trained tokens/s ({scales})."]


def _on_interruptions(base: Outcome, setting: Setting) -> list[str]:
    lines = []
    between_s = setting.eval_every * base.step_s
    if base.num_evaluations and base.evaluation_s > between_s:
        lines.append(
            f"An evaluation takes {base.evaluation_s:.3g} s, more than the {between_s:.3g} s between two: "
            "raise eval.replicas or eval.every_steps, or take fewer eval.prompts."
        )
    if base.num_skipped:
        lines.append(
            f"{base.num_skipped} checkpoints are left out, as the one before is still being written: "
            "raise checkpoint.every_steps."
        )
    return lines


def _first_good(choices: Sequence[Choice]) -> Choice:
    """Return the first that is as fast as the best one, to within 5 % or the noise."""
    best = max(choices, key=_useful)

    def is_good(one: Choice) -> bool:
        return _useful(one) >= _useful(best) * min(GOOD_ENOUGH, 1 - _noise(one.outcome, best.outcome))

    return next(one for one in choices if is_good(one))


def _tell_change(other: Outcome, base: Outcome) -> str:
    """Return in words how many more tokens train, where that is more than noise."""
    change = other.trained_per_s / base.trained_per_s - 1
    if abs(change) <= (noise := _noise(other, base)):
        return f"as many trained tokens/s (to within {noise:.1%})"
    return f"{change:+.1%} trained tokens/s"


def _noise(one: Outcome, other: Outcome) -> float:
    """Return by what share two may differ by chance: two standard errors of their difference."""
    return 2 * math.hypot(one.noise, other.noise)


def _useful(choice: Choice) -> float:
    """Return tokens/s that train: what is masked was sampled in vain."""
    return choice.outcome.trained_per_s
