"""Caveats of a simulation: each omission is named by its key, and no simulated setting is named."""

from __future__ import annotations

import json

import pyarrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.cli.reports.prediction import read_rates
from asyncrl.planner.caveats import find_caveats
from asyncrl.planner.rates import ASSUMED, Rates
from asyncrl.planner.setting import Setting
from tests.planner.planner.runs import SETTINGS, make_config

ON_GPUS = ("rollout.gpus=1", "learner.gpus=1", "checkpoint.every_steps=20", "rollout.kv_cache=keep")
FULL = Rates(part_s=0.1, checkpoint_s=1.0, source="a run")
GUESS = Rates(part_s=0.1, checkpoint_s=1.0, source=f"H100, {ASSUMED}")
PRICED = Rates(part_s=0.1, checkpoint_s=1.0, prefill_s_per_token=1e-3, source=f"H100, {ASSUMED}")
BARE = Rates(source="a run")
IN_PARTS = ("learner.stream=true", "learner.minibatches=1")
UNFORCED = "rollout.response_tokens=null"


def caveats(*settings: str, rates: Rates = FULL) -> list[str]:
    config = make_config(*ON_GPUS, *settings)
    return list(find_caveats(config, Setting.of(config), rates, most_steps=100))


@pytest.mark.parametrize(
    "settings",
    [(), IN_PARTS, ("eval.every_steps=20", UNFORCED), ("rollout.standby=1",)],
)
def test_nothing_is_said_of_what_is_simulated(settings):
    assert caveats(*settings) == []


@pytest.mark.parametrize(
    ("settings", "rates", "told"),
    [
        (
            ("rollout.environment=tools", "rollout.response_tokens=null"),
            FULL,
            "rollout.environment tools: turns and tools",
        ),
        (("rollout.gateway={port: 8100}", UNFORCED), FULL, "rollout.gateway: agents"),
        (("reward.fn=rewards.py:score",), FULL, "reward.fn rewards.py:score: the time to score"),
        (("reward.fn=https://judge.example/v1",), FULL, "reward.fn https://judge.example/v1: the time"),
        (("reward.fn=math_verify",), FULL, "reward.fn math_verify: the time to score"),
        (("rollout.replicas={min: 1, max: 4}",), FULL, "rollout.replicas {min: 1, max: 4}: what the autosc"),
        (("rollout.replicas=40",), FULL, "rollout.replicas 40: a receiver for each; 2 of them share one"),
        (("rollout.gpus=0",), FULL, "rollout.gpus 0: cores that learner and engines share"),
        (("learner.gpus=0",), FULL, "learner.gpus 0: cores that learner and engines share"),
        (("learner.gpus=0.5", "rollout.gpus=0.5"), FULL, "learner.gpus 0.5, rollout.gpus 0.5: GPU time"),
        (
            ("weight_sync.folder=memory://x", "weight_sync.backend=auto"),
            FULL,
            "weight_sync.folder: each replica's own pace",
        ),
        (("algorithm.drop_constant_groups=true",), FULL, "algorithm.drop_constant_groups: groups dropped"),
        (("rollout.kv_cache=recompute",), GUESS, "rollout.kv_cache recompute: KV cache of"),
        (("rollout.engine=vllm",), PRICED, "rollout.prefix_caching: each of 4 answers computes its prompt"),
        (("algorithm.advantage=gae",), GUESS, "algorithm.advantage gae: the critic's seconds"),
        (IN_PARTS, BARE, "learner.stream: what a part costs"),
        ((), BARE, "checkpoint.every_steps 20: its stall; these rates do not tell it"),
        (("checkpoint.every_steps=500",), FULL, "checkpoint.every_steps 500: it comes less often"),
        (("eval.every_steps=20",), FULL, "rollout.response_tokens: how long answers of an evaluation are"),
        (("eval.every_steps=500",), FULL, "eval.every_steps 500: it comes less often than once in the 100"),
    ],
)
def test_what_is_not_simulated_is_named_by_its_key(settings, rates, told):
    found = caveats(*settings, rates=rates)
    assert any(line.startswith(told) for line in found), found


def test_the_recomputation_of_running_answers_has_its_price():
    """128 answers, of a prompt of 100 tokens and half of the median of 50."""
    lengths = ("rollout.response_tokens=lognormal:1.0:50", "data.max_prompt_tokens=200")
    told = caveats("rollout.kv_cache=recompute", "rollout.max_sequences=128", *lengths, rates=PRICED)
    assert any("at each swap: 16,000 tokens, 16 s, when half done" in line for line in told), told
    assert any(
        line.endswith("recompute at each swap") for line in caveats("rollout.kv_cache=recompute", rates=GUESS)
    )


def test_the_plan_prints_what_it_leaves_out(tmp_path):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"rates": FULL.as_values()}))
    values = ("rollout.replicas=65", "rollout.environment=tools", UNFORCED)
    often = ("learner.stream=true", "learner.minibatches=1", "eval.every_steps=4", "checkpoint.every_steps=4")
    settings = [*SETTINGS, *values, *often]
    given = [part for one in settings for part in ("--set", one)]
    done = CliRunner().invoke(app, ["plan", "quickstart", "--simulate", "--rates", str(file), *given])
    assert done.exit_code == 0, done.output
    tail = done.stdout[done.stdout.index("not modelled:") :]
    assert "\n  rollout.environment tools: turns and tools" in tail
    rows = {line.split("  ")[0] for line in done.stdout.splitlines()}
    assert {"streaming", "checkpoints", "evaluations"} <= rows


@pytest.mark.parametrize("name", ["zero_variance_share", "uniform_share"])
def test_an_evaluation_has_the_prompts_of_its_file(tmp_path, name):
    """`uniform_share` is what an older asyncrl wrote."""
    rates, held_out = tmp_path / "rates.json", tmp_path / "held_out.parquet"
    rates.write_text(json.dumps({"rates": FULL.as_values(), name: 0.25}))
    parquet.write_table(pyarrow.table({"prompt": ["a"] * 30}), held_out)
    several = f"data.eval=[{held_out}, {tmp_path}/absent.parquet]"
    for most, expected in ((512, 30 + 512), (10, 10 + 10)):
        config = make_config(several, f"eval.prompts={most}", "eval.every_steps=5")
        _, setting = read_rates(str(rates), config)
        assert (setting.eval_prompts, setting.zero_variance_share) == (expected, 0.25)
