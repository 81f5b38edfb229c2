"""Episodes that were forked: several rows with one reward, each sampled token trained once."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from asyncrl.core.config.tree import AlgorithmSection
from asyncrl.core.experience import Group
from learner.algorithms.advantage import ADVANTAGES, AdvantageInput
from learner.algorithms.aggregation import MODES, aggregate
from learner.algorithms.objective import make_objective
from learner.algorithms.rows import Rows
from learner.batching.batch import PackedBatch, build_batch
from learner.batching.parts import join_batches
from tests.learner.parts.samples import make_groups

OF_GROUPS = (
    "dr_grpo", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "rloo", "rloo_vectorized",
    "reinforce_plus_plus_baseline",
)  # fmt: skip


def fork(group: Group, sample: int, *firsts: int) -> Group:
    """Return the group with the tokens of `sample` from each of `firsts` on in a row of their own."""
    whole = group.trajectories[sample]
    place, edges = np.arange(whole.num_tokens), [0, *firsts, whole.num_tokens]
    masks = [(place >= start) & (place < end) for start, end in itertools.pairwise(edges)]
    branches = [
        dataclasses.replace(whole, loss_mask=whole.loss_mask * mask.astype(np.uint8)) for mask in masks
    ]
    rows = (*group.trajectories[:sample], *branches, *group.trajectories[sample + 1 :])
    samples = (*range(sample), *[sample] * len(branches), *range(sample + 1, len(group.trajectories)))
    return dataclasses.replace(group, trajectories=rows, forked=samples)


def pack(groups: list[Group]) -> PackedBatch:
    return build_batch(groups, step=1, step_of_version={1: 0})


def of_loss(batch: PackedBatch) -> tuple[float, ...]:
    """Return the denominators of the loss; a mixture's routers see the rows of forks too."""
    return dataclasses.astuple(batch.totals)[:3]


def estimate(name: str, batch: PackedBatch) -> torch.Tensor:
    rows = Rows(batch.row_N, batch.num_rows)
    scores_R, mask_N = batch.rewards_R, batch.counted_N
    given = AdvantageInput(mask_N * 0, scores_R, mask_N, rows, batch.group_R, batch.episode_R)
    return ADVANTAGES[name](given).advantages_N[mask_N > 0]


@pytest.fixture
def groups() -> list[Group]:
    groups = make_groups(3, 4, seed=3, max_tokens=12)
    return [g for g in groups if min(t.loss_mask.sum() for t in g.trajectories) > 1] or groups


@pytest.mark.parametrize("name", OF_GROUPS)
def test_an_episode_counts_once_in_its_group_however_many_rows_it_has(name: str, groups: list[Group]) -> None:
    forked = [fork(groups[0], 1, 2), *groups[1:]]
    whole, cut = pack(groups), pack(forked)
    assert cut.num_rows == whole.num_rows + 1
    torch.testing.assert_close(estimate(name, cut), estimate(name, whole), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_the_reward_of_an_episode_is_that_of_each_of_its_trajectories(
    num_rows: int, groups: list[Group]
) -> None:
    sampled = np.flatnonzero(groups[0].trajectories[1].loss_mask)
    assert len(sampled) >= num_rows, "each has a token"
    episode = fork(groups[0], 1, *map(int, sampled[1:num_rows]))
    rewards = groups[0].rewards
    assert episode.rewards == [rewards[0], *[rewards[1]] * num_rows, *rewards[2:]]
    whole, cut = pack(groups), pack([episode, *groups[1:]])
    assert cut.num_rows == whole.num_rows + num_rows - 1
    assert of_loss(cut) == of_loss(whole)
    torch.testing.assert_close(estimate("grpo", cut), estimate("grpo", whole), rtol=0, atol=1e-6)
    for mode in MODES:
        assert loss_of(mode, cut) == pytest.approx(loss_of(mode, whole))


def test_the_kl_that_is_taken_off_a_reward_is_that_of_all_rows_of_its_episode(groups: list[Group]) -> None:
    kl = {"coef": 0.1, "where": "reward", "estimator": "k1"}
    objective = make_objective(AlgorithmSection(kl=kl), max_lag=3, max_response_tokens=24)
    scores = []
    for batch in (pack([fork(groups[0], 1, 2), *groups[1:]]), pack(groups)):
        batch = dataclasses.replace(batch, reference_N=batch.behaviour_N - batch.tokens_N / 131)
        prepared, _ = objective.prepare(batch, batch.behaviour_N)
        scores.append(prepared.rewards_R.tolist())
    assert scores[0][1] == scores[0][2] != 1.0
    assert [*scores[0][:2], *scores[0][3:]] == pytest.approx(scores[1])


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_batch_that_was_joined_of_parts_has_the_same_advantages(name: str, groups: list[Group]) -> None:
    forked = [fork(groups[0], 1, 2), fork(groups[1], 3, 2), *groups[2:]]
    joined = join_batches([pack(forked[:1]), pack(forked[1:])])
    assert torch.equal(estimate(name, joined), estimate(name, pack(forked)))


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_weighs_the_same_in_the_loss_however_many_rows_it_has(
    mode: str, groups: list[Group]
) -> None:
    batch = pack([fork(groups[0], 1, 2), *groups[1:]])
    whole = pack(groups)
    assert of_loss(batch) == of_loss(whole)
    assert loss_of(mode, batch) == pytest.approx(loss_of(mode, whole))


def test_a_loss_per_row_weighs_an_episodes_rows_by_their_tokens(groups: list[Group]) -> None:
    section = AlgorithmSection(loss="geo_mean", advantage="grpo_passk")
    objective = make_objective(section, max_lag=3, max_response_tokens=24)
    losses, best = [], int(np.argmax(groups[-1].rewards))
    for batch in (pack([*groups[:-1], fork(groups[-1], best, 2)]), pack(groups)):
        prepared, _ = objective.prepare(batch, batch.behaviour_N)
        loss, _ = objective.loss(batch.behaviour_N, batch.behaviour_N * 0, prepared)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1]) != 0, "on policy a row's loss is its mean advantage"


def loss_of(mode: str, batch: PackedBatch) -> float:
    """Return the loss of a batch whose tokens have made-up losses."""
    mask_N, rows = batch.counted_N, Rows(batch.row_N, batch.num_rows)
    loss_N = batch.behaviour_N.square() + batch.tokens_N / 131
    totals = {"num_tokens": batch.totals.num_tokens, "num_rows": batch.totals.num_rows}
    return float(aggregate(loss_N, mask_N, rows, mode, share_R=batch.share_R, **totals))


@pytest.mark.parametrize("mode", MODES)
def test_microbatches_with_an_episode_in_two_of_them_sum_to_the_whole(mode: str, groups: list[Group]) -> None:
    batch = pack([fork(groups[0], 1, 2), *groups[1:]])
    parts = batch.balance_microbatches(max(batch.row_lengths))
    assert len(parts) > 3
    assert sum(loss_of(mode, part) for part in parts) == pytest.approx(loss_of(mode, batch))


def test_episodes_stay_apart_where_batches_are_selected_and_joined(groups: list[Group]) -> None:
    batch = pack([fork(group, 1, 2) for group in groups])
    tickets = [group.ticket for group in groups]
    parts = [batch.select_groups([ticket]) for ticket in tickets[::-1]]
    joined = join_batches(parts)
    assert joined.totals == batch.totals
    num_rows = len(groups[0].trajectories) + 1
    sizes = torch.bincount(joined.episode_R).tolist()
    assert sizes == [1, 2, 1, 1] * len(groups) and joined.num_rows == num_rows * len(groups)
