"""Keys that have several forms: each is read, refused with a reason, and written back as it was."""

import pytest
from pydantic import ValidationError

from asyncrl.core.config.load import dump_resolved, load_config
from asyncrl.core.config.reading.problems import ConfigProblems
from asyncrl.core.config.tree import GuardSection, MetricsSection, ReplicasSection, RolloutSection

GOOD = "model: {path: m}\ndata: {train: t}\nreward: {fn: f}\n"


@pytest.fixture
def read(tmp_path):
    def read_text(text, *overrides):
        (tmp_path / "a.yaml").write_text(GOOD + text)
        return load_config(tmp_path / "a.yaml", overrides)

    return read_text


def problem_of(read, text, *overrides):
    with pytest.raises(ConfigProblems) as caught:
        read(text, *overrides)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("text", "lowest", "highest", "written"),
    [
        ("3", 3, 3, "replicas: 3\n"),
        ("0", 0, 0, "replicas: 0\n"),
        ("{min: 1, max: 8}", 1, 8, "replicas:\n    min: 1\n    max: 8\n"),
        ("{min: 2, max: 2}", 2, 2, "replicas: 2\n"),
    ],
)
def test_replicas_are_a_number_or_bounds(read, tmp_path, text, lowest, highest, written):
    config = read(f"rollout: {{replicas: {text}}}\n")
    found = config.rollout.replicas
    assert (found.start, found.min, found.max, found.is_elastic) == (
        lowest, lowest, highest, lowest < highest,
    )  # fmt: skip
    assert written in dump_resolved(config)
    (tmp_path / "b.yaml").write_text(dump_resolved(config))
    assert load_config(tmp_path / "b.yaml") == config


@pytest.mark.parametrize(
    "text", ["-1", "x", "true", "1.5", "{min: 3}", "{min: 3, max: 1}", "{min: 1, max: 2, mx: 3}", "[1, 2]"]
)
def test_replicas_that_are_no_number_and_no_bounds_are_refused_where_they_stand(read, text):
    problem = problem_of(read, f"rollout: {{replicas: {text}}}\n")
    assert "a.yaml:4:" in problem.where and problem.key.startswith("rollout.replicas")


def test_a_fixed_number_made_in_code_equals_one_that_was_read(read):
    assert read("rollout: {replicas: 2}\n").rollout.replicas == ReplicasSection.fixed(2)
    assert RolloutSection().replicas == ReplicasSection.fixed(1)


def test_sinks_are_names_or_names_with_arguments(read, tmp_path):
    config = read("metrics: {sinks: [wandb, {mlflow: {experiment: x}}]}\n")
    assert [(sink.name, sink.arguments) for sink in config.metrics.sinks] == [
        ("wandb", {}),
        ("mlflow", {"experiment": "x"}),
    ]
    (tmp_path / "b.yaml").write_text(dump_resolved(config))
    assert load_config(tmp_path / "b.yaml") == config
    assert read("metrics: {sinks: trackio}\n").metrics.sinks == MetricsSection(sinks="trackio").sinks


@pytest.mark.parametrize(
    ("sinks", "said"),
    [
        ("[wanb]", "must be one of 'mlflow', 'swanlab', 'trackio' or 'wandb'. Did you mean 'wandb'?"),
        ("[tensorboard]", "metrics.tensorboard: true"),
        ("[{wandb: {api_key: x}}]", "holds a secret"),
        ("[{wandb: {project: x}, mlflow: {}}]", "a list of names, or of {name: {argument: value}}"),
    ],
)
def test_sinks_that_are_none_or_hold_a_secret_are_refused(read, sinks, said):
    assert said in str(problem_of(read, f"metrics: {{sinks: {sinks}}}\n"))


def test_limits_that_are_given_stand_beside_the_usual_ones(read, tmp_path):
    config = read("guard: {limits: {actor/grad_norm: {max: 9.0}, actor/entropy: null}}\n")
    limits = config.guard.limits
    usual = GuardSection().limits
    assert limits["actor/grad_norm"].max == 9.0 and limits["actor/entropy"] is None
    assert {name: limit for name, limit in limits.items() if usual[name] == limit}.keys() == (
        usual.keys() - {"actor/grad_norm", "actor/entropy"}
    )
    (tmp_path / "b.yaml").write_text(dump_resolved(config))
    assert load_config(tmp_path / "b.yaml") == config


def test_one_limit_can_be_changed_by_an_option(read):
    limits = read("", "guard.limits.actor/grad_norm.max=5").guard.limits
    assert limits["actor/grad_norm"].max == 5.0 and limits["actor/entropy"].min_share == 0.05


def test_a_limit_of_no_metric_names_the_nearest_one(read):
    problem = problem_of(read, "guard: {limits: {actor/grad_nrm: {max: 9.0}}}\n")
    assert "Did you mean 'actor/grad_norm'?" in str(problem)


def test_a_section_made_in_code_is_checked_too():
    with pytest.raises(ValidationError, match="min <= max"):
        RolloutSection(replicas={"min": 3, "max": 1})
