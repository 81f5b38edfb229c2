"""Validation of an algorithm section, and its description in words.

Owns the rules on combinations: a value that counts twice or does nothing is a ConfigError, never a silent
choice.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.core.config.tree import AlgorithmSection
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import PROX, VALUES, estimators_needing
from learner.algorithms.presets import Correction, find_correction
from learner.algorithms.registry import check_name
from learner.algorithms.variants import ADVANTAGES, LOSSES

DUAL_CLIPPED = tuple(name for name, one in LOSSES.items() if one.has_dual_clip)
DISCOUNTED = tuple(name for name, one in ADVANTAGES.items() if one.is_discounted)
ONE_AGGREGATION = {name: one.aggregation for name, one in LOSSES.items() if one.aggregation}
_LEVELS = {"token": "per token", "sequence": "per sequence", "geometric": "per sequence, geometric mean"}
_DEFAULTS = AlgorithmSection()

Problem = tuple[str, str]
"""The problem, and its remedy."""


def find_problems(section: AlgorithmSection) -> Iterator[str]:
    """Yield a line, which begins with a key, for each unknown name and each value that does nothing.

    A correction of the user's is not imported: what goes with it is checked by the learner.
    """
    for key, name, known in (
        ("advantage", section.advantage, ADVANTAGES),
        ("loss", section.loss, LOSSES),
    ):
        try:
            check_name(name, known, f"algorithm.{key}")
        except ConfigError as error:
            yield str(error)
    try:
        correction = find_correction(section) if ":" not in section.correction else None
    except ConfigError as error:
        yield str(error)
        return
    for what, hint in _find_meaningless(section, correction) if correction is not None else ():
        yield f"{what}. {hint}" if what.startswith("algorithm.") else f"algorithm: {what}. {hint}"


def check_section(section: AlgorithmSection, correction: Correction) -> None:
    """Raise ConfigError, with all problems at once, if something counts twice or does nothing."""
    problems = list(_find_meaningless(section, correction))
    if problems:
        what, hints = zip(*problems, strict=True)
        raise ConfigError("; ".join(what), hint="; ".join(dict.fromkeys(hints)))


def _find_meaningless(section: AlgorithmSection, correction: Correction) -> Iterator[Problem]:
    """Yield what counts twice or does nothing."""
    yield from _check_advantage(section)
    yield from _check_loss(section, correction)
    yield from _check_correction(section, correction)
    yield from _check_prox(section, correction)
    yield from _check_kl(section)


def describe_section(section: AlgorithmSection, correction: Correction) -> str:
    """Return in words which correction is active and what is minimised, for the log at start."""
    aggregation = ONE_AGGREGATION.get(section.loss, section.aggregation)
    loss = _loss_name(section, correction)
    parts = [
        f"advantage {section.advantage}, loss {loss}, aggregation {aggregation}",
        _describe_prox(section, correction),
        _describe_weights(correction),
    ]
    if correction.rejection:
        options = ", ".join(
            f"{r.option} outside [{r.lower:.4g}, {r.upper:.4g}]" for r in correction.rejection
        )
        parts.append(f"tokens or rows are rejected by {options}; {_describe_denominator(section)}")
    if section.veto:
        parts.append(f"a row with a token whose ratio is below {section.veto:g} is left out")
    if section.entropy_coeff:
        parts.append(f"entropy bonus {section.entropy_coeff:g}")
    kl = section.kl
    if kl.coef:
        control = "fixed" if kl.adaptive is None else f"adaptive towards {kl.adaptive.target:g}"
        where = "in the loss" if kl.where == "loss" else "off the reward"
        parts.append(f"KL to the reference {where}: {kl.estimator}, coefficient {kl.coef:g}, {control}")
    return "; ".join(parts)


def _loss_name(section: AlgorithmSection, correction: Correction) -> str:
    if correction.is_policy_gradient:
        return "reinforce (the weights hold the ratio)"
    return section.loss


def _describe_prox(section: AlgorithmSection, correction: Correction) -> str:
    if correction.is_bypass or section.prox == "behaviour":
        return "the clip is centred on the sampler's log-probs (bypass, no extra forward pass)"
    if section.prox == "loglinear":
        return "the clip is centred on prox log-probs interpolated by age (loglinear, no extra forward pass)"
    return "the clip is centred on prox log-probs recomputed at the start of the step (decoupled)"


def _describe_weights(correction: Correction) -> str:
    if correction.level is None:
        return "no importance weights"
    target = "current" if correction.is_bypass else "prox"
    bound = (
        f"cut at {correction.upper:g}"
        if correction.lower is None
        else f"0 outside [{correction.lower:g}, {correction.upper:g}]"
    )
    normalized = ", divided by their mean" if correction.is_batch_normalized else ""
    return f"importance weights {target} / behaviour {_LEVELS[correction.level]}, {bound}{normalized}"


def _describe_denominator(section: AlgorithmSection) -> str:
    if section.verl_compat:
        return "the loss divides by the tokens that are left"
    return "the loss still divides by all tokens"


def _check_advantage(section: AlgorithmSection) -> Iterator[Problem]:
    name = section.advantage
    if ":" in name:
        return
    if section.gamma != _DEFAULTS.gamma and name not in DISCOUNTED:
        yield f"algorithm.gamma does nothing with {name}", f"It belongs to {', '.join(DISCOUNTED)}"
    with_values = estimators_needing(VALUES)
    if section.lam != _DEFAULTS.lam and name not in with_values:
        yield f"algorithm.lam does nothing with {name}", f"It belongs to {', '.join(with_values)}"
    if section.value_clip != _DEFAULTS.value_clip and name not in with_values:
        yield f"algorithm.value_clip does nothing with {name}", "It belongs to a critic"


def _check_loss(section: AlgorithmSection, correction: Correction) -> Iterator[Problem]:
    loss, facts = section.loss, LOSSES.get(section.loss)
    is_gradient = loss == _DEFAULTS.loss or (facts is not None and facts.is_policy_gradient)
    if correction.is_policy_gradient and not is_gradient:
        yield (
            f"algorithm.loss: {loss} does nothing with {section.correction}, which is the policy gradient",
            "Use correction: bypass_ppo_clip to keep the loss",
        )
    default = _DEFAULTS.aggregation
    if loss in ONE_AGGREGATION and section.aggregation not in (default, ONE_AGGREGATION[loss]):
        yield (
            f"algorithm.aggregation does nothing with {loss}, which takes {ONE_AGGREGATION[loss]}",
            "Leave it out",
        )
    if facts is not None and not facts.has_dual_clip and section.dual_clip != _DEFAULTS.dual_clip:
        yield f"algorithm.dual_clip does nothing with {loss}", f"It belongs to {', '.join(DUAL_CLIPPED)}"
    is_behaviour = correction.is_bypass or section.prox == "behaviour"
    if facts is not None and facts.compares_behaviour and is_behaviour:
        yield (
            f"algorithm.loss: {loss} measures prox against behaviour, which are the same here",
            "Use prox: recompute with a decoupled correction",
        )


def _check_correction(section: AlgorithmSection, correction: Correction) -> Iterator[Problem]:
    name, has_weights = section.correction, correction.level is not None
    uses_threshold = has_weights and correction.lower is None
    if section.is_threshold != _DEFAULTS.is_threshold and ":" not in name and not uses_threshold:
        yield f"algorithm.is_threshold does nothing with {name}", "Choose a truncating correction"
    if section.normalize_weights and not has_weights:
        yield f"algorithm.normalize_weights does nothing with {name}", "Choose a correction with weights"
    if _has_weights(section) and has_weights:
        yield (
            f"{section.advantage} has importance weights of its own: {name} would count them twice",
            "Use correction: disabled",
        )


def is_corrected(section: AlgorithmSection) -> bool:
    """Tell whether the difference between the engine's log-probs and the learner's is weighed or bounded.

    So it is by a correction of the user's, which is not imported.
    """
    if ":" in section.correction or section.prox == "behaviour" or _has_weights(section):
        return True
    correction = find_correction(section)
    return correction.is_bypass or correction.level is not None or bool(correction.rejection)


def _has_weights(section: AlgorithmSection) -> bool:
    facts = ADVANTAGES.get(section.advantage)
    return facts is not None and facts.has_weights


def _check_prox(section: AlgorithmSection, correction: Correction) -> Iterator[Problem]:
    if section.prox != "recompute" and correction.is_bypass:
        yield (
            f"algorithm.prox: {section.prox} does nothing with {section.correction}, which has no prox",
            "Leave prox out, or choose a decoupled correction",
        )
    elif section.prox == "behaviour" and (correction.level is not None or correction.rejection):
        yield (
            f"algorithm.correction: {section.correction} compares prox and behaviour, which are the same",
            "Use correction: disabled, or prox: recompute",
        )
    if section.prox == "loglinear" and correction.is_batch_normalized:
        yield (
            "algorithm.normalize_weights needs the weights of the whole batch, which prox: loglinear has not",
            "Use prox: recompute",
        )
    if correction.is_bypass and correction.is_batch_normalized:
        yield (
            "algorithm.normalize_weights needs the weights of the whole batch, which a bypass has not",
            "Choose a decoupled correction",
        )
    name = section.advantage
    if name in estimators_needing(PROX) and (section.prox != "recompute" or correction.is_bypass):
        corrected = "correction: disabled" if _has_weights(section) else "a decoupled correction"
        yield f"{name} needs recomputed prox log-probs", f"Use prox: recompute and {corrected}"


def _check_kl(section: AlgorithmSection) -> Iterator[Problem]:
    if not section.kl.coef and section.kl != _DEFAULTS.kl:
        yield "algorithm.kl does nothing: its coefficient is 0", "Set algorithm.kl.coef"
