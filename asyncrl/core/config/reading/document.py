"""YAML 1.2 text as plain values that remember where they stand.

Owns the way from text to values: types of scalars (`1e-6` is a number, `yes` is a word), duplicate
keys, and the line and column of everything. It never constructs anything but plain values, and
knows nothing of what the keys mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from asyncrl.core.config.plain import JsonObject, JsonValue
from asyncrl.core.config.reading.problems import ORIGIN, KeyPath, Places, Problem

MAX_DEPTH = 8
TOO_DEEP = f"values are nested deeper than {MAX_DEPTH} levels"
TAG = "tag:yaml.org,2002:"
PLAIN_TAGS = {TAG + name for name in ("str", "timestamp", "merge", "value")}


@dataclass
class Document:
    """Values read so far, where they stand, and what was wrong with the text."""

    places: Places
    values: JsonValue = None
    problems: list[Problem] = field(default_factory=list)


class _Composer(Composer):
    """Gives up far below `MAX_DEPTH`: each level takes the scanner longer than the one above it."""

    level = 0

    def compose_node(self, parent: Node | None, index: int) -> Node:
        if self.level == MAX_DEPTH + 1:
            self.too_deep = self.parser.peek_event().start_mark
        elif self.level == 4 * MAX_DEPTH:
            raise RecursionError(self.too_deep)
        self.level += 1
        node: Node = super().compose_node(parent, index)
        self.level -= 1
        return node


def read_document(text: str, origin: str, is_file: bool = True) -> Document:
    """Return the values in `text`.

    Args:
        text: YAML 1.2.
        origin: The file's name, or the option that holds the text.
        is_file: Whether places name a line and column after `origin`.
    """
    reader = _Reader(Document(Places(origin)), origin, is_file)
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    try:
        node = yaml.compose(text)
        if node is not None:
            reader.document.values = reader.read(node, ())
    except YAMLError as error:
        reader.document.problems.append(_syntax_problem(error, reader))
    except RecursionError as error:
        reader.complain(error.args[0], TOO_DEEP)
    return reader.document


def overlay(below: Document, above: Document) -> None:
    """Put the values of `above` over those of `below`: maps key by key, everything else whole.

    A section without keys changes nothing. Both documents hold a map; what is wrong with either is kept.
    """
    below.problems.extend(above.problems)
    _overlay_map(below, above, ())


def _overlay_map(below: Document, above: Document, path: KeyPath) -> None:
    old, new = _value_at(below, path), _value_at(above, path)
    for key, value in new.items():
        here = (*path, key)
        if value is None and not path and key in old:
            continue
        below.places.keys[here] = above.places.keys[here]
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            _overlay_map(below, above, here)
            continue
        old[key] = value
        forget_below(below.places, here)
        ours, others = below.places, above.places
        for mine, theirs in ((ours.keys, others.keys), (ours.values, others.values)):
            mine |= {other: theirs[other] for other in theirs if other[: len(here)] == here}


def _value_at(document: Document, path: KeyPath) -> JsonObject:
    value = document.values
    for part in path:
        assert isinstance(value, dict), path
        value = value[part]
    assert isinstance(value, dict), path
    return value


def forget_below(places: Places, path: KeyPath) -> None:
    """Forget where the parts of the value at `path` stand."""
    for found in (places.keys, places.values):
        for other in [other for other in found if len(other) > len(path) and other[: len(path)] == path]:
            del found[other]


@dataclass(frozen=True)
class _Reader:
    document: Document
    origin: str
    is_file: bool

    def place(self, mark: StreamMark) -> str:
        return f"{self.origin}:{mark.line + 1}:{mark.column + 1}" if self.is_file else self.origin

    def complain(self, mark: StreamMark, what: str, hint: str = "") -> None:
        self.document.problems.append(Problem(what, hint=hint, where=self.place(mark)))

    def read(self, node: Node, path: KeyPath) -> JsonValue:
        self.document.places.values[path] = self.place(node.start_mark)
        if len(path) > MAX_DEPTH:
            self.complain(node.start_mark, TOO_DEEP)
            return None
        if isinstance(node, MappingNode):
            return self.read_mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.read(item, (*path, str(index))) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode), "a node is a mapping, a sequence or a scalar"
        return self.read_scalar(node)

    def read_mapping(self, node: MappingNode, path: KeyPath) -> JsonObject:
        values: JsonObject = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self.complain(key_node.start_mark, "a key must be a word")
                continue
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in values:
                self.complain(
                    key_node.start_mark,
                    f"the key '{key}' stands here for the second time (first in line {lines[key]})",
                )
                continue
            lines[key] = line
            self.document.places.keys[(*path, key)] = self.place(key_node.start_mark)
            values[key] = self.read(value_node, (*path, key))
        return values

    def read_scalar(self, node: ScalarNode) -> JsonValue:
        text, tag = str(node.value), str(node.tag)
        if tag in PLAIN_TAGS:
            return text
        if tag == TAG + "null":
            return None
        if tag == TAG + "bool":
            return text.lower() == "true"
        try:
            if tag == TAG + "int":
                return _whole_number(text)
            if tag == TAG + "float":
                return _number(text)
        except ValueError:
            self.complain(node.start_mark, f"'{text}' is no number")
            return None
        self.complain(node.start_mark, f"the tag '{tag}' is not allowed", "Write plain values")
        return None


def _whole_number(text: str) -> int:
    digits = text.replace("_", "").lower()
    base = {"0x": 16, "0o": 8}.get(digits.lstrip("+-")[:2], 10)
    return int(digits, base)


def _number(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


def _syntax_problem(error: YAMLError, reader: _Reader) -> Problem:
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        where = reader.origin + ORIGIN if reader.is_file else reader.origin
        return Problem(f"this is not YAML: {str(error).splitlines()[0]}", where=where)
    what = str(error.problem)
    hint = ""
    if "\\t" in what:
        hint = "Indent with spaces, not with tabs"
    elif "another document" in what:
        hint = "Keep one document in the file: remove the line '---'"
    elif "mapping values are not allowed" in what:
        hint = "Check the indentation of this line, and that the line above is complete"
    return Problem(f"this is not YAML: {what}", hint=hint, where=reader.place(error.problem_mark))
