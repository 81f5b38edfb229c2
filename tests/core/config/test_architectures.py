"""Tensors of a model according to its config.json, against the models of the library."""

from __future__ import annotations

import pytest

from asyncrl.planner.named_models import tensor_shapes
from tests.rollout.engine.families import CONFIGS, PLAIN, WIDTHS, Form

FORMS = [
    Form(family, is_tied, 87, width)
    for family in CONFIGS
    for is_tied in (True, False)
    for width in (WIDTHS[:3] if family == "qwen2" else WIDTHS)
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_tensors_that_a_config_tells_of_are_those_of_the_model(form: Form) -> None:
    model = form.build(seed=1)
    there = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    told = dict(tensor_shapes(model.config.to_dict(), has_head=True))
    assert told.items() <= there.items()
    matrices = {name for name, shape in there.items() if len(shape) == 2}
    assert matrices - set(told) == ({"lm_head.weight"} if form.is_tied else set())


def test_a_model_that_is_not_supported_is_told_nothing_of() -> None:
    table = Form("qwen3", False, 87, PLAIN).build(seed=1).config.to_dict()
    assert not dict(tensor_shapes(table | {"model_type": "gemma"}, has_head=True))
    assert not dict(tensor_shapes({"model_type": "qwen3"}, has_head=True))
