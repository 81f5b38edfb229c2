"""The metrics of a step: exact definitions, and two ranks' equal to their rows together."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from asyncrl.core.experience import Group
from asyncrl.core.metrics import find, unknown_names
from learner.algorithms.centre import rows_of
from learner.algorithms.diagnostics import summary
from learner.backend import Models
from learner.batching.batch import build_batch
from learner.report import (
    Stopwatch,
    describe_baselines,
    describe_batch,
    describe_probabilities,
    describe_rewards,
    describe_targets,
    make_efficiency,
    measure_memory,
    merge_updates,
    reduce_over_ranks,
)
from tests.learner.parts.samples import make_groups, make_trajectory, save_model
from tests.learner.parts.training import open_backend, open_objective, take_step
from tests.oracle.corrections import compare_probabilities
from tests.oracle.measures import target_metrics

STEP_OF_VERSION = {1: 0, 2: 1, 3: 3}


class Alone:
    """One rank: what a backend is with `dp: 1`."""

    dp_size = 1

    def reduce(self, metrics, weight):
        raise AssertionError("one rank has nothing to reduce")


class Shares:
    """Data-parallel ranks in one process: reduces what all ranks hand in, by the backend's rule."""

    def __init__(self, shares):
        self.dp_size = len(shares)
        self._shares = shares  # of each rank: (metrics, weight of counted tokens)
        self._collected = []

    def run(self):
        """Return what every rank gets: one pass collects each rank's calls, the next answers them."""
        for rank, (metrics, weight) in enumerate(self._shares):
            self._calls, self._rank = 0, rank
            self._collected.append([])
            reduce_over_ranks(self, metrics, weight)
        self._rank = None
        self._calls = 0
        return reduce_over_ranks(self, *self._shares[0])

    def reduce(self, metrics, weight):
        if self._rank is not None:
            self._collected[self._rank].append((dict(metrics), weight))
            return dict(metrics)
        calls = [calls[self._calls] for calls in self._collected]
        self._calls += 1
        assert len({tuple(sorted(found)) for found, _ in calls}) == 1, "ranks must hand in the same names"
        return {name: self._combine(name, calls) for name in metrics}

    def _combine(self, name, calls):
        words = name.rpartition("/")[2].split("_")
        values = [found[name] for found, _ in calls]
        if "max" in words or "min" in words:
            return max(values) if "max" in words else min(values)
        total = sum(weight for _, weight in calls)
        shares = [weight / total if total else 1 / len(calls) for _, weight in calls]
        return sum(value * share if share else 0.0 for value, share in zip(values, shares, strict=True))


def with_targets(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise_N = torch.randn(batch.num_tokens, generator=generator)
    return dataclasses.replace(
        batch,
        advantages_N=noise_N,
        prox_N=batch.behaviour_N + 0.1 * noise_N,
        sum_pi_squared_N=noise_N.sigmoid(),
    )


def with_critic(batch):
    values_N, returns_N = batch.advantages_N.sin(), batch.advantages_N * 2 + 1
    return dataclasses.replace(batch, values_N=values_N, returns_N=returns_N)


def describe(groups):
    """Return what a rank that holds `groups` hands in; values depend on the group only."""
    batch = build_batch(groups, 4, STEP_OF_VERSION)
    metrics = describe_batch(groups, batch, max_prompt_tokens=6) | describe_baselines(batch)
    # As if the objective had taken a tenth off the rewards of all groups but the silent one.
    kept = batch.select_groups(set(batch.tickets_G) - {99})
    metrics |= describe_rewards(batch, dataclasses.replace(kept, rewards_R=kept.rewards_R - 0.1))
    parts = [with_targets(build_batch([group], 4, STEP_OF_VERSION), group.ticket) for group in groups]
    names = ("advantages_N", "prox_N", "sum_pi_squared_N")
    columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    batch = with_critic(dataclasses.replace(batch, **columns))
    metrics |= describe_targets(batch) | describe_probabilities(batch, batch.loss_mask_N)
    metrics["actor/grad_norm"] = 1.5  # of the update, the same on every rank
    return metrics, float(batch.counted_N.sum())


def make_ragged():
    """Groups of unequal sizes, one of them without any answer."""
    groups = make_groups(5, group_size=3, seed=3, versions=(1, 2, 3))
    generator = np.random.default_rng(0)
    silent = tuple(make_trajectory(generator, 0, 131) for _ in range(2))
    first = dataclasses.replace(groups[0], trajectories=(*groups[0].trajectories, *silent))
    ragged = [first, *groups[1:], dataclasses.replace(groups[0], ticket=99, trajectories=silent)]
    return [dataclasses.replace(group, baseline_reward=float(group.ticket)) for group in ragged]


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_two_ranks_report_what_one_with_all_rows_does(cut):
    groups = make_ragged()
    metrics, weight = describe(groups)
    whole = reduce_over_ranks(Alone(), metrics, weight)
    both = Shares([describe(groups[:cut]), describe(groups[cut:])]).run()
    assert both.keys() == whole.keys()
    assert both == pytest.approx(whole, rel=1e-6)


def test_the_reduced_row_holds_registered_and_finite_values_only():
    metrics, weight = describe(make_ragged())
    row = reduce_over_ranks(Alone(), metrics, weight)
    assert unknown_names(row) == {}
    assert all(math.isfinite(value) for value in row.values())


def test_lengths_and_rewards_are_those_of_the_trajectories():
    groups = make_ragged()
    metrics, weight = describe(groups)
    row = reduce_over_ranks(Alone(), metrics, weight)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    lengths = np.array([trajectory.num_tokens for trajectory in trajectories])
    answered = [trajectory for trajectory in trajectories if trajectory.num_tokens]
    assert row["response_length/mean"] == pytest.approx(lengths.mean())
    assert row["response_length/min"] == 0
    assert row["response_length_non_aborted/min"] > 0
    assert row["response/aborted_ratio"] == pytest.approx(4 / 19)
    assert row["critic/score/mean"] == pytest.approx(np.mean([one.reward for one in answered]))
    assert row["critic/rewards/mean"] == pytest.approx(row["critic/score/mean"] - 0.1)
    prompts = [len(group.prompt_ids) for group in groups for _ in group.trajectories]
    assert row["prompt_length/mean"] == pytest.approx(np.mean(prompts))
    assert row["prompt_length/clip_ratio"] == pytest.approx(np.mean([n == 6 for n in prompts]))
    assert row["perf/total_num_tokens"] == sum(group.num_tokens for group in groups)
    rows = [len(group.prompt_ids) + one.num_tokens for group in groups for one in group.trajectories]
    assert row["perf/attention_pairs"] == sum(n * (n + 1) // 2 for n in rows)
    assert row["perf/computed_tokens"] == row["perf/total_num_tokens"]


def test_staleness_of_a_trajectory_runs_from_its_newest_to_its_oldest_token():
    groups = make_groups(1, group_size=1, max_tokens=2, seed=4, versions=(1,))
    one = make_trajectory(np.random.default_rng(0), 9, 131, versions=(1, 2, 3))
    groups = [dataclasses.replace(groups[0], trajectories=(one,))]
    metrics = describe_batch(groups, build_batch(groups, 4, STEP_OF_VERSION), 6)
    assert metrics["training/off_policy/trajectory_spans/max"] == 3
    assert metrics["training/off_policy/trajectory_staleness/mean"] == 4 - 3
    assert metrics["training/off_policy/trajectory_staleness_worst/mean"] == 4 - 0


def test_turns_count_the_prompt_and_every_run_of_sampled_or_observed_tokens():
    one = make_trajectory(np.random.default_rng(0), 6, 131)
    one = dataclasses.replace(one, loss_mask=np.array([1, 1, 0, 0, 1, 1], np.uint8))
    group = Group(ticket=1, attempt=0, prompt_ids=np.array([1, 2], np.int32), trajectories=(one,))
    assert describe_batch([group], build_batch([group], 4, STEP_OF_VERSION), 6)["num_turns/mean"] == 4


def test_targets_are_those_of_trained_tokens():
    batch = with_targets(build_batch(make_groups(versions=(1, 3)), 4, STEP_OF_VERSION)).mask_over_age(2)
    is_trained_N = batch.loss_mask_N > 0
    assert 0 < is_trained_N.sum() < (batch.counted_N > 0).sum()
    generator = torch.Generator().manual_seed(1)
    values_N, returns_N = (torch.randn(batch.num_tokens, generator=generator) for _ in range(2))
    batch = dataclasses.replace(batch, values_N=values_N, returns_N=returns_N)
    row = reduce_over_ranks(Alone(), describe_targets(batch) | {"actor/grad_norm": 1.5}, 1.0)
    values, returns = values_N[is_trained_N], returns_N[is_trained_N]
    assert row["critic/advantages/mean"] == pytest.approx(float(batch.advantages_N[is_trained_N].mean()))
    assert row["critic/values/max"] == pytest.approx(float(values.max()))
    explained = 1 - (returns - values).var() / (returns.var() + 1e-5)
    assert row["critic/vf_explained_var"] == pytest.approx(float(explained), rel=1e-5)


def test_probabilities_are_compared_as_verl_does():
    batch = with_targets(build_batch(make_groups(), 4, STEP_OF_VERSION))
    # A correction rejects half of them later: the sampler's error is that of all.
    rejected = batch.with_mask(batch.loss_mask_N * (torch.arange(batch.num_tokens) % 2))
    row = reduce_over_ranks(Alone(), describe_probabilities(rejected, batch.loss_mask_N), 1.0)
    is_trained_N = batch.loss_mask_N > 0
    trainer, sampler = (x_N[is_trained_N].exp() for x_N in (batch.prox_N, batch.behaviour_N))
    difference = (trainer - sampler).abs()
    assert row["training/rollout_probs_diff_valid"] == 1.0
    assert row["training/rollout_probs_diff_max"] == pytest.approx(float(difference.max()))
    assert row["training/rollout_probs_diff_std"] == pytest.approx(float(difference.std()), rel=1e-5)
    correlation = torch.corrcoef(torch.stack([trainer, sampler]))[0, 1]
    assert row["training/rollout_actor_probs_pearson_corr"] == pytest.approx(float(correlation), rel=1e-5)


def test_one_rank_reports_what_the_functions_that_the_oracle_checks_do():
    groups = make_ragged()
    batch = with_critic(with_targets(build_batch(groups, 4, STEP_OF_VERSION)))
    found = describe_batch(groups, batch, 6) | describe_targets(batch) | describe_rewards(batch, batch)
    found |= describe_probabilities(batch, batch.loss_mask_N) | {"actor/grad_norm": 1.5}
    row = reduce_over_ranks(Alone(), found, 1.0)
    rows = [(len(group.prompt_ids), one) for group in groups for one in group.trajectories]
    prompts_R = torch.tensor([num_prompt for num_prompt, _ in rows])
    lengths_R = torch.tensor([one.num_tokens for _, one in rows])
    is_cut_R = torch.tensor([one.finish_reason == "length" for _, one in rows])
    expected = summary.score_metrics(batch.rewards_R, batch.rewards_R, lengths_R)
    expected |= target_metrics(batch.advantages_N, batch.returns_N, batch.loss_mask_N, batch.values_N)
    expected |= summary.length_metrics(prompts_R, lengths_R, prompts_R == 6, is_cut_R)
    compared = compare_probabilities(batch.prox_N, batch.behaviour_N, batch.loss_mask_N)
    expected |= {f"training/{name}": value for name, value in compared.items()}
    policy = (batch.advantages_N, batch.prox_N, batch.sum_pi_squared_N)
    moments = summary.power_moments(*policy, batch.loss_mask_N, rows_of(batch), None)
    expected |= summary.signal_and_noise(moments, 1.5, batch.num_rows)
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-5), name


def test_a_step_that_trains_no_token_has_no_targets_and_no_error():
    batch = with_targets(build_batch(make_groups(), 4, STEP_OF_VERSION))
    batch = batch.with_mask(batch.loss_mask_N * 0)
    batch = dataclasses.replace(batch, sum_pi_squared_N=None)
    found = describe_targets(with_critic(batch)) | describe_probabilities(batch, batch.loss_mask_N)
    assert reduce_over_ranks(Alone(), found, 1.0) == {"training/rollout_probs_diff_valid": 0.0}


def test_a_loss_that_is_not_a_number_stays_in_the_row():
    row = reduce_over_ranks(Alone(), {"actor/pg_loss": math.nan, "critic/score/mean": math.nan}, 1.0)
    assert set(row) == {"actor/pg_loss"}


def test_updates_are_merged_by_the_rule_of_each_name():
    updates = [{"actor/lr": 1.0, "mine/ratio_max": 1.0}, {"actor/lr": 3.0, "mine/ratio_max": 5.0}]
    assert merge_updates(updates) == {"actor/lr": 2.0, "mine/ratio_max": 5.0}


def test_memory_is_registered_and_positive():
    found = measure_memory()
    assert unknown_names(found) == {}
    assert all(value > 0 for value in found.values())
    assert all(find(name).unit == "GiB" for name in found)


def test_every_name_of_a_real_step_is_registered(tmp_path):
    backend, watch = open_backend(save_model(tmp_path)), Stopwatch()
    groups = make_groups(4, versions=(1, 2))
    row = take_step(Models(backend), open_objective(), groups, watch) | measure_memory()
    stages = watch.read()
    efficiency = make_efficiency(tmp_path, num_devices=1, dtype="float32", peak_tflops=1.0)
    row |= efficiency.describe(row, stages, sum(group.num_tokens for group in groups))
    backend.close()
    assert unknown_names([*row, *stages]) == {}
    assert all(math.isfinite(value) for value in row.values())
    assert {"perf/mfu/actor", "perf/mfu/actor_infer", "global_seqlen/max", "critic/advantages/mean"} <= set(
        row
    )
    assert row["training/rollout_probs_diff_valid"] == 1.0
    assert len(row) > 80
