"""Forced response lengths."""

import statistics
from typing import Any

import pytest

from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.config.lengths import parse_lengths
from asyncrl.core.errors import ConfigError
from rollout_service.sampling.groups import GroupRunner, GroupSettings


def test_lengths_follow_the_named_distribution_and_the_seed() -> None:
    lengths = parse_lengths("lognormal:1.0:32")
    assert lengths is not None
    drawn = [lengths.draw_tokens(seed, 100_000) for seed in range(2000)]
    assert drawn == [lengths.draw_tokens(seed, 100_000) for seed in range(2000)]
    assert statistics.median(drawn) == pytest.approx(32, rel=0.1)
    assert statistics.mean(drawn) == pytest.approx(32 * 2.718**0.5, rel=0.1)


def test_a_length_is_at_least_one_and_at_most_the_limit() -> None:
    lengths = parse_lengths("lognormal:3.0:8")
    assert lengths is not None
    drawn = [lengths.draw_tokens(seed, 64) for seed in range(500)]
    assert (min(drawn), max(drawn)) == (1, 64)


def test_each_sample_is_asked_for_as_many_tokens_as_were_drawn_for_it() -> None:
    lengths = parse_lengths("lognormal:1.0:32")
    assert lengths is not None
    nobody: Any = None
    runner = GroupRunner(nobody, nobody, GroupSettings(7, 2, 1.0, 64, lengths))
    asked = [runner._sampling(LeaseGrant(1, 1, 0, 0, 0, 0, 1.0), sample) for sample in range(2)]
    assert [one.max_tokens for one in asked] == [lengths.draw_tokens(one.seed, 64) for one in asked]
    assert all(one.ignores_eos for one in asked)


@pytest.mark.parametrize(
    "text", ["uniform:1:2", "lognormal:1", "lognormal:x:3", "lognormal:1:0", "lognormal:-1:9"]
)
def test_another_form_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.response_tokens"):
        parse_lengths(text)
