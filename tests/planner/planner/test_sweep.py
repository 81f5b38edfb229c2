"""Recommendations of the planner, and their stated cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.cli.reports.prediction import Asked, print_comparison, read_rates
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.errors import ConfigError, DataError
from asyncrl.models.architectures import ModelSize
from asyncrl.planner.hardware import GPUS, assume_rates
from asyncrl.planner.rates import ASSUMED
from asyncrl.planner.sweep import Choice, recommend, sweep
from tests.planner.planner.runs import RATES, SETTINGS, make_config, make_setting, rows_of, run

SMALL = ("rollout.replicas=1", "learner.groups_per_step=2", "learner.minibatches=1", "rollout.group_size=2")
LENGTHLESS = json.dumps({"rates": RATES.as_values(), "lengths": {"sigma": 1.0}})
QWEN_8B = ModelSize(36, 4096, 32, 8, 128, 12288, 151936)


@pytest.fixture(scope="module")
def outcome():
    return run(make_setting()).outcome()


def choice(outcome, axis, value, tokens_per_s, **figures):
    figures = {"masked_share": 0.0, "noise": 0.0, **figures}
    changes = {"trained_per_s": tokens_per_s * (1 - figures["masked_share"]), **figures}
    names = {"max_lag": 4, "replicas": 2, "learner_share": 1.0} | {axis: value}
    if axis == "split":
        names = {"max_lag": 4, "replicas": value, "learner_share": 0.5}
    return Choice(
        axis, names["max_lag"], names["replicas"], names["learner_share"], replace(outcome, **changes)
    )


def test_the_lowest_bound_that_is_nearly_as_fast_is_recommended(outcome):
    speeds = {0: 100.0, 1: 180.0, 2: 196.0, 4: 200.0}
    choices = [choice(outcome, "max_lag", bound, speed) for bound, speed in speeds.items()]
    words = "\n".join(recommend(outcome, choices, make_setting("staleness.max_lag=4")))
    assert "max_lag 2: 196 trained tokens/s, 1.96 x the synchronous run" in words
    assert "A bound of 4 would give +2.0% trained tokens/s" in words


def test_masked_tokens_do_not_count_as_trained(outcome):
    choices = [
        choice(outcome, "max_lag", 1, 200.0, masked_share=0.5),
        choice(outcome, "max_lag", 4, 150.0),
    ]
    assert "max_lag 4: 150 trained" in "\n".join(recommend(outcome, choices, make_setting()))


def test_a_bound_beyond_what_is_known_to_be_safe_is_said_to_be(outcome):
    choices = [choice(outcome, "max_lag", bound, speed) for bound, speed in ((4, 100.0), (8, 200.0))]
    assert "beyond what is known to be safe" in "\n".join(recommend(outcome, choices, make_setting()))


def test_fewer_replicas_are_recommended_where_they_are_as_good(outcome):
    choices = [choice(outcome, "replicas", n, speed) for n, speed in ((1, 98.0), (2, 100.0), (4, 101.0))]
    assert "1 replicas instead of 2 would give -2.0% trained tokens/s" in "\n".join(
        recommend(outcome, choices, make_setting())
    )


def test_another_split_is_named_only_if_it_is_faster(outcome):
    base = replace(outcome, trained_per_s=100.0, noise=0.0)
    slow, fast = choice(outcome, "split", 3, 101.0), choice(outcome, "split", 3, 150.0)
    assert "Keep the split" in "\n".join(recommend(base, [slow], make_setting()))
    assert "3 replicas and a learner of 0.5 times the GPUs" in "\n".join(
        recommend(base, [fast], make_setting())
    )


@pytest.mark.long
def test_more_replicas_help_a_run_that_waits_for_generation():
    slow = replace(RATES, decode=tuple((n, rate / 4) for n, rate in RATES.decode))
    choices = sweep(make_setting("rollout.replicas=1"), slow, learner_units=1.0, steps=12)
    speeds = {one.replicas: one.outcome.tokens_per_s for one in choices if one.axis == "replicas"}
    assert speeds[2] > 1.5 * speeds[1]


@pytest.mark.parametrize("kind", sorted(GPUS))
def test_assumed_rates_say_so_and_more_requests_mean_more_tokens(kind):
    config = make_config("model.dtype=bfloat16", "rollout.gpus=1")
    rates = assume_rates(config, QWEN_8B, kind, 1000.0)
    assert ASSUMED in rates.source
    speeds = [rate for _, rate in rates.decode]
    assert speeds == sorted(speeds)
    assert 10 < speeds[0] < 1000  # one request of an 8 B model, in tokens/s


def test_an_unknown_gpu_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match="TPU") as caught:
        assume_rates(make_config(), QWEN_8B, "TPU", 1000.0)
    assert "H100" in caught.value.hint


@pytest.mark.long
def test_the_command_prints_prediction_choices_and_words(tmp_path):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"rates": RATES.as_values()}))
    settings = [part for one in (*SETTINGS, *SMALL) for part in ("--set", one)]
    done = CliRunner().invoke(
        app, ["plan", "quickstart", "--simulate", "--rates", str(file), "--json", *settings]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["prediction"]["residue"] == 0
    assert {one["axis"] for one in told["choices"]} >= {"max_lag", "replicas"}
    assert told["recommendation"]


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"rates": 1}', '{"rates": {"decode": 1}}', LENGTHLESS])
def test_a_file_of_something_else_is_no_file_of_rates(tmp_path, text):
    file = tmp_path / "rates.json"
    file.write_text(text)
    with pytest.raises(DataError, match="rates"):
        read_rates(str(file), make_config())


def record(tmp_path, rows):
    folder = tmp_path / "measured"
    folder.mkdir()
    config = make_config("staleness.max_lag=2", f"run.dir={tmp_path}", "run.name=measured")
    (folder / "resolved.yaml").write_text(dump_resolved(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_no_step_is_predicted_with_its_own_rates(tmp_path):
    record(tmp_path, rows_of(run(make_setting("staleness.max_lag=2"), steps=14)))
    with pytest.raises(ConfigError, match="9 steady steps are too few"):
        print_comparison(Asked((), (), None, str(tmp_path), True), "measured")


def test_a_run_is_compared_with_its_simulation(tmp_path):
    record(tmp_path, rows_of(run(make_setting("staleness.max_lag=2"), steps=60)))
    done = CliRunner().invoke(app, ["plan", "--compare", "measured", "--dir", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["predicted"]["step_s"] == pytest.approx(told["measured"]["step_s"], rel=0.15)
    assert told["predicted"]["lag_mean"] == pytest.approx(told["measured"]["lag_mean"], abs=0.5)
