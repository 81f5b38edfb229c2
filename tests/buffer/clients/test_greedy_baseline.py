"""Groups whose advantage compares with a greedy answer: what the buffer takes and what it drops."""

from __future__ import annotations

import dataclasses

import pytest

from asyncrl.buffer.composition import build
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import WireError
from asyncrl.core.experience import encode_group
from asyncrl.core.service import ServiceContext
from tests.buffer.parts import make_group, make_store

SECTIONS = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}


def open_store(tmp_path, advantage):
    """The store of a run with this advantage, its first ticket leased."""
    config = Config(
        **SECTIONS,
        algorithm={"advantage": advantage},
        rollout={"group_size": 2, "max_tokens": 16},
        buffer={"journal": "none"},
    )
    return lease(build(ServiceContext(config, "buffer.0", tmp_path, "test"))._store)


def lease(store: ExperienceStore):
    ledger = store.ledger
    ledger.describe_data(10, "digest")
    version = ledger.register_version(ledger.open("learner.0"), 0)
    (grant,) = ledger.lease("a", version, 1, 0.0)
    return store, grant


def push(store, grant, rewards, baseline):
    group = dataclasses.replace(
        make_group(grant.ticket, grant.attempt, rewards=rewards), baseline_reward=baseline
    )
    return store.push("a", grant.ticket, grant.attempt, encode_group(group))


def test_remax_refuses_a_group_without_a_greedy_answer_and_its_prompt_is_tried_again(tmp_path):
    store, grant = open_store(tmp_path, "remax")
    with pytest.raises(WireError, match="lacks the reward of a greedy answer"):
        push(store, grant, (0.0, 1.0), None)
    (again,) = store.ledger.lease("a", 1, 1, 0.0)
    assert (again.ticket, again.attempt) == (grant.ticket, grant.attempt + 1)
    assert push(store, again, (0.0, 1.0), 0.0) == "stored"


def test_other_advantages_take_groups_with_and_without(tmp_path):
    store, grant = open_store(tmp_path, "grpo")
    assert push(store, grant, (0.0, 1.0), None) == "stored"
    (second,) = store.ledger.lease("a", 1, 1, 0.0)
    assert push(store, second, (0.0, 1.0), 1.0) == "stored"


@pytest.mark.parametrize(("baseline", "verdict"), [(1.0, "dropped"), (0.0, "stored"), (None, "dropped")])
def test_a_group_of_equal_rewards_is_kept_if_the_greedy_answer_scored_otherwise(baseline, verdict):
    store, grant = lease(make_store())
    assert push(store, grant, (1.0, 1.0), baseline) == verdict
