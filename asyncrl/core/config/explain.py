"""Errors of pydantic, in the words of the configuration file's author (pure)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from asyncrl.core.config.reading.problems import KeyPath, Places, Problem, suggest
from asyncrl.core.config.rules.refusals import (
    BREAKS_LOGPROBS,
    FOREIGN_DISTRIBUTION,
    MOVED,
    NO_ADAPTER,
    NOT_THERE,
)
from asyncrl.core.config.rules.verl import hint_for
from asyncrl.core.config.secrets import hide_passwords, hide_secrets
from asyncrl.core.config.tree import Config

SHOWN_CHARACTERS = 60
WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "model_type": "a section of keys and values",
    "model_attributes_type": "a section of keys and values",
    "dict_type": "a section of keys and values",
    "tuple_type": "a list",
    "too_short": "a list with {min_length} or more items",
    "string_too_short": "a name or path that is not empty",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "literal_error": "one of {expected}",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-', at most 64, with a letter or digit first",
}


def explain(error: ErrorDetails, places: Places) -> Problem:
    """Return `error` as a problem with its place."""
    path: KeyPath = tuple(str(part) for part in error["loc"])
    key, kind = ".".join(path), error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path, error["input"], places)
    if kind == "missing" and path[-1].isdigit():
        return Problem(
            f"{'.'.join(path[:-1])} has too few items", "It takes two", key=key, where=places.of_value(path)
        )
    if kind == "missing":
        return _missing_key(path, places)
    value, context = hide_secrets(path[-1] if path else "", error["input"]), error.get("ctx", {})
    wanted = WANTED[kind].format(**context) if kind in WANTED else _as_clause(error["msg"])
    what = f"{key} is {show(value)}, but must be {hide_passwords(wanted)}"
    hint = NO_ADAPTER.get((key, str(value))) or _hint(kind, value, context)
    return Problem(what, hint=hint, key=key, where=places.of_value(path))


def keys_of(path: KeyPath) -> list[str]:
    """Return the keys that the tree knows right under `path`."""
    model: type[BaseModel] = Config
    is_map = False
    for part in path:
        if is_map or part.isdigit():
            is_map = False
            continue  # an item has the keys that stand for its whole list or map
        field = model.model_fields.get(part)
        found = None if field is None else _section_of(field.annotation)
        if field is None or found is None:
            return []
        model, is_map = found, _is_map(field.annotation)
    return [] if is_map else list(model.model_fields)


def _is_map(annotation: object) -> bool:
    """Tell whether an annotation is a map from names to sections, or None."""
    return get_origin(annotation) is Mapping or any(_is_map(part) for part in get_args(annotation))


def _section_of(annotation: object) -> type[BaseModel] | None:
    """Return the section that an annotation is, or a list of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_of(part) for part in get_args(annotation))
    return next((section for section in found if section is not None), None)


def show(value: object) -> str:
    """Return `value` as it could stand in the file, cut to a readable length and without passwords."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = hide_passwords(text)
    text = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
    return f"'{text}'" if isinstance(value, str) else text


def _unknown_key(path: KeyPath, value: object, places: Places) -> Problem:
    section, key = path[:-1], path[-1]
    where = places.of_key(path)
    if key in NOT_THERE:
        what, why = NOT_THERE[key]
        return Problem(f"{'.'.join(path)}: {what}", hint=why, key=".".join(path), where=where)
    known = keys_of(section)
    homes = [other for other in Config.model_fields if key in keys_of((other,))]
    hint = f"It belongs to the section '{homes[0]}'" if homes else suggest(key, known)
    hint = BREAKS_LOGPROBS if key in FOREIGN_DISTRIBUTION else hint or f"Known here: {', '.join(known)}"
    hint = MOVED.get(".".join(path)) or hint_for(".".join(path), value) or hint
    what = f"unknown key '{key}' in '{'.'.join(section)}'" if section else f"unknown section '{key}'"
    return Problem(what, hint=hint, key=".".join(path), where=where)


def _missing_key(path: KeyPath, places: Places) -> Problem:
    section, key = path[:-1], path[-1]
    if section:
        what, hint = f"{'.'.join(path)} is missing", f"Add '{key}: ...' under '{'.'.join(section)}'"
    else:
        what, hint = f"the section '{key}' is missing", f"Add '{key}:' with {', '.join(_required(path))}"
    return Problem(what, hint=hint, key=".".join(path), where=places.of_key(section))


def _required(path: KeyPath) -> list[str]:
    model = Config.model_fields[path[0]].annotation
    assert isinstance(model, type) and issubclass(model, BaseModel), "only sections are required at the top"
    return [name for name, spec in model.model_fields.items() if spec.is_required()]


def _hint(kind: str, value: object, context: Mapping[str, object]) -> str:
    if "hint" in context:
        return str(context["hint"])
    if kind == "string_type" and isinstance(value, int | float):
        return f'Write it in quotes: "{show(value)}"'
    if kind.startswith("int") and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "on", "no", "off"):
        return f"Write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str) and _is_plain(value):
        return "Write it without quotes"
    if kind == "literal_error" and isinstance(value, str):
        return suggest(value, str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", "))
    return ""


def _is_plain(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return value.lower() in ("true", "false")


def _as_clause(message: str) -> str:
    for start in ("Input should be ", "Input should have ", "Value error, "):
        message = message.removeprefix(start)
    return message[:1].lower() + message[1:]
