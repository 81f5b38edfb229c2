"""The guard as the leader uses it: judges, says so in the log, remembers what is to be done.

Owns the words in the log and the account of rollbacks. Must never give an order: the leader asks and
acts. Invariant: each kind of finding is explained in full the first time and whenever it is acted upon.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping

from asyncrl.core.config.tree import GuardSection
from asyncrl.core.status.service import GuardFinding
from learner.guard.explanations import describe, explain, summarise
from learner.guard.guard import Action, Guard, Limits, UnstableTraining, Verdict
from learner.orders import Adjust

log = logging.getLogger(__name__)

KEPT_FINDINGS = 20
"""Newest findings that the supervisor can ask for: it does so every second."""
REPEAT_STEPS = 10
"""A finding that is not severe is logged again after so many steps."""
NEVER = -1


class Watch:
    """The guard of one run, on rank 0."""

    def __init__(self, section: GuardSection, precision: str) -> None:
        self._guard = Guard(section, precision)
        self._verdict = Verdict(Action.NONE)
        self._logged: dict[str, int] = {}
        self._told: deque[GuardFinding] = deque(maxlen=KEPT_FINDINGS)
        self._num_told = 0
        self.rolled_back_to = NEVER

    @property
    def findings(self) -> tuple[GuardFinding, ...]:
        """The newest findings that were logged."""
        return tuple(self._told)

    @property
    def may_roll_back(self) -> bool:
        return self._guard.may_roll_back

    @property
    def wants_rollback(self) -> bool:
        return self._verdict.action is Action.ROLLBACK

    @property
    def has_changed(self) -> bool:
        """Whether training goes on otherwise than configured."""
        return self._guard.lr_scale != 1.0 or self._guard.is_kl_off

    def limits(self) -> Limits:
        """See `Guard.limits`."""
        return self._guard.limits()

    def offenders(self, refused: Collection[int], num_trainable: int) -> list[int]:
        """Return the groups that alone are to blame for the step, if that is clear.

        It is where some updates had a gradient that is not finite, others of the same step had a
        finite one, and nothing else went wrong.

        Args:
            refused: Groups whose updates were not applied.
            num_trainable: Groups of the whole batch that had a token to train.
        """
        kinds = {finding.kind for finding in self._verdict.findings if finding.is_severe}
        is_clear = kinds == {"not_finite"} and len(refused) < num_trainable
        return sorted(refused) if is_clear else []

    def adjustment(self) -> Adjust:
        """Return the order that makes every rank train as the guard has decided."""
        return Adjust(self._guard.lr_scale, self._guard.is_kl_off)

    def judge(self, step: int, metrics: Mapping[str, float], num_refused: int) -> dict[str, float]:
        """Judge a step, log what was found, and return the `guard/*` metrics."""
        self._verdict = self._guard.judge(step, metrics, num_refused)
        self._report(step, num_refused)
        return self._guard.counters()

    def take_change(self) -> bool:
        """Return whether the verdict changed how training goes on; once."""
        has_change = self._verdict.action in (Action.REDUCE_LR, Action.KL_FALLBACK)
        self._verdict = Verdict(Action.NONE)
        return has_change

    def raise_if_stopped(self, step: int) -> None:
        """Raise UnstableTraining if the verdict on `step` is to stop."""
        if self._verdict.action is Action.STOP:
            raise UnstableTraining(
                f"the guard stopped the run at step {step}: {self._causes()}"
                + (f" ({self._verdict.reason})" if self._verdict.reason else ""),
                hint="The learner's log explains each finding and what to change; the checkpoints are valid",
            )

    def no_checkpoint(self, step: int) -> UnstableTraining:
        """Return the error of a rollback that has nothing to go back to."""
        return UnstableTraining(
            f"step {step} failed ({self._causes()}) and there is no valid checkpoint to roll back to",
            hint="Start a new run with a lower learner.lr",
        )

    def roll_back(self, failed_step: int, step: int, offenders: Collection[int]) -> None:
        """Book a rollback from `failed_step` to the checkpoint of `step`, with a change.

        Without `offenders`, the groups that are dropped, the learning rate is halved.
        """
        causes = self._causes()
        self._guard.roll_back(step, reduces_lr=not offenders)
        self._verdict, self.rolled_back_to = Verdict(Action.NONE), step
        without = f", without the {len(offenders)} groups of the updates concerned" if offenders else ""
        log.warning(
            "guard: step %d went wrong (%s): back to the checkpoint of step %d, rollback %d, "
            "with %g of the configured learning rate%s",
            failed_step,
            causes,
            step,
            self._guard.num_rollbacks,
            self._guard.lr_scale,
            without,
        )

    def state(self) -> dict[str, float]:
        """Return what checkpoints and the journal keep of the guard."""
        return self._guard.state() | {"rolled_back_to": float(self.rolled_back_to)}

    def restore(self, kept: Mapping[str, float], note: Mapping[str, float]) -> None:
        """Take over what `state` returned, to the checkpoint or, at a rollback, to the journal.

        Each may be empty. The journal's is newer where the run ended between a rollback and the next
        checkpoint.
        """
        is_newer = note.get("num_rollbacks", 0) > kept.get("num_rollbacks", 0)
        newest = note if is_newer else kept
        self._guard.restore(newest)
        self.rolled_back_to = int(newest.get("rolled_back_to", NEVER))

    def _causes(self) -> str:
        severe = [describe(finding) for finding in self._verdict.findings if finding.is_severe]
        return "; ".join(severe)

    def _report(self, step: int, num_refused: int) -> None:
        for finding in self._verdict.findings:
            last = self._logged.get(finding.kind)
            if last is None or (finding.is_severe and self._verdict.action is not Action.WARN):
                log.warning("guard, step %d: %s", step, explain(finding))
            elif step - last >= REPEAT_STEPS:
                log.warning("guard, step %d: %s", step, describe(finding))
            else:
                continue
            self._logged[finding.kind] = step
            self._num_told += 1
            text = f"step {step}: {summarise(finding)}"
            self._told.append(GuardFinding(self._num_told, step, finding.kind, text))
        if num_refused:
            log.warning("guard, step %d: %d updates were not applied", step, num_refused)
        if self._verdict.action not in (Action.NONE, Action.WARN):
            reason = f" ({self._verdict.reason})" if self._verdict.reason else ""
            log.warning("guard, step %d: action %s%s", step, self._verdict.action.value, reason)
