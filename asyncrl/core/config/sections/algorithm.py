"""The algorithm: advantage, loss, off-policy correction, KL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from asyncrl.core.config.sections.section import NonNegativeNumber, Section, Share, refuse


class AdaptiveKlSection(Section):
    """Moves the coefficient so that the KL comes to `target`, by a fifth per `horizon` rows at most."""

    target: Annotated[float, Field(gt=0)] = 0.1
    """[nats] The KL per token that the coefficient steers to."""
    horizon: Annotated[float, Field(gt=0)] = 10_000.0
    """[rows] Horizon of the controller; a larger one adapts more slowly."""


class KlSection(Section):
    """KL to the reference policy, in the loss or off the reward. A coefficient of 0 turns it off.

    `coef` is fixed, or with `adaptive: {target, horizon}` where the coefficient begins.
    """

    coef: NonNegativeNumber = 0.0
    """[1] Weight of the KL to the reference policy; 0 turns it off."""
    where: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss or taken off the reward."""
    estimator: Literal[
        "k1", "k2", "k3", "k1+", "k2+", "k3+", "kl", "abs", "mse", "low_var_kl", "low_var_kl+"
    ] = "low_var_kl"
    """Estimator of a token's KL; with `+` its gradient is that of k2."""
    adaptive: AdaptiveKlSection | None = None
    """Controller of the coefficient; null keeps it fixed. For example: {target: 0.1, horizon: 10000}"""


NO_REJECTIONS: Mapping[str, str | float] = {}


def check_is_map(value: object) -> object:
    """Return a map as it is. Raises PydanticCustomError for the name of a rejection without its bounds."""
    if isinstance(value, str):
        name = value.partition(",")[0] or "seq_mean_k1"
        raise refuse("a map of rejections and their bounds", f'Write rejection: {{{name}: "0.8_1.25"}}')
    return value


class AlgorithmSection(Section):
    """Advantage, loss and off-policy correction.

    `advantage`, `loss` and `correction` are names or `module:function`. `rejection` maps verl's options of
    `rollout_rs` to their thresholds: `{seq_mean_k1: "0.8_1.25"}`. `verl_compat` gives verl's numbers
    where ours differ on purpose (docs/algorithms.md).
    """

    advantage: str = "grpo"
    """Advantage estimator. For example: grpo, gae, "mine:advantage", rloo"""
    gamma: Share = 1.0
    """[1] Discount of later rewards."""
    lam: Share = 1.0
    """[1] Lambda of generalised advantage estimation: 0 uses the critic only, 1 the rewards only."""
    loss: str = "vanilla"
    """The policy loss (docs/algorithms.md). For example: vanilla, gspo, cispo"""
    clip: tuple[NonNegativeNumber, NonNegativeNumber] = (0.2, 0.28)
    """[1] Clip range of the ratio: below 1 and above 1."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """[1] Upper bound of the ratio where the advantage is negative."""
    value_clip: Annotated[float, Field(gt=0)] = 0.5
    """[1] Largest change of the critic's value from the one at the step's start."""
    entropy_coeff: NonNegativeNumber = 0.0
    """[1] Weight of the entropy bonus."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """Aggregation of token losses."""
    prox: Literal["recompute", "loglinear", "behaviour"] = "recompute"
    """Source of the proximal log-probs (the policy at the start of the step)."""
    correction: str = "decoupled_token_is"
    """Off-policy correction. For example: decoupled_token_is, disabled"""
    is_threshold: Annotated[float, Field(gt=0)] = 2.0
    """[1] Upper bound of importance weights."""
    normalize_weights: bool = False
    """Whether importance weights are scaled to a mean of 1 over a batch."""
    rejection: Annotated[Mapping[str, str | float], BeforeValidator(check_is_map)] = NO_REJECTIONS
    """[1] Rejection of rows or tokens by their ratio, with its bounds. For example:
    {seq_mean_k1: "0.8_1.25"}, {token_k2: 2.0}
    """
    veto: Annotated[float, Field(ge=0)] = 1e-4
    """[1] Rows with a token whose ratio is below this are left out; 0 for none."""
    kl: KlSection = KlSection()
    drop_constant_groups: bool = True
    """Whether groups with equal rewards are dropped and replaced."""
    verl_compat: bool = False
    """Whether verl's numbers are used where asyncrl differs on purpose."""
