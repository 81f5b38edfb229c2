"""The number of a configuration's form: newer ones are refused, older ones brought up to date (pure).

Owns the number, and one function per step from a form to the next. Must never change what a file means.
Invariant: a value that moved keeps its place, so that a problem with it names the line that was written.

1: before the key `format`. 2: the guard's limits are a map of metrics (`guard.limits`). 3: a rejection and
its threshold are an entry of a map (`algorithm.rejection`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from asyncrl.core.config.plain import JsonObject
from asyncrl.core.config.reading.problems import KeyPath, Places, Problem

if TYPE_CHECKING:
    from asyncrl.core.config.reading.document import Document

FORMAT: Final = 3
"""The form that this asyncrl writes, and that a file is in if it does not say."""
OLDEST = 1

GUARD_LIMITS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "max_kl": ("max", ("actor/ppo_kl", "rollout_corr/kl")),
    "max_grad_norm": ("max", ("actor/grad_norm", "critic/grad_norm")),
    "max_clipfrac": ("max", ("actor/pg_clipfrac",)),
    "max_vf_clipfrac": ("max", ("critic/vf_clipfrac",)),
    "min_entropy": ("min_share", ("actor/entropy",)),
    "min_ess": ("min", ("rollout_corr/rollout_is_eff_sample_size",)),
    "min_throughput": ("min_share", ("perf/throughput",)),
}
"""A key of form 1: the way of its limit in form 2, and the metrics that have it."""


def bring_up_to_date(document: Document, assumed: int = FORMAT) -> bool:
    """Bring the values of `document` to the current form, or say there why that cannot be.

    Args:
        document: As read; its values and places change.
        assumed: The form of values that do not name theirs.

    Returns:
        Whether the values are in the current form.
    """
    values = document.values
    assert isinstance(values, dict), "a file's sections"
    found = values.get("format", assumed)
    if type(found) is not int or found < OLDEST:
        what = f"format is {found!r}, but must be a whole number from {OLDEST} to {FORMAT}"
        return _refuse(document, what, "Leave it out for the newest")
    if found > FORMAT:
        what = f"format is {found}, and this asyncrl reads up to {FORMAT}: the file is of a newer one"
        return _refuse(document, what, "Use the asyncrl that wrote it, or a newer one")
    for step in STEPS[found - OLDEST :]:
        step(values, document.places)
    if "format" in values:
        values["format"] = FORMAT
    return True


def _refuse(document: Document, what: str, hint: str) -> bool:
    document.problems.append(Problem(what, hint, "format", document.places.of_value(("format",))))
    return False


def _name_limits(values: JsonObject, places: Places) -> None:
    """From 1 to 2: seven limits of the guard become entries of one map."""
    guard = values.get("guard")
    if not isinstance(guard, dict) or not GUARD_LIMITS.keys() & guard.keys():
        return
    limits = guard.setdefault("limits", {})
    if not isinstance(limits, dict):
        return  # which is told where it stands
    for name in [name for name in GUARD_LIMITS if name in guard]:
        way, metrics = GUARD_LIMITS[name]
        value = guard.pop(name)
        for metric in metrics:
            limits.setdefault(metric, {way: value})
            _copy_place(places, ("guard", name), ("guard", "limits", metric, way))


def _pair_rejections(values: JsonObject, places: Places) -> None:
    """From 2 to 3: two comma lists become a map from an option to its threshold."""
    algorithm = values.get("algorithm")
    if not isinstance(algorithm, dict):
        return
    options = algorithm.get("rejection")
    if not isinstance(options, str):  # a threshold of nothing stays, and is refused
        return
    names = [name.strip() for name in options.split(",") if name.strip()]
    given = str(algorithm.pop("rejection_threshold", "")).split(",")
    if len(given) != len(names):  # one for all; any other number is told where the first stands
        given = [",".join(given)] * len(names)
    algorithm["rejection"] = {name: text.strip() for name, text in zip(names, given, strict=True)}
    for name in names:
        _copy_place(places, ("algorithm", "rejection_threshold"), ("algorithm", "rejection", name))


def _copy_place(places: Places, old: KeyPath, new: KeyPath) -> None:
    """Let `new`, and what is above it and has no place yet, stand where `old` does."""
    for found in (places.keys, places.values):
        for length in range(1, len(new)) if old in found else ():
            found.setdefault(new[:length], found[old])
        found[new] = found.get(old, places.origin)


STEPS: tuple[Callable[[JsonObject, Places], None], ...] = (_name_limits, _pair_rejections)
"""The n-th brings form `OLDEST + n` to the next one."""
