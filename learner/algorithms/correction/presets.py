"""The corrections by verl's names (pure)."""

from __future__ import annotations

from learner.algorithms.correction.rejection import Rejection, parse_rejections
from learner.algorithms.correction.weights import Correction


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
        "bypass_pg_geo_rs": Correction(is_bypass=True, rejection=geometric),
        "bypass_pg_geo_rs_seq_tis": Correction(
            is_bypass=True, level="sequence", upper=is_threshold, rejection=geometric
        ),
        "bypass_pg_geo_rs_token_tis": Correction(
            is_bypass=True, level="token", upper=is_threshold, rejection=geometric
        ),
    }


def is_policy_gradient(name: str, correction: Correction) -> bool:
    """Tell whether the preset's loss is the plain policy gradient: a ratio would count the weights twice."""
    return name.startswith("bypass_pg") or (correction.is_bypass and correction.level is not None)


def _reject(options: str, thresholds: str) -> tuple[Rejection, ...]:
    return parse_rejections(options, thresholds)
