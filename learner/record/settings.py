"""Settings of a recorded step: the part of the run's configuration that its training depends on.

Owns the list of these settings, and the way back to a whole configuration. A resume may change every one of
these values, and `resolved.yaml` holds the last ones only: so each step records the values under which it was
trained. The batch is no part of them. Must never keep a secret: the sections here have none. Invariant: a
step is trained again under its own values, but for those that `--set` names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash
from pydantic import ValidationError

from asyncrl.core.config.load import load_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError

Settings = Mapping[str, Mapping[str, object]]
"""Values by section and key, as JSON has them."""

SECTIONS = ("learner", "algorithm", "critic", "staleness")
"""Kept whole."""
KEYS = (
    ("model", "dtype"),
    ("rollout", "temperature"),
    ("rollout", "max_tokens"),
    ("data", "max_prompt_tokens"),
)
"""Kept of other sections: what a backend, the objective or a step's metrics read of them."""
BEFORE: Settings = {"learner": {"shared_prompt": "off"}}
"""Values of keys that older records lack: their steps were trained that way."""


def settings_of(config: Config) -> Settings:
    """Return what the training of a step depends on."""
    values = config.model_dump(mode="json")
    settings: dict[str, dict[str, object]] = {section: values[section] for section in SECTIONS}
    for section, key in KEYS:
        settings.setdefault(section, {})[key] = values[section][key]
    return settings


def encode_settings(settings: Settings) -> bytes:
    """Return `settings` as bytes: equal ones as equal bytes."""
    return json.dumps(settings, sort_keys=True).encode()


def digest_settings(data: bytes) -> str:
    """Return the name that encoded settings have."""
    return str(xxhash.xxh3_128_hexdigest(data))


def describe_change(before: Settings, after: Settings) -> str:
    """Return the keys that differ, with both values, in words."""
    changes = [
        f"{section}.{key}: {after.get(section, {}).get(key)!r} in place of {values.get(key)!r}"
        for section, values in before.items()
        for key in sorted({*values, *after.get(section, {})})
        if values.get(key) != after.get(section, {}).get(key)
    ]
    return ", ".join(changes)


def configure(folder: Path, settings: Settings | None, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the run in `folder` as it was under `settings`, changed by `overrides`.

    Args:
        settings: None stands for what the run was last started with.

    Raises:
        ConfigProblems: The overrides are wrong.
        ConfigError: They do not fit the recorded settings, or those are of another asyncrl.
    """
    asked = load_resolved(folder, overrides)
    if settings is None:
        return asked
    given = asked.model_dump(mode="json")
    values = asked.model_dump(mode="json")
    for section, recorded in settings.items():
        before = BEFORE.get(section, {}) if section in SECTIONS else values[section]
        values[section] = {**before, **recorded}
    for text in overrides:
        _copy(given, values, text.partition("=")[0].strip().split("."))
    try:
        return Config.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = ".".join(str(part) for part in first["loc"]) or "the configuration"
        raise ConfigError(
            f"the configuration that steps were recorded under cannot be used: {what}: {first['msg']}",
            hint="Leave out the --set that does not fit it, or use the asyncrl that recorded them",
        ) from error


def _copy(given: Mapping[str, object], values: dict[str, object], path: Sequence[str]) -> None:
    """Put the value at `path` of `given` into `values`."""
    *sections, key = path
    source, target = given, values
    for section in sections:
        below, inner = source[section], target.get(section)
        if not isinstance(inner, dict) or not isinstance(below, Mapping):  # none was recorded: take it whole
            key = section
            break
        source, target = below, inner
    target[key] = source[key]
