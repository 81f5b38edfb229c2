"""Off-policy corrections: what one is, verl's presets by name, and the one that a section asks for (pure).

Imports no torch: `plan` reads this too. The functions on tensors are in `correction`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from asyncrl.core.config.tree import AlgorithmSection
from asyncrl.core.errors import ConfigError
from learner.algorithms.registry import resolve

OPTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(frozen=True)
class Rejection:
    """One option; what lies within the bounds of its estimator is kept. k2 and k3 have no lower one."""

    option: str
    lower: float
    upper: float


def parse_rejections(options: str, thresholds: str | float) -> tuple[Rejection, ...]:
    """Return the options of two comma lists in verl's form, for example `token_k1,seq_mean_k3`.

    Args:
        options: Names out of `OPTIONS`; empty for none.
        thresholds: As many, or one for all. k1 takes `lo_hi`, or one u for `1/u_u`; k2 and k3 take one.

    Raises:
        ValueError: An unknown option, a threshold that does not fit, or another number of them.
    """
    names = [name.strip() for name in options.split(",") if name.strip()]
    given = [text.strip() for text in str(thresholds).split(",")]
    if len(given) == 1:
        given *= len(names)
    if len(given) != len(names):
        raise ValueError(f"{len(names)} options and {len(given)} thresholds")
    return tuple(_parse_rejection(name, text) for name, text in zip(names, given, strict=True))


Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Correction:
    """One way to correct.

    Attributes:
        is_bypass: The behaviour policy takes the place of the proximal one.
        level: Weight per token, per sequence (product), per sequence (geometric mean), or none.
        upper: Weights above are cut to it, or set to 0 if there is a lower bound (IcePop, MIS).
        lower: Weights below are set to 0; None truncates only (TIS).
        is_batch_normalized: Divide the weights by their mean.
        rejection: Rules that leave out tokens or rows; a token stays if every option keeps it.
        has_no_ratio: The plain policy gradient takes the loss's place; so it does for a bypass with weights.
    """

    is_bypass: bool = False
    level: Level | None = None
    upper: float = 2.0
    lower: float | None = None
    is_batch_normalized: bool = False
    rejection: tuple[Rejection, ...] = ()
    has_no_ratio: bool = False

    @property
    def is_policy_gradient(self) -> bool:
        """Whether its loss is the plain policy gradient: a ratio would count the weights twice."""
        return self.has_no_ratio or (self.is_bypass and self.level is not None)


def find_correction(section: AlgorithmSection) -> Correction:
    """Return the preset with the section's own rejection and normalization. Raises ConfigError."""
    correction = resolve(section.correction, make_corrections(section.is_threshold), "algorithm.correction")
    if not isinstance(correction, Correction):
        raise ConfigError(f"algorithm.correction: '{section.correction}' is no Correction")
    if section.normalize_weights:
        correction = dataclasses.replace(correction, is_batch_normalized=True)
    if not section.rejection:
        return correction
    if correction.rejection:
        raise ConfigError(
            f"algorithm.rejection: {section.correction} rejects already, both would count twice",
            hint="Choose the correction without _rs, or leave rejection out",
        )
    try:
        rejections = parse_rejections(
            ",".join(section.rejection), ",".join(map(str, section.rejection.values()))
        )
    except ValueError as error:
        raise ConfigError(
            f"algorithm.rejection: {error}", hint='For example {seq_mean_k1: "0.8_1.25"}'
        ) from error
    return dataclasses.replace(correction, rejection=rejections)


def make_corrections(is_threshold: float) -> dict[str, Correction]:
    """Return the presets; `is_threshold` is C of the truncating ones."""
    geometric = _reject("seq_mean_k1", "0.999_1.001")
    k3 = _reject("seq_mean_k3", "0.01")
    token = Correction(level="token", upper=is_threshold)
    sequence = Correction(level="sequence", upper=is_threshold)
    return {
        "disabled": Correction(),
        "decoupled_token_is": token,
        "decoupled_seq_is": sequence,
        "decoupled_geo_is": Correction(level="geometric", upper=is_threshold),
        "decoupled_token_icepop": Correction(level="token", lower=0.5, upper=5.0),
        "decoupled_token_mis": Correction(level="token", lower=1 / 5, upper=5.0),
        "decoupled_seq_mis": Correction(level="sequence", lower=1 / 5, upper=5.0),
        "decoupled_seq_is_rs": Correction(
            level="sequence", upper=is_threshold, rejection=_reject("seq_sum_k1", "0.5_2.0")
        ),
        "decoupled_geo_rs": Correction(rejection=geometric),
        "decoupled_geo_rs_token_tis": Correction(level="token", upper=is_threshold, rejection=geometric),
        "decoupled_geo_rs_seq_tis": Correction(level="sequence", upper=is_threshold, rejection=geometric),
        "decoupled_k3_rs": Correction(rejection=k3),
        "decoupled_k3_rs_token_tis": Correction(level="token", upper=is_threshold, rejection=k3),
        "decoupled_k3_rs_seq_tis": Correction(level="sequence", upper=is_threshold, rejection=k3),
        "bypass_ppo_clip": Correction(is_bypass=True),
        "bypass_ppo_clip_geo_rs": Correction(is_bypass=True, rejection=geometric),
        "bypass_ppo_clip_k3_rs": Correction(is_bypass=True, rejection=k3),
        "bypass_pg_is": Correction(is_bypass=True, level="token", upper=is_threshold),
        "bypass_pg_token_icepop": Correction(is_bypass=True, level="token", lower=0.5, upper=5.0),
        "bypass_pg_geo_rs": Correction(is_bypass=True, rejection=geometric, has_no_ratio=True),
        "bypass_pg_geo_rs_seq_tis": Correction(
            is_bypass=True, level="sequence", upper=is_threshold, rejection=geometric
        ),
        "bypass_pg_geo_rs_token_tis": Correction(
            is_bypass=True, level="token", upper=is_threshold, rejection=geometric
        ),
    }


def _reject(options: str, thresholds: str) -> tuple[Rejection, ...]:
    return parse_rejections(options, thresholds)


def _parse_rejection(option: str, text: str) -> Rejection:
    if option not in OPTIONS:
        raise ValueError(f"'{option}' is not known; known: {', '.join(OPTIONS)}")
    try:
        bounds = [float(part) for part in text.split("_")]
    except ValueError:
        raise ValueError(f"'{text}' is no threshold of {option}") from None
    if not all(math.isfinite(bound) and bound > 0 for bound in bounds) or len(bounds) > 2:
        raise ValueError(f"'{text}' is no threshold of {option}: one or two numbers above 0")
    if not option.endswith("k1"):
        if len(bounds) != 1:
            raise ValueError(f"{option} has one upper threshold, not '{text}'")
        return Rejection(option, -math.inf, bounds[0])
    lower, upper = bounds if len(bounds) == 2 else (1 / bounds[0], bounds[0])
    if lower > upper:
        raise ValueError(f"'{text}': the lower threshold of {option} is above the upper one")
    return Rejection(option, math.log(lower), math.log(upper))
