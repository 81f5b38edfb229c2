"""Agreement: whether two computations of the same log-probs come from the same weights (pure).

Owns the limits by dtype, and which loads are compared. An engine and a learner that hold the same weights
differ by rounding alone, and by about the same amount at every version; an engine that kept an old copy of a
tensor falls behind by more with every step. So it is the *change* of the difference that is judged, against
the first that was seen.

The limits, in nats per token. float32: a small model rounds to 1e-6 and a deep one to 1e-5, so that 1e-4 is
far from noise; one AdamW step at a learning rate of 1e-3 changes a token by 4e-4 or more, whichever tensor is
kept (docs/guard.md). bfloat16 has 8 bits and differs by 0.01 to 0.02 whatever the weights are: half as
much again and 0.005 leave room for noise. float16 has three bits more. With INT8 weights the demo's
log-probs differ by 0.028 (0.22 at most for one token); FP8 is given the same room, unmeasured.

The usual rounding is the demo's in float32, 2e-7, times 2^16 and 2^13: a bfloat16 and a float16 have so many
bits fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Tolerance:
    """Largest difference between two computations of one dtype, in nats per token.

    Attributes:
        first: Largest mean difference before there is one to compare with: other models differ by whole nats.
        usual: Mean difference of equal weights. A first one below it is luck, and counts as this.
        growth, margin: A later mean difference may be `growth` times the first one, and `margin`.
        num_tokens: A mean over fewer tokens says nothing: they are sampled anew for each.
        change: Largest change of one token's difference, above the largest first one or this if it is less;
            None where rounding hides it.
    """

    first: float
    usual: float
    growth: float
    margin: float
    num_tokens: int
    change: float | None = None

    def largest_mean(self, first: float | None) -> float:
        """Return the largest mean difference where the first one was `first`; None if there was none."""
        return self.first if first is None else self.growth * max(first, self.usual) + self.margin


QUANTIZED = Tolerance(first=0.4, usual=0.028, growth=1.5, margin=0.01, num_tokens=64)
TOLERANCES = {
    "float32": Tolerance(first=1e-3, usual=2e-7, growth=1.5, margin=2e-5, num_tokens=1, change=1e-4),
    "float16": Tolerance(first=0.05, usual=1.6e-3, growth=1.5, margin=1e-3, num_tokens=64),
    "bfloat16": Tolerance(first=0.2, usual=0.013, growth=1.5, margin=5e-3, num_tokens=64),
    **dict.fromkeys(("int8", "fp8"), QUANTIZED),
}
"""By torch's name of the dtype, or by `rollout.quantization`."""


FIRST_CHECKS = 10
"""Comparisons that an engine passes in its life before `weight_sync.probe_every` counts."""


def is_check_due(step: int, every: int, num_passed: int, passed_step: int | None) -> bool:
    """Tell whether an engine that has loaded the weights of `step` compares them with the learner's.

    Args:
        every: `weight_sync.probe_every`.
        num_passed: Comparisons that this engine has passed.
        passed_step: Step of the last comparison; None if it was not passed: then the next load is compared.

    >>> [step for step in range(40, 80, 4) if is_check_due(step, 10, FIRST_CHECKS, step - 4)]
    [40, 52, 60, 72]
    """
    return num_passed < FIRST_CHECKS or passed_step is None or step // every != passed_step // every


def find_disagreement(
    tolerance: Tolerance, differences: Sequence[float], first: Sequence[float | None] | None
) -> str:
    """Return in words what tells that the weights are not the same; empty if nothing does.

    Args:
        differences: Engine's minus learner's log-prob of each token.
        first: The same at the first comparison, None for a token that it did not have; None at the first.

    >>> find_disagreement(TOLERANCES["float32"], [2e-4, 0.0], None)
    ''
    >>> find_disagreement(TOLERANCES["float32"], [2e-4, 0.0], [1e-6, 0.0])
    'the log-prob of token 0 changed by 0.000199 nats more than the learner's, at most 0.000101 are allowed'
    """
    mean = fmean(abs(value) for value in differences)
    known = [value for value in first or () if value is not None]
    largest = tolerance.largest_mean(fmean(abs(value) for value in known) if known else None)
    if not mean <= largest:  # as written, NaN is a difference too
        return (
            f"the log-probs of {len(differences)} tokens are {mean:.3g} nats per token from the learner's, "
            f"at most {largest:.3g} are allowed"
        )
    if first is None or tolerance.change is None:
        return ""
    changes = [abs(now - (then or 0.0)) for now, then in zip(differences, first, strict=True)]
    worst = max(range(len(changes)), key=lambda index: changes[index])
    allowed = tolerance.change + min(tolerance.change, max((abs(value) for value in known), default=0.0))
    if changes[worst] <= allowed:
        return ""
    return (
        f"the log-prob of token {worst} changed by {changes[worst]:.3g} nats more than the learner's, "
        f"at most {allowed:.3g} are allowed"
    )
