"""Bounds on a replica's pushes, as the run's configuration implies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.buffer.bounds import GroupBounds
from asyncrl.buffer.composition import group_bounds
from asyncrl.buffer.journals.kinds.none import MemoryJournal
from asyncrl.buffer.ledger.tickets import State
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.config.load import load_config
from asyncrl.core.errors import WireError
from asyncrl.core.experience import Group, encode_group
from tests.buffer.ledger.parts.ledger_runs import SETTINGS
from tests.buffer.parts import GROUP_SIZE, make_group

CONFIGS = Path(__file__).parents[3] / "configs"
BOUNDS = GroupBounds(prompt_tokens=3, answer_tokens=5, turns=4, vocab_size=100)


def leased() -> tuple[ExperienceStore, int, int]:
    store = ExperienceStore(SETTINGS, MemoryJournal(), GROUP_SIZE, True, now=0.0, bounds=BOUNDS)
    store.ledger.describe_data(10, "d")
    store.ledger.register_version(store.ledger.open("learner"), 0)
    (grant,) = store.ledger.lease("a", 1, 1, 0.0)
    return store, grant.ticket, grant.attempt


def with_token(group: Group, token_id: int) -> Group:
    group.trajectories[1].response_ids[-1] = token_id
    return group


def with_turns(group: Group, num_turns: int) -> Group:
    first, last = group.trajectories
    return replace(group, trajectories=(first, replace(last, num_turns=num_turns)))


def with_prompt(group: Group, num_tokens: int) -> Group:
    return replace(group, prompt_ids=np.ones(num_tokens, np.int32))


BEYOND: dict[str, Callable[[int], Group]] = {
    "vocabulary of 100": lambda ticket: with_token(make_group(ticket), 100),
    "ids from -1": lambda ticket: with_token(make_group(ticket), -1),
    "prompt of 4 tokens": lambda ticket: with_prompt(make_group(ticket), 4),
    "prompt of 0 tokens": lambda ticket: with_prompt(make_group(ticket), 0),
    "answer of 6 tokens": lambda ticket: make_group(ticket, num_tokens=6),
    "5 turns": lambda ticket: with_turns(make_group(ticket), 5),
    f"{2**64 - 1} turns": lambda ticket: with_turns(make_group(ticket), 2**64 - 1),
    "never registered": lambda ticket: make_group(ticket, version=2),
    "bytes is over the limit": lambda ticket: make_group(ticket, num_tokens=SETTINGS.max_group_bytes),
}


@pytest.mark.parametrize("why", BEYOND)
@pytest.mark.parametrize("way", ["push", "store_partial"])
def test_a_group_beyond_a_bound_is_refused_to_its_sender_and_its_attempt_has_failed(
    why: str, way: str
) -> None:
    store, ticket, attempt = leased()
    with pytest.raises(WireError, match=why):
        getattr(store, way)("a", ticket, attempt, encode_group(BEYOND[why](ticket)))
    assert store.ledger.state.tickets[ticket].num_failures == 1
    assert store.counters["malformed"] == 1


def test_a_group_at_every_bound_is_stored() -> None:
    store, ticket, attempt = leased()
    group = with_turns(with_token(make_group(ticket), 99), 4)
    assert store.push("a", ticket, attempt, encode_group(group)) == "stored"
    assert store.ledger.state.tickets[ticket].state is State.STORED


@pytest.mark.parametrize("preset", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_what_a_run_lets_in_fits_its_microbatches(preset: str) -> None:
    config = load_config(CONFIGS / preset)
    bounds = group_bounds(config)
    assert bounds.prompt_tokens + bounds.answer_tokens <= config.learner.max_tokens_per_microbatch
    environment = config.rollout.environment
    assert bounds.turns == (environment.max_turns if environment else config.rollout.max_tokens)
