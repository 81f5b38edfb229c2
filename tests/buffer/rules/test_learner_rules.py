"""Rules of what is due after a learner's step."""

from __future__ import annotations

from asyncrl.buffer.rules.learner import (
    Publishing,
    is_checkpoint_due,
    is_evaluation_due,
    kept_checkpoints,
    must_resume,
)


def test_an_evaluation_is_due_once_for_every_interval_and_for_the_last_step():
    assert not is_evaluation_due(5, 4, every=0, last_step=5)
    assert is_evaluation_due(0, -1, every=5), "the weights of the start"
    assert is_evaluation_due(7, 4, every=5), "those of step 5 were not published"
    assert not is_evaluation_due(7, 5, every=5)
    assert is_evaluation_due(7, 5, every=5, last_step=7)


def test_weights_are_due_until_they_are_taken_and_again_once_they_are_lost():
    publishing = Publishing(eval_every=0)
    publishing.stand_at(4)
    assert publishing.is_due(4)
    publishing.take(4)
    assert not publishing.is_due(4) and publishing.is_due(5)
    publishing.lose()
    assert publishing.is_due(4)
    publishing.take(5)
    publishing.stand_at(5)
    assert publishing.is_due(5), "of another branch, under another number"


def test_published_weights_are_evaluated_where_an_evaluation_fell_due_since_the_last_ones():
    publishing = Publishing(eval_every=5, last_step=12)
    publishing.stand_at(0)
    assert [step for step in (0, 3, 6, 7, 11, 12) if publishing.take(step)] == [0, 6, 11, 12]
    publishing.stand_at(6)
    assert not publishing.take(6), "a restart asks for none again"


def test_a_learner_resumes_unless_nothing_was_trained():
    found = [must_resume(steps, has_checkpoint=has) for steps in (0, 3) for has in (False, True)]
    assert found == [False, True, True, True]


def test_the_newest_checkpoints_stay_and_none_of_an_abandoned_branch():
    assert kept_checkpoints(8, [6, 2, 4, 10], keep=3) == [4, 6, 8]
    assert kept_checkpoints(8, [], keep=3) == [8]
    assert [step for step in range(1, 9) if is_checkpoint_due(step, 4)] == [4, 8]
