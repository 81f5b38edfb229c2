"""The page `docs/configuration.md`, made from the tree."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl.cli.run.resume_rules import CHANGES_ON_RESUME, SAME_ON_RESUME
from asyncrl.cli.schema.draft import summary_of
from asyncrl.cli.schema.leaves import Leaf, is_section, section_in, walk
from asyncrl.core.config.rules.format import FORMAT
from asyncrl.core.config.tree import Config

HEAD = """# Configuration

Generated: `python -m asyncrl.cli.schema --page > docs/configuration.md`. The same for an editor is in
[schema.json](../configs/schema.json): `# yaml-language-server: $schema=<path>/schema.json` as the first line
of a file, with a path from that file, turns on completion and checks. The files in [configs](../configs) are
there to start from; `asyncrl plan` checks a file against this machine and says what a run would take.

Several files are laid over each other, left to right, and `--set key=value` over them: maps are merged key by
key, everything else is replaced whole. Text is YAML 1.2: `1e-6` is a number, `yes` a word. Every error is
reported at once, with its place. Relative paths start where the command is called. `*` in a key stands for an
item of a list or for a name in a map. A unit of 1 is a pure number.
"""
RESUME = """## What a resume may change

`asyncrl up` of a run that has a checkpoint goes on from it. Some keys must have the values that the run began
with, because its journal and its checkpoints depend on them; every other key may change from one start to the
next (`asyncrl.cli.run.resume_rules`).

"""
BOUNDS = {Ge: "from {0.ge}", Gt: "above {0.gt}", Le: "to {0.le}", Lt: "below {0.lt}"}
FORMATS = """## Older files

`format` numbers the form of a file. A file without it is in the newest form, and a key of an older one is
refused with what stands for it; `format: 1` in it lets the older keys be read (an editor knows the newest
form only). A run's own `resolved.yaml` is always brought up to date. A newer number than {newest} is refused.
"""


def render() -> str:
    """Return the page in Markdown."""
    parts = [HEAD, _table([_row(leaf) for leaf in walk() if "." not in leaf.key])]
    for name, field in Config.model_fields.items():
        section = section_in(field.annotation)
        if section is not None:
            parts.append(_section(name, section))
    rows = [f"| `{key}` | {why} |" for key, why in SAME_ON_RESUME.items()]
    changes = [f"| `{key}` | {what} |" for key, what in CHANGES_ON_RESUME.items()]
    table = [
        "| must stay | because |",
        "|---|---|",
        *rows,
        "",
        "| may change | and then |",
        "|---|---|",
        *changes,
    ]
    return "\n".join([*parts, RESUME + "\n".join(table), "", FORMATS.format(newest=FORMAT)])


def _section(name: str, section: type[BaseModel]) -> str:
    rows = []
    for field_name, field in section.model_fields.items():
        if is_section(field.annotation):
            said = summary_of(field.annotation)
            rows.append(f"| `{name}.{field_name}` | {', '.join(_kinds_of(field))} | | | {said} |")
        rows += [_row(leaf) for leaf in walk(section, f"{name}.") if _is_below(leaf, f"{name}.{field_name}")]
    return f"## {name}\n\n{inspect.getdoc(section)}\n\n{_table(rows)}"


def _is_below(leaf: Leaf, key: str) -> bool:
    return leaf.key == key or leaf.key.startswith(f"{key}.")


def _table(rows: list[str]) -> str:
    return "\n".join(["| key | value | default | unit | |", "|---|---|---|---|---|", *rows, ""])


def _row(leaf: Leaf) -> str:
    assert leaf.note is not None, leaf.key
    examples = ", ".join(f"`{_write(example)}`" for example in leaf.note.examples)
    meaning = leaf.note.meaning + (f" For example {examples}" if examples else "")
    default = "required" if leaf.field.is_required() else f"`{_write(leaf.default)}`"
    cells = [f"`{leaf.key}`", ", ".join(_kinds_of(leaf.field)), default, leaf.note.unit, meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _kinds_of(field: FieldInfo) -> list[str]:
    """Return what a value may be, in words; short forms that are read as longer ones among them."""
    found = list(dict.fromkeys(_kinds(_written(field.annotation, field.metadata))))
    bounds = [BOUNDS[type(one)].format(one) for one in field.metadata if type(one) in BOUNDS]
    return [f"{found[0]} {' '.join(bounds)}", *found[1:]] if bounds else found


def _written(annotation: object, metadata: Sequence[object]) -> object:
    """Return the type of what a person writes, where it is not that of the tree."""
    validators = (one for one in metadata if isinstance(one, BeforeValidator))
    types = [one.json_schema_input_type for one in validators]
    return next((one for one in types if one is not PydanticUndefined), annotation)


def _kinds(annotation: object) -> Iterator[str]:
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    if annotation in names:
        yield names[annotation]
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "section"
    elif (metadata := getattr(annotation, "__metadata__", None)) is not None:
        yield from _kinds(_written(get_args(annotation)[0], metadata))
    elif all(isinstance(part, str | int) for part in get_args(annotation)) and get_args(annotation):
        yield ", ".join(f"`{part}`" for part in get_args(annotation))
    elif get_origin(annotation) in (tuple, dict, Mapping):
        yield "list" if get_origin(annotation) is tuple else "map"
    else:
        for part in get_args(annotation):
            yield from _kinds(part)


def _write(value: object) -> str:
    """Return a value as it would stand in the file, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_write(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_write(one) for one in value) + "]"
    if isinstance(value, str):
        return value if value and not set(value) & set(':{}[],#"') else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
