"""The algorithm: advantage, loss, off-policy correction, KL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.sections.section import NonNegativeNumber, Section, Share


class AdaptiveKlSection(Section):
    """Moves the coefficient so that the KL comes to `target`, by a fifth per `horizon` rows at most."""

    target: Annotated[float, Field(gt=0)] = 0.1
    horizon: Annotated[float, Field(gt=0)] = 10_000.0


class KlSection(Section):
    """KL to the reference policy, in the loss or off the reward. A coefficient of 0 turns it off.

    `coef` is fixed, or with `adaptive: {target, horizon}` where the coefficient begins.
    """

    coef: NonNegativeNumber = 0.0
    where: Literal["loss", "reward"] = "loss"
    estimator: Literal[
        "k1", "k2", "k3", "k1+", "k2+", "k3+", "kl", "abs", "mse", "low_var_kl", "low_var_kl+"
    ] = "low_var_kl"
    adaptive: AdaptiveKlSection | None = None


class AlgorithmSection(Section):
    """Advantage, loss and off-policy correction.

    `advantage`, `loss` and `correction` are names or `module:function`. `rejection` takes verl's
    `rollout_rs` with its thresholds: `seq_mean_k1` and `0.8_1.25`. `verl_compat` gives verl's numbers
    where ours differ on purpose (docs/algorithms.md).
    """

    advantage: str = "grpo"
    gamma: Share = 1.0
    lam: Share = 1.0
    loss: str = "vanilla"
    clip: tuple[NonNegativeNumber, NonNegativeNumber] = (0.2, 0.28)
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    value_clip: Annotated[float, Field(gt=0)] = 0.5
    entropy_coeff: NonNegativeNumber = 0.0
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    prox: Literal["recompute", "loglinear", "behaviour"] = "recompute"
    correction: str = "decoupled_token_is"
    is_threshold: Annotated[float, Field(gt=0)] = 2.0
    normalize_weights: bool = False
    rejection: str = ""
    rejection_threshold: str | float = ""
    veto: Annotated[float, Field(ge=0)] = 1e-4
    kl: KlSection = KlSection()
    drop_constant_groups: bool = True
    verl_compat: bool = False
