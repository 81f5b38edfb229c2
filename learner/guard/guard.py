"""The guard's decisions: from a step's metrics to one action, and what may happen how often (pure).

Owns what the guard remembers: the past of each metric, the scale of the learning rate, how often it
went back. Must never touch the model: the leader performs what it decides. Invariants: a rollback
always comes with a change, at most `MAX_ROLLBACKS` times; what a rollback abandons is forgotten.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.core.config.tree import GuardSection
from asyncrl.core.errors import AsyncrlError
from learner.guard.signals import (
    SMALLEST_FALL,
    UNLESS_RISEN,
    UNMENDED,
    Finding,
    Past,
    find_not_finite,
    judge_value,
    make_signals,
    read_value,
    severe_limit,
)

MAX_ROLLBACKS = 2
LR_FACTOR = 0.5
SMALLEST_LR_SCALE = 2.0**-10
COOLDOWN_STEPS = 5
"""Steps that a change gets to show its effect before the next one."""
KNOWN_BEFORE_UPDATE = (
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "critic/grad_norm",
    "critic/vf_clipfrac",
)
Limits = list[tuple[str, float]]


class UnstableTraining(AsyncrlError, ArithmeticError):
    """Training went wrong and going on would not mend it."""


class Action(enum.Enum):
    """Action of the guard on a step."""

    NONE = "none"
    WARN = "warn"
    SKIP_UPDATE = "skip_update"
    REDUCE_LR = "reduce_lr"
    KL_FALLBACK = "kl_fallback"
    ROLLBACK = "rollback"
    STOP = "stop"


@dataclass(frozen=True)
class Verdict:
    """Verdict of the guard on one step. `reason` is why an action was not the configured one."""

    action: Action
    findings: tuple[Finding, ...] = ()
    reason: str = ""


class Guard:
    """Judges one step after the other.

    >>> guard = Guard(GuardSection(action="stop"), "float32")
    >>> guard.judge(0, {"actor/grad_norm": 1.0}).action.value
    'none'
    >>> guard.judge(1, {"actor/grad_norm": float("nan")}).action.value
    'stop'
    """

    def __init__(self, section: GuardSection, precision: str) -> None:
        self._section = section
        self._signals = make_signals(section, precision)
        self._past = {signal.metric: Past.of(signal, section.warmup_steps) for signal in self._signals}
        self._risen = {name: Past(section.warmup_steps, SMALLEST_FALL) for name in UNLESS_RISEN.values()}
        self._counts: Counter[str] = Counter()
        self._changed_step: int | None = None
        self.lr_scale = 1.0
        self.is_kl_off = False
        self.num_rollbacks = 0

    @property
    def may_roll_back(self) -> bool:
        return self._section.action == Action.ROLLBACK.value

    def limits(self) -> Limits:
        """Return (metric, value) beyond which an update is not applied; empty unless that is the action."""
        if self._section.action != Action.SKIP_UPDATE.value:
            return []
        bounds = {
            signal.metric: severe_limit(signal, self._past[signal.metric], self._section.z_score)
            for signal in self._signals
            if signal.metric in KNOWN_BEFORE_UPDATE and signal.is_upper
        }
        return [(metric, bound) for metric, bound in bounds.items() if bound is not None]

    def judge(self, step: int, metrics: Mapping[str, float], num_skipped: int = 0) -> Verdict:
        """Return what to do about learner step `step`.

        Args:
            metrics: Of the step, by verl's names.
            num_skipped: Updates of it that were not applied because of `limits`.
        """
        findings = [*find_not_finite(metrics), *self._compare(step, metrics)]
        self._counts.update({finding.kind for finding in findings})
        self._counts["skipped_updates"] += num_skipped
        if not findings and not num_skipped:
            return Verdict(Action.NONE)
        if not any(finding.is_severe for finding in findings):
            return Verdict(Action.SKIP_UPDATE if num_skipped else Action.WARN, tuple(findings))
        if Action(self._section.action) is not Action.STOP and all(
            finding.kind in UNMENDED for finding in findings if finding.is_severe
        ):
            return Verdict(Action.WARN, tuple(findings), "no change of the training mends it")
        action, reason = self._choose(step, num_skipped)
        return Verdict(action, tuple(findings), reason)

    def roll_back(self, step: int, *, reduces_lr: bool) -> None:
        """Forget what was seen from `step` on: it is trained again, otherwise than before."""
        self.num_rollbacks += 1
        if reduces_lr:
            self._reduce_lr(step)
        for past in (*self._past.values(), *self._risen.values()):
            past.forget_from(step)

    def counters(self) -> dict[str, float]:
        """Return the `guard/*` metrics: findings by kind since the start, and what was changed."""
        kinds = dict.fromkeys((signal.kind for signal in self._signals), 0.0) | {"not_finite": 0.0}
        counts = kinds | {kind: float(count) for kind, count in self._counts.items()}
        return {f"guard/{kind}": count for kind, count in counts.items()} | {
            "guard/rollbacks": float(self.num_rollbacks),
            "guard/lr_scale": self.lr_scale,
            "guard/is_kl_off": float(self.is_kl_off),
        }

    def state(self) -> dict[str, float]:
        """Return what is kept; the past of the metrics is gathered anew."""
        return {
            "lr_scale": self.lr_scale,
            "is_kl_off": float(self.is_kl_off),
            "num_rollbacks": float(self.num_rollbacks),
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Take over what `state` returned, possibly nothing."""
        self.lr_scale = float(state.get("lr_scale", 1.0))
        self.is_kl_off = bool(state.get("is_kl_off", False))
        self.num_rollbacks = int(state.get("num_rollbacks", 0))

    def _compare(self, step: int, metrics: Mapping[str, float]) -> Sequence[Finding]:
        findings = []
        for name, past in self._risen.items():
            if (value := metrics.get(name)) is not None and math.isfinite(value):
                past.add(step, value)
        for signal in self._signals:
            value, past = read_value(signal, metrics), self._past[signal.metric]
            if value is None:
                continue
            finding = judge_value(signal, value, past, self._section.z_score)
            # Severe values enter the median over several steps, but not the usual range.
            past.add(step, value, is_usual=finding is None or not finding.is_severe)
            if finding is not None and not self._is_success(finding):
                findings.append(finding)
        return findings

    def _is_success(self, finding: Finding) -> bool:
        name = UNLESS_RISEN.get(finding.kind)
        return name is not None and self._risen[name].has_risen

    def _choose(self, step: int, num_skipped: int) -> tuple[Action, str]:
        wanted = Action(self._section.action)
        match wanted:
            case Action.SKIP_UPDATE:
                return (wanted, "") if num_skipped else (Action.WARN, "it was seen after the update")
            case Action.ROLLBACK if self.num_rollbacks >= MAX_ROLLBACKS:
                return Action.STOP, f"went back {self.num_rollbacks} times already"
            case Action.REDUCE_LR | Action.KL_FALLBACK if self._is_cooling(step):
                return Action.WARN, f"the last change is less than {COOLDOWN_STEPS} steps old"
            case Action.REDUCE_LR if self.lr_scale <= SMALLEST_LR_SCALE:
                return Action.STOP, f"the learning rate is {self.lr_scale:.2g} of the configured one already"
            case Action.REDUCE_LR:
                self._reduce_lr(step)
            case Action.KL_FALLBACK if self.is_kl_off:
                return Action.WARN, "the KL term is off already"
            case Action.KL_FALLBACK:
                self.is_kl_off, self._changed_step = True, step
        return wanted, ""

    def _is_cooling(self, step: int) -> bool:
        return self._changed_step is not None and step - self._changed_step < COOLDOWN_STEPS

    def _reduce_lr(self, step: int) -> None:
        self.lr_scale *= LR_FACTOR
        self._changed_step = step
