"""Notes on keys, read from the attribute docstrings of a section's source: unit, meaning, examples.

Owns the form of these texts: `[unit] Meaning. For example: a, b`, where the examples are YAML. Notes are read
from the source on demand, so that no process pays for them at its start.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from functools import lru_cache

from pydantic import BaseModel

from asyncrl.core.config.reading.document import read_document

_FORM = re.compile(
    r"(?:\[(?P<unit>[^\]]+)\] )?(?P<meaning>.+?)(?: For example: (?P<examples>.+))?", re.DOTALL
)


@dataclass(frozen=True)
class Note:
    """Description of one key. `unit` is empty for a key without one, `1` for a pure number."""

    meaning: str
    unit: str = ""
    examples: tuple[object, ...] = ()


def read_note(text: str) -> Note:
    """Return the parts of one text.

    >>> read_note("[s] Until a lease ends. For example: 30, 60.0")
    Note(meaning='Until a lease ends.', unit='s', examples=(30, 60.0))
    """
    found = _FORM.fullmatch(" ".join(text.split()))
    assert found is not None, text
    examples = read_document(f"[{found['examples'] or ''}]", "examples")
    assert isinstance(examples.values, list) and not examples.problems, f"{text}: {examples.problems}"
    return Note(found["meaning"], found["unit"] or "", tuple(examples.values))


@lru_cache
def read_notes(section: type[BaseModel]) -> dict[str, Note]:
    """Return the notes of a section's keys, inherited ones first; a key without one is not there."""
    notes: dict[str, Note] = {}
    for base in section.__bases__:
        if issubclass(base, BaseModel) and base is not BaseModel:
            notes |= read_notes(base)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef), section
    for field, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            notes[field.target.id] = read_note(str(after.value.value))
    return notes
