"""The table of metrics against real rows: every name that it holds is made by somebody."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.control.rows.metering import Meter, evaluation_row
from asyncrl.control.snapshot import Snapshot
from asyncrl.core.config.tree import KlSection
from asyncrl.core.metrics import METRICS, find, unknown_names
from asyncrl.core.metrics.run_names import FIRST_AFTER_START
from asyncrl.core.metrics.tallies import conclude
from asyncrl.core.status.service import FinishedEvaluation
from asyncrl.page.http.prometheus import prometheus_name, prometheus_text
from learner.backend import Models
from learner.megatron.backend import MegatronValueBackend
from learner.report import Stopwatch, make_efficiency
from rollout_service.evaluation.statistics import Judged, JudgedPrompt, tally_prompts
from tests.buffer.ledger.parts.ledger_runs import Run
from tests.learner.guard.guarded_run import Faults, running
from tests.learner.parts.samples import make_groups, route_groups, save_model
from tests.learner.parts.training import open_backend, open_objective, take_step, take_streamed_step
from tests.statuses import statuses_of
from tests.weight_sync.cluster import Cluster, running_cluster

GROUPS = [dataclasses.replace(group, baseline_reward=0.5) for group in make_groups(4, versions=(1, 2))]
IN_REWARD = KlSection(coef=0.05, where="reward", estimator="k1")
IN_LOSS = KlSection(coef=0.05, where="loss")
OBJECTIVES = {
    "ppo": {"advantage": "gae", "kl": IN_REWARD, "entropy_coeff": 0.01},
    "kl_loss": {"kl": IN_LOSS, "correction": "decoupled_token_icepop", "normalize_weights": True}
    | {"rejection": {"seq_mean_k1": "0.8_1.25"}},
    "optimal_baseline": {"advantage": "optimal_token_baseline"},
    "remax": {"advantage": "remax"},
}
ON_GPUS = {"perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def step_rows(model: Path) -> dict[str, dict[str, float]]:
    """One step of each objective, with all the models that it asks for."""
    rows = {}
    with contextlib.ExitStack() as stack:
        policy = stack.enter_context(contextlib.closing(open_backend(model)))
        critic = stack.enter_context(contextlib.closing(open_backend(model, None, MegatronValueBackend)))
        reference = stack.enter_context(contextlib.closing(open_backend(model, is_frozen=True)))
        efficiency = make_efficiency(model, num_devices=1, dtype="float32", peak_tflops=1.0)
        for name, changes in OBJECTIVES.items():
            objective, watch = open_objective(**changes), Stopwatch()
            models = Models(
                policy,
                critic if objective.needs_values else None,
                reference if objective.needs_reference else None,
            )
            row = take_step(models, objective, GROUPS, watch)
            stages = watch.read()
            num_tokens = sum(group.num_tokens for group in GROUPS)
            rows[name] = row | stages | efficiency.describe(row, stages, num_tokens)
        experts = open_backend(save_model(model.parent / "experts", "qwen3_moe"), router_z_loss=0.1)
        routed = stack.enter_context(contextlib.closing(experts))
        rows["experts"] = take_step(Models(routed), open_objective(), route_groups(GROUPS), Stopwatch())
        rows["streamed"] = take_streamed_step(Models(policy), open_objective(), GROUPS)
    return rows


@pytest.fixture(scope="module")
def run_rows(model: Path, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The rows of a whole run of the learner, from its first step on."""
    with running(model, cluster, tmp_path_factory.mktemp("run"), Faults(), {}, run={"record": True}) as run:
        run.go()
        return run.rows()


def watched_names() -> set[str]:
    """Return what the supervisor and an evaluation add."""
    status = {
        "tokens": 1,
        "busy_s": 1.0,
        "idle_s": 1.0,
        "scored": 1,
        "version": 2,
        "last_swap_s": 0.1,
        "probe_gap": 1e-6,
    }
    status |= {"idle_by_cause": {"lease": 1.0}}
    status |= {"reward_parts": {"gsm8k": [1, 1.0]}, "reward_errors": {"raised": 1}}
    status |= {"overridden": {"temperature": 1}, "reward_sources": {"gsm8k": {"wrong": 1}}}
    status |= {"cache": {"prompt_tokens": 2, "cached_tokens": 1, "preemptions": 1, "usage": 0.5}}
    status |= {"limit": {"places": 3, "bound": 4, "change": "cut"}, "counters": {"limit/cut": 1}}
    buffer = {"counters": {"placed/hit": 1}}
    syncing = {
        "weight_sync.0": {
            "counters": {"rounds_failed/digest": 1},
            "members": {"receiver.0": {"fenced": False}},
            "version": [2, 1],
            "num_bytes": 8,
            "last_round_s": 0.1,
        },
        "publisher.0": {"counters": {}},
    }
    sinks = {"metrics/sink_dropped/wandb", "metrics/sink_waiting/wandb"}
    meter = Meter()
    before = status | {"scored": 0, "reward_parts": {}, "cache": {}}
    meter.update(0.0, statuses_of({"rollout.0": before, "buffer.0": {}}))
    made = meter.update(1.0, statuses_of({"rollout.0": status, "buffer.0": buffer, **syncing}))
    judged = JudgedPrompt("source", (Judged(True, 1.0, "1", 3, False), None))
    measured = conclude(tally_prompts([judged], 2, {})) | refused_metrics()
    evaluation = FinishedEvaluation(1, 1, 1, measured)
    return {*made, *evaluation_row(evaluation), FIRST_AFTER_START, *sinks}


def refused_metrics() -> dict[str, float]:
    """What an evaluation has whose only part is refused."""
    run = Run()
    number = run.ledger.request_evaluation(run.token, 0)
    run.ledger.evaluations.give("a", run.version, None)
    run.ledger.evaluations.refuse(number, "a", run.version, 0)
    return run.state.evaluations[number].metrics


def test_every_registered_name_is_made_by_a_real_run(step_rows, run_rows):
    made = {name for row in [*step_rows.values(), *run_rows] for name in row} | watched_names()
    assert unknown_names(made) == {}
    registered = {found.name for name in made if (found := find(name)) is not None}
    expected = {metric.name for metric in METRICS} - (set() if torch.cuda.is_available() else ON_GPUS)
    assert expected - registered == set()


def test_prometheus_tells_every_metric_of_a_real_row(step_rows, run_rows):
    for row in [*step_rows.values(), *run_rows]:
        told = {
            (sample.name, sample.value)
            for family in text_string_to_metric_families(prometheus_text(Snapshot(run="r"), row))
            for sample in family.samples
        }
        metrics = {name: find(name) for name in row if "/" in name}
        assert all((prometheus_name(found.name), row[name]) in told for name, found in metrics.items())


def test_a_plain_run_always_has_what_needs_no_setting(run_rows):
    always = (
        "prompt_length/clip_ratio", "critic/score/mean", "critic/rewards/mean", "actor/loss",
        "perf/throughput", "timing_s/step", "timing_per_token_ms/adv", "weights/publish_s",
        "training/rollout_probs_diff_std", "global_seqlen/mean", "guard/lr_scale", "guard/out_of_memory",
    )  # fmt: skip
    for row in run_rows[1:]:
        assert set(always) <= set(row)


def test_rewards_are_those_after_the_kl_penalty_and_scores_those_before(model):
    with (
        contextlib.closing(open_backend(model)) as policy,
        contextlib.closing(
            open_backend(model, is_frozen=True, temperature=2.0)  # another distribution than the policy's
        ) as reference,
    ):
        row = take_step(Models(policy, None, reference), open_objective(kl=IN_REWARD), GROUPS)
    scores = [one.reward for group in GROUPS for one in group.trajectories]
    assert row["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))
    assert abs(row["actor/reward_kl_penalty"]) > 1e-2
    # Each token pays its own: about the mean penalty of a token times the tokens of a row.
    taken_off = row["critic/score/mean"] - row["critic/rewards/mean"]
    wanted = IN_REWARD.coef * row["actor/reward_kl_penalty"] * row["response_length/mean"]
    assert taken_off == pytest.approx(wanted, rel=0.5)
