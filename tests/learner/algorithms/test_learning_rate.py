"""Warm-up, then constant or cosine: pure, in learner steps."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.config.tree import Config, LearnerSection
from learner.algorithms.learning_rate import schedule_lr

SECTIONS = st.builds(
    LearnerSection,
    lr_schedule=st.sampled_from(["constant", "cosine"]) | st.floats(0, 1).map("cosine:{}".format),
    warmup_steps=st.integers(0, 30),
    steps=st.integers(1, 60),
)
PEAKS = st.floats(1e-9, 1.0)


@given(SECTIONS, PEAKS)
def test_the_rate_rises_to_its_peak_and_never_rises_again(section, peak):
    rates = [schedule_lr(peak, step, section) for step in range(100)]
    rising, falling = rates[: section.warmup_steps + 1], rates[section.warmup_steps :]
    assert rising == sorted(rising)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(falling))
    assert max(rates) == pytest.approx(peak) and falling[0] == pytest.approx(peak)


@given(SECTIONS, PEAKS)
def test_every_step_of_the_run_moves_and_none_is_above_the_peak(section, peak):
    for step in range(section.steps):
        assert 0 < schedule_lr(peak, step, section) <= peak * (1 + 1e-12)


@given(SECTIONS, PEAKS, st.floats(0.01, 2), st.integers(0, 99))
def test_a_scaled_peak_scales_the_whole_course(section, peak, factor, step):
    assert schedule_lr(peak * factor, step, section) == pytest.approx(
        factor * schedule_lr(peak, step, section)
    )


@given(SECTIONS, st.integers(0, 40))
def test_after_the_run_the_rate_stays_at_its_minimum(section, beyond):
    step = max(section.steps, section.warmup_steps + 1) + beyond
    kind, _, written = section.lr_schedule.partition(":")
    ratio = float(written or 0) if kind == "cosine" else 1.0
    assert schedule_lr(1.0, step, section) == pytest.approx(ratio, abs=1e-12)


@given(SECTIONS, st.integers(0, 60))
def test_constant_is_what_a_cosine_with_a_minimum_of_one_is(section, step):
    constant = section.model_copy(update={"lr_schedule": "constant"})
    flat = section.model_copy(update={"lr_schedule": "cosine:1.0"})
    assert schedule_lr(1.0, step, constant) == pytest.approx(schedule_lr(1.0, step, flat))


def test_a_cosine_is_that_of_transformers_after_the_warm_up():
    import torch
    from transformers import get_cosine_schedule_with_warmup

    section = LearnerSection(lr=1e-3, lr_schedule="cosine", warmup_steps=5, steps=40)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    theirs = get_cosine_schedule_with_warmup(optimizer, 5, 40)
    for step in range(40):
        if step >= 5:
            assert schedule_lr(1e-3, step, section) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_a_cosine_ends_at_the_minimum_and_passes_the_middle_half_way():
    section = LearnerSection(lr_schedule="cosine:0.2", warmup_steps=10, steps=30)
    assert [schedule_lr(1.0, step, section) for step in (0, 9, 10, 20, 30)] == pytest.approx(
        [0.1, 1.0, 1.0, 0.6, 0.2]
    )
    assert math.isclose(schedule_lr(1.0, 29, section), 0.2 + 0.8 * (1 + math.cos(math.pi * 19 / 20)) / 2)


@pytest.mark.parametrize(
    "schedule", ["constant:0.1", "cosine:", "cosine:1.1", "cosine:-0.1", "cosine:nan", "linear"]
)
def test_a_minimum_that_no_schedule_reaches_is_an_error(schedule):
    required = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}
    with pytest.raises(ValueError, match=r"constant, cosine, or cosine:<ratio from 0 to 1>"):
        Config(**required, learner={"lr_schedule": schedule})
    assert Config(**required, learner={"lr_schedule": "cosine:0.1"}).learner.min_lr_ratio == 0.1
