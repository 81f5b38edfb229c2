"""Every key of the configuration, section by section, with its description.

Owns the walk over the tree. A leaf is what a person sets as one thing: a value, a list, or a section that may
be left out whole; the keys inside such a section or list are walked too, and are `inner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncrl.cli.schema.notes import Note, read_notes
from asyncrl.core.config.tree import Config


@dataclass(frozen=True)
class Leaf:
    """One key.

    Attributes:
        key: As `learner.lr`; `data.train.*.weight` inside a list or map.
        section: The class that holds it.
        field: Its pydantic field.
        note: Its description, None without one.
        is_inner: Whether it stands inside another leaf.
    """

    key: str
    section: type[BaseModel]
    field: FieldInfo
    note: Note | None
    is_inner: bool = False

    @property
    def default(self) -> object:
        """The value without one, as it would be written; None too where one must be given."""
        if self.field.is_required():
            return None
        return dump_value(self.field.get_default(call_default_factory=True))


def walk(model: type[BaseModel] = Config, prefix: str = "", is_inner: bool = False) -> Iterator[Leaf]:
    """Yield the keys of `model` in their order."""
    notes = read_notes(model)
    for name, field in model.model_fields.items():
        key, annotation = f"{prefix}{name}", field.annotation
        if is_section(annotation):
            yield from walk(annotation, f"{key}.", is_inner)
            continue
        yield Leaf(key, model, field, notes.get(name), is_inner)
        section = section_in(annotation)
        if section is not None:
            yield from walk(section, f"{key}.*." if _is_many(annotation) else f"{key}.", is_inner=True)


def is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    """Tell whether an annotation is a section, and nothing else."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def section_in(annotation: object) -> type[BaseModel] | None:
    """Return the section that an annotation is, or may be, or that its items are."""
    if is_section(annotation):
        return annotation
    found = (section_in(part) for part in get_args(annotation))
    return next((section for section in found if section is not None), None)


def dump_value(value: object) -> object:
    """Return a value of the tree as plain data."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: dump_value(one) for key, one in value.items()}
    return [dump_value(one) for one in value] if isinstance(value, tuple | list) else value


def _is_many(annotation: object) -> bool:
    """Tell whether an annotation is a list or a map, or may be one."""
    if get_origin(annotation) in (tuple, Mapping):
        return True
    return any(_is_many(part) for part in get_args(annotation))
