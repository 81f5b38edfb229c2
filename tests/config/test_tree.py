import pytest
from pydantic import BaseModel, ValidationError

from asyncrl.config.tree import Config

REQUIRED = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}


def leaves(model):
    for field in model.model_fields.values():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from leaves(annotation)
        else:
            yield field


def test_the_tree_stays_small_enough_to_know_by_heart():
    assert sum(1 for _ in leaves(Config)) <= 120


def test_a_tree_made_in_code_is_checked_for_conflicts_too():
    with pytest.raises(ValidationError, match="must be a multiple"):
        Config(**REQUIRED, learner={"groups_per_step": 16, "minibatches": 3})


def test_a_configuration_cannot_be_changed():
    config = Config(**REQUIRED)
    with pytest.raises(ValidationError, match="frozen"):
        config.learner.lr = 1.0
