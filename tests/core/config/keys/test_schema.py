"""Notes on each key: complete, true of the tree, and current in the checked-in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
from pydantic import ValidationError

from asyncrl.cli.schema import json_schema, walk
from asyncrl.cli.schema.notes import Note, read_note
from asyncrl.cli.schema.page import render
from asyncrl.core.config.load import load_config
from asyncrl.core.config.reading.document import read_document
from asyncrl.core.config.rules.format import FORMAT
from asyncrl.core.errors import ConfigError
from configs import shipped

ROOT = Path(__file__).parents[4]
LEAVES = {leaf.key: leaf for leaf in walk()}
GOOD = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}


@pytest.fixture(scope="module")
def schema():
    return json_schema()


def name_of(leaf):
    return leaf.key.rpartition(".")[2]


def is_number(leaf):
    """Tell whether its value is a number, or numbers."""
    return bool({int, float} & set(plain_types(leaf.field.annotation)))


def plain_types(annotation):
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from plain_types(part)


def examples_of(leaf):
    """Return values that a person may write there: those of the note, each word of a choice, the default."""
    words = [word for word in get_args(leaf.field.annotation) if isinstance(word, str)]
    defaults = [] if leaf.field.is_required() else [leaf.default]
    return [*leaf.note.examples, *words, *defaults]


def test_the_parts_of_a_note():
    assert read_note("[s] Until then. For example: 1, [2, x]") == Note("Until then.", "s", (1, [2, "x"]))
    assert read_note("Whether it is.") == Note("Whether it is.")


def test_every_key_is_explained_and_every_number_has_a_unit():
    assert [key for key, leaf in LEAVES.items() if leaf.note is None] == []
    inner = {"guard.limits.*.max", "guard.limits.*.min"}  # in the unit of the metric
    numbers = {key for key, leaf in LEAVES.items() if is_number(leaf) and leaf.default != ""}
    assert [key for key in numbers - inner - {"format"} if not LEAVES[key].note.unit] == []
    texts = [key for key, leaf in LEAVES.items() if not is_number(leaf) and leaf.note.unit]
    assert texts == []


def test_a_unit_agrees_with_that_in_the_name():
    suffixes = {"_s": "s", "_bytes": "bytes", "_tokens": "tokens", "_steps": "steps", "_tflops": "TFLOP/s"}
    for key, leaf in LEAVES.items():
        for suffix, unit in suffixes.items():
            if name_of(leaf).endswith(suffix) and key != "rollout.response_tokens":
                assert leaf.note.unit == unit, key


def test_a_text_is_a_sentence_that_fits_on_a_line_of_an_editor():
    for key, leaf in LEAVES.items():
        assert leaf.note.meaning[0].isupper() and leaf.note.meaning.endswith("."), key
        assert len(leaf.note.meaning) <= 100, key


@pytest.mark.parametrize("key", LEAVES)
def test_every_key_has_an_example_and_every_example_is_taken(key):
    leaf = LEAVES[key]
    values = examples_of(leaf)
    assert values
    siblings = {
        name_of(other): examples_of(other)[0]
        for other in LEAVES.values()
        if other.section is leaf.section and other.field.is_required()
    }
    if key in ("rollout.replicas.min", "rollout.replicas.max", "format"):
        siblings = {"min": 0, "max": 9} if key != "format" else GOOD
    if key == "guard.limits.*.over_steps":
        siblings = {"max": 1.0}  # of which limit, it does not say
    for value in values:
        if value is None and leaf.section.__name__ == "LimitSection":
            continue  # one of them must be set
        try:
            leaf.section.model_validate_json(json.dumps(siblings | {name_of(leaf): value}), strict=True)
        except ValidationError as error:
            pytest.fail(f"{key}: {value}: {error}")


def test_the_checked_in_schema_is_current(schema):
    text = (ROOT / "configs" / "schema.json").read_text(encoding="utf-8")
    assert json.loads(text) == schema, "run: python -m asyncrl.cli.schema > configs/schema.json"


def test_the_page_of_all_keys_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == render(), "run: python -m asyncrl.cli.schema --page > docs/configuration.md"
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert titles[-2:] == ["What a resume may change", "Older files"] and f"than {FORMAT} is refused" in page


def test_the_schema_describes_every_key_with_unit_default_and_examples(schema):
    jsonschema.Draft7Validator.check_schema(schema)
    parts = schema["definitions"]
    found = [spec for part in [schema, *parts.values()] for spec in part.get("properties", {}).values()]
    assert [spec for spec in found if not spec.get("description")] == []
    assert parts["LearnerSection"]["properties"]["lr"] == {
        "default": 1e-06,
        "exclusiveMinimum": 0,
        "maximum": 1,
        "type": "number",
        "description": "[1] Highest learning rate of the policy.",
        "x-unit": "1",
        "examples": [1e-06],
    }
    assert parts["BufferSection"]["properties"]["lease_s"]["x-unit"] == "s"


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_configuration_names_the_schema_and_obeys_it(schema, name):
    text = shipped()[name].read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.Draft7Validator(schema).validate(read_document(text, name).values)


@pytest.mark.parametrize(
    ("change", "is_right"),
    [
        ({}, True),
        ({"rollout": None}, True),
        ({"rollout": {"replicas": {"min": 1, "max": 4}}}, True),
        ({"rollout": {"replicas": 0, "environment": "tools"}}, True),
        ({"rollout": {"environment": {"name": "tools", "anything": [1]}}}, True),
        ({"data": {"train": ["a", {"path": "b", "weight": 2}]}}, True),
        ({"reward": {"fn": {"fn": "a", "argument": 1}}}, True),
        ({"metrics": {"sinks": ["wandb", {"mlflow": {"experiment": "x"}}]}}, True),
        ({"guard": {"limits": {"actor/grad_norm": {"max": 1}, "actor/entropy": None}}}, True),
        ({"model": None}, False),
        ({"learner": {"group_per_step": 1}}, False),
        ({"learner": {"lr": "fast"}}, False),
        ({"learner": {"lr": 0}}, False),
        ({"algorithm": {"clip": [0.1, "x"]}}, False),
        ({"algorithm": {"kl": {"coef": -1}}}, False),
        ({"rollout": {"engine": "tgi"}}, False),
        ({"metrics": {"sinks": ["wanb"]}}, False),
        ({"metrics": {"sinks": [{"wanb": {}}]}}, False),
        ({"guard": {"limits": {"actor/entropy": 3}}}, False),
        ({"unknown": {}}, False),
        ({"rollout": {"replicas": {"max": 4}}}, False),
        ({"metrics": {"sinks": {"wandb": {}}}}, True),
        ({"metrics": {"sinks": {"wandb": {}, "mlflow": {}}}}, False),
        ({"metrics": {"sinks": [{}]}}, False),
        ({"guard": {"limits": {"actor/entropy": {}}}}, False),
        ({"guard": {"limits": {"actor/entropy": {"max": 1, "min": 0}}}}, False),
        ({"guard": {"limits": {"actor/entropy": {"max": None, "min": 0}}}}, True),
    ],
)
def test_an_editor_sees_what_the_schema_can_tell_as_loading_does(schema, change, is_right, tmp_path):
    values = GOOD | change
    assert jsonschema.Draft7Validator(schema).is_valid(values) is is_right
    (tmp_path / "c.yaml").write_text(json.dumps(values))
    if is_right:
        load_config(tmp_path / "c.yaml")
        return
    with pytest.raises(ConfigError):
        load_config(tmp_path / "c.yaml")
