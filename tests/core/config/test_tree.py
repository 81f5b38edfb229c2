import contextlib

import pytest
from pydantic import BaseModel, ValidationError

from asyncrl.core.config.tree import Config

REQUIRED = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}


def leaves(model):
    for field in model.model_fields.values():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from leaves(annotation)
        else:
            yield field


def test_the_tree_stays_small_enough_to_know_by_heart():
    assert sum(1 for _ in leaves(Config)) <= 150


def test_a_tree_made_in_code_is_checked_for_conflicts_too():
    with pytest.raises(ValidationError, match="must be a multiple"):
        Config(**REQUIRED, learner={"groups_per_step": 16, "minibatches": 3})


def test_groups_of_one_are_not_dropped_for_equal_rewards_as_every_one_would_be():
    one = REQUIRED | {"rollout": {"group_size": 1}}
    with pytest.raises(ValidationError, match="drops every group"):
        Config(**one)
    Config(**one, algorithm={"drop_constant_groups": False})


def test_a_configuration_cannot_be_changed():
    config = Config(**REQUIRED)
    with pytest.raises(ValidationError, match="frozen"):
        config.learner.lr = 1.0


@pytest.mark.parametrize(
    ("checkpoint", "evaluation", "is_right"),
    [
        ({"keep_best": 1}, {"every_steps": 5}, True),
        ({"keep_best": 1}, {"every_steps": 6}, False),
        ({"keep_best": 1}, {"every_steps": 0}, False),
        ({"keep_best": 1, "best_metric": "critic/rewards/mean"}, {"every_steps": 0}, True),
        ({"keep_best": 0}, {"every_steps": 6}, True),
    ],
)
def test_checkpoints_kept_by_accuracy_must_each_be_evaluated(checkpoint, evaluation, is_right):
    data = REQUIRED["data"] | {"eval": "e"}
    sections = REQUIRED | {"data": data, "checkpoint": {"every_steps": 10} | checkpoint, "eval": evaluation}
    expected = contextlib.nullcontext() if is_right else pytest.raises(ValidationError, match="by accuracy")
    with expected:
        Config(**sections)


def test_the_metric_that_checkpoints_are_kept_by_must_exist():
    for name in ("accuracy", "actor/entropy", "val-core/gsm8k/acc/mean@1"):
        assert Config(**REQUIRED, checkpoint={"best_metric": name}).checkpoint.best_metric == name
    with pytest.raises(ValidationError, match=r"did you mean critic/rewards/mean"):
        Config(**REQUIRED, checkpoint={"best_metric": "critic/reward/mean"})


@pytest.mark.parametrize(
    ("overlong", "said"),
    [
        ({"buffer_tokens": 17}, "leaves no answer unpunished"),
        ({"penalty": 2.0}, "Field required"),
        ({"buffer_tokens": 0}, "greater than or equal to 1"),
        ({"buffer_tokens": 8, "penalty": 0.0}, "greater than 0"),
        ({"buffer_tokens": 15, "penalty": 2.0}, ""),
    ],
)
def test_the_overlong_buffer_lies_below_the_limit_of_an_answer(overlong, said):
    sections = REQUIRED | {"reward": {"fn": "f", "overlong": overlong}, "rollout": {"max_tokens": 16}}
    expected = pytest.raises(ValidationError, match=said) if said else contextlib.nullcontext()
    with expected:
        Config(**sections)
