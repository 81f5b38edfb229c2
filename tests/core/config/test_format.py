"""The number of a configuration's form: older files are brought up to date, newer ones refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.core.config.load import dump_resolved, load, load_config, load_resolved
from asyncrl.core.config.reading.problems import ConfigProblems
from asyncrl.core.config.rules.format import FORMAT, OLDEST, STEPS
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError

STORED = Path(__file__).parent / "stored"
"""`resolved_1.yaml` was written by asyncrl when the form had no number."""
GOOD = "model: {path: m}\ndata: {train: t}\nreward: {fn: f}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems_of(text, **options):
    Path("a.yaml").write_text(text)
    with pytest.raises(ConfigProblems) as caught:
        load("a.yaml", **options)
    return [str(problem) for problem in caught.value.problems]


def test_the_number_grows_with_each_step_and_stands_in_what_is_written():
    assert OLDEST + len(STEPS) == FORMAT
    assert dump_resolved(config_in_code()).startswith(f"format: {FORMAT}\n")


def config_in_code():
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}})


def test_a_run_that_began_before_there_was_a_number_goes_on(folder):
    (folder / "resolved.yaml").write_text((STORED / "resolved_1.yaml").read_text())
    config = load_resolved(folder)
    limits = {name: limit.as_written() for name, limit in config.guard.limits.items() if limit is not None}
    assert limits == {
        "actor/ppo_kl": {"max": 0.05},
        "rollout_corr/kl": {"max": 0.05},
        "actor/grad_norm": {"max": 2.0},
        "critic/grad_norm": {"max": 2.0},
        "actor/pg_clipfrac": {"max": 0.3},
        "critic/vf_clipfrac": {"max": 0.05},
        "actor/entropy": {"min_share": 0.05},
        "rollout_corr/rollout_is_eff_sample_size": {"min": 0.2},
        "perf/throughput": {"min_share": 0.3},
        "actor/step_kl": {"max": 0.25, "over_steps": 9},  # of this version's, which the file does not name
        "actor/step_gain": {"min": -0.2, "over_steps": 9},
        "actor/unsampled_share": {"max": 0.0},
    }
    assert config.guard.action == "rollback" and config.rollout.replicas.start == 2


@pytest.mark.parametrize("name", ["resolved.yaml", "asked.yaml"])
def test_what_an_older_run_wrote_can_be_started_by_its_path(folder, name):
    (folder / name).write_text((STORED / "resolved_1.yaml").read_text())
    assert load_config(name).guard.limits["actor/ppo_kl"].max == 0.05
    (folder / name).write_text(GOOD + f"format: {FORMAT}\nguard: {{max_kl: 0.1}}\n")
    with pytest.raises(ConfigProblems, match="unknown key 'max_kl'"):
        load_config(name)


def test_a_file_that_names_an_older_form_is_brought_up_to_date(folder):
    Path("a.yaml").write_text(GOOD + "format: 1\nguard: {max_grad_norm: 9.0}\n")
    config = load_config("a.yaml")
    assert config.format == FORMAT
    assert config.guard.limits["critic/grad_norm"].max == 9.0


def test_a_file_that_names_no_form_is_of_the_newest_and_told_what_stands_for_an_older_key(folder):
    (problem,) = problems_of(GOOD + "guard: {max_grad_norm: 9.0}\n")
    assert problem.startswith("a.yaml:4:9: unknown key 'max_grad_norm' in 'guard'. Write limits: {actor/grad")


def test_a_problem_with_a_value_that_moved_names_the_line_that_was_written(folder):
    problems = problems_of(GOOD + "format: 1\nguard: {max_clipfrac: high}\n")
    assert problems == [
        "a.yaml:5:23: guard.limits.actor/pg_clipfrac.max is 'high', but must be a number",
    ]


@pytest.mark.parametrize(
    ("options", "thresholds", "wanted"),
    [
        ("seq_mean_k1", "0.8_1.25", {"seq_mean_k1": "0.8_1.25"}),
        ("token_k2, seq_max_k3", "2.0, 3.0", {"token_k2": "2.0", "seq_max_k3": "3.0"}),
        ("token_k2,token_k3", 0.5, {"token_k2": "0.5", "token_k3": "0.5"}),
        ("token_k2,token_k3,seq_max_k2", "1,2", dict.fromkeys(("token_k2", "token_k3", "seq_max_k2"), "1,2")),
        ("", "", {}),
    ],
)
def test_rejections_and_their_thresholds_of_older_files_become_a_map(folder, options, thresholds, wanted):
    text = f"format: 2\nalgorithm: {{rejection: '{options}', rejection_threshold: {thresholds!r}}}\n"
    Path("a.yaml").write_text(GOOD + text)
    assert load_config("a.yaml").algorithm.rejection == wanted


def test_a_rejection_as_older_files_have_it_is_told_what_stands_for_it(folder):
    found = problems_of(GOOD + "algorithm: {rejection: seq_mean_k1, rejection_threshold: 2.0}\n")
    hint = 'rejection: {seq_mean_k1: "0.8_1.25"}'
    wanted, gone = "must be a map of rejections and their bounds", "'rejection_threshold' in 'algorithm'"
    assert found == [
        f"a.yaml:4:24: algorithm.rejection is 'seq_mean_k1', but {wanted}. Write {hint}",
        f"a.yaml:4:37: unknown key {gone}. Write it behind its rejection: {hint}",
    ]


@pytest.mark.parametrize("rejection", ["", "rejection: {token_k2: 0.5}, "])
def test_a_threshold_of_an_older_file_without_its_rejection_is_refused(folder, rejection):
    (problem,) = problems_of(GOOD + f"format: 2\nalgorithm: {{{rejection}rejection_threshold: 2.0}}\n")
    assert "unknown key 'rejection_threshold'" in problem and "Write it behind its rejection" in problem


def test_older_and_newer_files_can_be_laid_over_each_other(folder):
    Path("a.yaml").write_text(GOOD + "guard: {limits: {actor/entropy: null}}\n")
    Path("b.yaml").write_text("format: 1\nguard: {max_clipfrac: 0.5}\n")
    for order in (["a.yaml", "b.yaml"], ["b.yaml", "a.yaml"]):
        limits = load_config(order).guard.limits
        assert limits["actor/entropy"] is None and limits["actor/pg_clipfrac"].max == 0.5


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (f"{FORMAT + 1}", "and this asyncrl reads up to 3: the file is of a newer one. Use the asyncrl that"),
        ("0", "but must be a whole number from 1 to 3. Leave it out for the newest"),
        ("x", "format is 'x', but must be a whole number from 1 to 3"),
        ("true", "format is True, but must be a whole number"),
    ],
)
def test_a_form_that_cannot_be_read_is_the_only_problem_of_its_file(folder, number, said):
    (problem,) = problems_of(GOOD + f"format: {number}\nnew_section: {{new: 1}}\n")
    assert problem.startswith("a.yaml:4:9: format is ") and said in problem


def test_a_run_of_a_newer_asyncrl_is_named_as_such(folder):
    (folder / "resolved.yaml").write_text(GOOD + f"format: {FORMAT + 1}\n")
    with pytest.raises(ConfigError, match=r"is of a newer asyncrl, whose resolved\.yaml this"):
        load_resolved(folder)
