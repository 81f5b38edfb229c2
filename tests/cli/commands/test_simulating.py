"""`plan --simulate` and `--compare`: what is refused, what is warned of, what hardware there is to split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.reports.prediction import Asked, count_learner_units, print_comparison, read_rates
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.config.load import dump_resolved, load_config
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError, DataError
from asyncrl.planner.rates import Rates
from asyncrl.planner.sweep import _variants
from benchmarks.calibration.calibrate import _values, of_run
from configs import shipped
from tests.cli.commands.calling import asyncrl
from tests.planner.planner.runs import RATES, make_config, make_setting, rows_of, run

SMALL = ("learner.groups_per_step=2", "rollout.group_size=2", "rollout.replicas=1", "eval.every_steps=0")
SETS = [word for one in (*SMALL, "learner.minibatches=1") for word in ("--set", one)]


def write_rates(path: Path, **more: Any) -> Path:
    path.write_text(json.dumps({"rates": RATES.as_values(), **more}))
    return path


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_models_size_is_known_before_it_is_fetched(name: str) -> None:
    config = load_config(shipped()[name])
    if config.model.path.startswith("builtin:"):
        return
    assert not Path(config.model.path).exists()
    rates, _ = read_rates("H100", config)
    pinned = config.model_copy(
        update={"model": config.model.model_copy(update={"path": f"{config.model.path}@main"})}
    )
    assert read_rates("H100", pinned)[0] == rates
    other = config.model_copy(update={"model": config.model.model_copy(update={"path": "some/other"})})
    with pytest.raises(ConfigError, match="the size of 'some/other' cannot be told"):
        read_rates("H100", other)


def with_gpus(learner: int, rollout: int) -> Config:
    """Return a configuration of one learner rank; what else a GPU asks for is left out."""
    config = make_config()
    return config.model_copy(
        update={
            "learner": config.learner.model_copy(update={"gpus": learner}),
            "rollout": config.rollout.model_copy(update={"gpus": rollout}),
        }
    )


BAD = [
    ({"lengths": {"sigma": "a", "median_tokens": 6}}, "sigma must be a number from 0 to 10, not 'a'"),
    ({"lengths": {"sigma": 1.0, "median_tokens": -6}}, "median_tokens must be a number of 0.01 or more"),
    ({"prompt_tokens": -10}, "prompt_tokens must be a number of 0 or more"),
    ({"zero_variance_share": 1.0}, "zero_variance_share must be a number from 0 to 0.99"),
    ({"lengths": 3}, "this is not a rates file"),
    ({"taken_with": 3}, "this is not a rates file"),
]


@pytest.mark.parametrize(("values", "told"), BAD)
def test_a_file_with_impossible_values_is_refused_by_the_name_of_the_value(
    tmp_path: Path, values: dict[str, Any], told: str
) -> None:
    file = write_rates(tmp_path / "rates.json", **values)
    done = asyncrl("plan", "quickstart", "--simulate", "--rates", file, *SETS)
    assert (done.code, done.out) == (2, "")
    assert told in done.err and str(file) in done.err and "asyncrl bench calibrate quickstart" in done.err


@pytest.mark.parametrize("line", ['{"a": 1}', "xx", "3", '{"training/global_step": null}'])
def test_a_line_that_is_no_row_is_named_with_its_place(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    config = make_config(f"run.dir={tmp_path}", "run.name=measured")
    (folder / "resolved.yaml").write_text(dump_resolved(config))
    row = json.dumps({"training/global_step": 1})
    (folder / "metrics.jsonl").write_text(f"{row}\n{line}\n{row}\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: this line is not a metrics row"):
        print_comparison(Asked((), (), None, str(tmp_path), True), "measured")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        of_run(RunDir(folder), [])


def test_what_would_be_left_unread_is_refused(tmp_path: Path) -> None:
    without = asyncrl("plan", "quickstart", "--rates", "H100")
    assert (without.code, without.out) == (2, "")
    assert "only --simulate and --compare take rates" in without.err
    both = asyncrl("plan", "quickstart", "--compare", "measured", "--dir", tmp_path)
    assert (both.code, both.out) == (2, "")
    assert "--compare RUN reads the run's own configuration" in both.err


def test_who_has_no_rates_is_told_how_to_measure_this_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = shipped()["quickstart"].read_text()
    file.write_text(text.replace('path: "builtin:digit_sort"', "path: /nowhere/at/all"))
    done = asyncrl("plan", file, "--simulate", "--set", "learner.lr=1e-5")
    assert done.code == 2
    assert f"asyncrl bench calibrate {file} --set learner.lr=1e-5 --out rates.json" in done.err


def test_rates_say_what_they_were_taken_with_and_another_plan_is_warned(tmp_path: Path) -> None:
    config = load_config(shipped()["quickstart"])
    taken = _values(Rates(), make_setting(), config)["taken_with"]
    assert taken == {"model.path": "builtin:digit_sort", "rollout.engine": "vllm", "rollout.group_size": 8}
    file = write_rates(tmp_path / "rates.json", taken_with=taken)
    done = asyncrl("plan", "quickstart", "--simulate", "--rates", file, *SETS)
    assert done.code == 0
    assert "taken with rollout.group_size 8, but 2 is planned" in done.err
    assert "model.path" not in done.err and "rollout.engine" not in done.err


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/tmp/runs/builtin/digit_sort", "builtin:digit_sort"),
        ("/hub/models--Qwen--Qwen3-8B/snapshots/abc", "Qwen/Qwen3-8B"),
        ("/models/mine", "/models/mine"),
    ],
)
def test_the_model_of_a_run_is_called_as_its_configuration_calls_it(path: str, name: str) -> None:
    from asyncrl.planner.calibration import taken_with

    config = make_config()
    found = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    assert taken_with(found)["model.path"] == name


def test_a_learner_of_one_gpu_is_a_quarter_of_a_replica_of_four() -> None:
    units = count_learner_units(with_gpus(learner=1, rollout=4))
    assert units == 0.25
    variants = _variants(make_setting("rollout.replicas=4"), units)
    assert {(other.replicas, share) for axis, other, share in variants if axis == "split"} == {
        (2, 9.0),
        (3, 5.0),
    }


@pytest.mark.parametrize("gpus", [(0, 0), (1, 0), (0, 1)])
def test_where_a_side_has_no_gpus_there_is_nothing_to_split(gpus: tuple[int, int]) -> None:
    units = count_learner_units(with_gpus(*gpus))
    assert units is None
    variants = _variants(make_setting("rollout.replicas=2"), units)
    assert {axis for axis, _, _ in variants} == {"max_lag", "replicas"}


@pytest.mark.long
def test_trained_tokens_are_the_same_in_the_first_lines_the_table_and_the_words(tmp_path: Path) -> None:
    file = write_rates(tmp_path / "rates.json", lengths={"sigma": 1.0, "median_tokens": 40})
    words = ("plan", "quickstart", "--simulate", "--rates", file, *SETS)
    more = ("--set", "staleness.max_lag=1", "--set", "rollout.max_tokens=256")
    found = json.loads(asyncrl(*words, *more, "--json").out)["prediction"]
    assert found["masked_share"] > 0.01
    trained = f"{found['trained_per_s']:.4g}"
    told = asyncrl(*words, *more).out
    assert f"{trained} trained tokens/s" in next(line for line in told.splitlines() if "throughput" in line)
    assert trained in next(line.split() for line in told.splitlines() if line.startswith("max_lag 1 "))
    assert found["trained_per_s"] < found["tokens_per_s"] * (1 - found["masked_share"]), "no prompts"


def test_trained_tokens_are_neither_masked_nor_prompts() -> None:
    simulation = run(make_setting("staleness.max_lag=1"))
    found = simulation.outcome()
    rows = rows_of(simulation)
    assert found.masked_share > 0.0
    trained = sum(row["staleness/trained_tokens"] for row in rows) / sum(row["timing_s/step"] for row in rows)
    assert found.trained_per_s == pytest.approx(trained, rel=0.05)
