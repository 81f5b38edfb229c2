"""The configuration as JSON Schema, for editors: types, limits, and what each key means.

Owns the difference to what pydantic makes: meanings, units and examples come from the notes, the form is
draft 7 (the newest that the common YAML language server reads), and a section may be left empty. What spans
several keys is not in it: `asyncrl plan` checks that.
"""

from __future__ import annotations

import inspect

from pydantic import BaseModel

from asyncrl.cli.schema.leaves import dump_value, section_in
from asyncrl.cli.schema.notes import Note, read_notes
from asyncrl.core.config.tree import Config

DRAFT = "http://json-schema.org/draft-07/schema#"
UNIT = "x-unit"
"""The keyword of a unit; other readers pass over it."""
OWN_WORDS = ("title", "default")
"""Keywords of a section from pydantic, which its keys state better."""


def json_schema() -> dict[str, object]:
    """Return the schema of a configuration file."""
    schema = Config.model_json_schema()
    parts = schema.pop("$defs")
    for section in _sections():
        if section.__name__ in parts:
            _describe(parts[section.__name__], section)
    _describe(schema, Config)
    for name, field in Config.model_fields.items():
        inner = section_in(field.annotation)
        if inner is not None:
            schema["properties"][name] = _property(schema["properties"][name], inner, field.is_required())
    required = [name for name, field in Config.model_fields.items() if field.is_required()]
    whole = {"$schema": DRAFT, "title": "asyncrl configuration"} | schema | {"required": required}
    found = _to_draft_7(whole | {"definitions": parts})
    assert isinstance(found, dict), "as it was"
    return found


def _property(reference: dict[str, object], section: type[BaseModel], is_required: bool) -> dict[str, object]:
    forms = [reference] if is_required else [reference, {"type": "null"}]
    return {"description": summary_of(section), "anyOf": forms}


def summary_of(section: type[BaseModel]) -> str:
    """Return the first paragraph of what is said of a section, on one line."""
    return " ".join((inspect.getdoc(section) or "").partition("\n\n")[0].split())


def _sections() -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = []
    waiting: list[type[BaseModel]] = [Config]
    while waiting:
        section = waiting.pop()
        found.append(section)
        inner = (section_in(field.annotation) for field in section.model_fields.values())
        waiting += [one for one in inner if one is not None and one not in found]
    return found


def _describe(part: dict[str, object], section: type[BaseModel]) -> None:
    """Put the notes of `section` into its part of the schema, in place."""
    part.pop("title", None)
    notes = read_notes(section)
    properties = part["properties"]
    assert isinstance(properties, dict), "by name"
    for name, found in properties.items():
        for word in OWN_WORDS if "$ref" in found else ("title",):
            found.pop(word, None)
        if name in notes:
            field = section.model_fields[name]
            found |= _say(notes[name], None if field.is_required() else dump_value(field.default))
        elif (inner := section_in(section.model_fields[name].annotation)) is not None:
            found["description"] = summary_of(inner)


def _say(note: Note, default: object) -> dict[str, object]:
    text = f"[{note.unit}] {note.meaning}" if note.unit else note.meaning
    unit: dict[str, object] = {UNIT: note.unit} if note.unit else {}
    examples = list(note.examples) or ([] if default is None else [default])
    return {"description": text, **unit, **({"examples": examples} if examples else {})}


def _to_draft_7(value: object) -> object:
    """Return `value` with the words of draft 7 for those of 2020-12."""
    if isinstance(value, list):
        return [_to_draft_7(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: _to_draft_7(one) for key, one in value.items()}
    if "$ref" in found:
        found["$ref"] = str(found["$ref"]).replace("#/$defs/", "#/definitions/")
        rest = {key: found.pop(key) for key in list(found) if key != "$ref"}
        return rest | {"allOf": [found]} if rest else found  # beside a $ref nothing counts
    if "prefixItems" in found:
        found["items"] = found.pop("prefixItems")
    return found
