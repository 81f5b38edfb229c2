"""Every sink keeps the same contract. Where a service is behind it, a stand-in of its library records."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl.control.record.rundir import RunDir
from asyncrl.control.record.sinks import services
from asyncrl.control.record.sinks.opening import check_sinks, label_of, open_sinks
from asyncrl.control.record.sinks.protocol import sink_kind
from asyncrl.control.record.sinks.tensorboard import TensorBoardSink, is_drawn
from asyncrl.control.rows.recorder import Recorder
from asyncrl.core.config.load import load_config
from asyncrl.core.config.sections.run import SinkSection
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import sink_names
from asyncrl.planner.plan.footprint.estimate import CHECKS
from configs import shipped
from tests.threads import RUNTIME

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
SERVICE_NAMES = sink_names()
NAMES = ["tensorboard", *SERVICE_NAMES]
NEW_SINK = """
from asyncrl.control.record.sinks.protocol import SinkKind

SINK = SinkKind(lambda label, arguments: None, package="paper_library", arguments=("size",))
"""
VALUES = {"actor/lr": 0.5, "val-core/held_out/acc/mean@4": 0.25}
Received = Callable[[], list[list[tuple[int, dict[str, float]]]]]


def make_config(*sinks: object, tensorboard: bool = False) -> Config:
    return Config(
        run={"name": "quick"},
        model={"path": "m"},
        data={"train": "t"},
        reward={"fn": "gsm8k"},
        buffer={"journal": "redis", "url": "redis://me:${REDIS_PASSWORD}@host:6379/0"},
        metrics={"tensorboard": tensorboard, "sinks": list(sinks)},
    )


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(HERE / "stand_in_libraries"))
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("SWANLAB_API_KEY", "hunter2")
    for name in SERVICE_NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in (*SERVICE_NAMES, "mlflow.entities"):
        sys.modules.pop(name, None)


def record(folder: Path, config: Config, steps: list[int]) -> None:
    """One life of a run: it records a row per step and ends."""
    boxes = open_sinks(config, RunDir(folder))
    recorder = Recorder(folder / "metrics.jsonl", RUNTIME, boxes)
    for step in steps:
        recorder.record({"training/global_step": step, **VALUES})
    recorder.close()
    assert [box.metrics()[f"metrics/sink_dropped/{box.name}"] for box in boxes] == [0.0] * len(boxes)


def received_of(name: str, folder: Path) -> list[list[tuple[int, dict[str, float]]]]:
    if name != "tensorboard":
        received: Received = importlib.import_module(name).received
        return received()
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {})[tag] = event.value
    return [sorted(rows.items())]


def config_with(name: str) -> Config:
    return make_config(tensorboard=True) if name == "tensorboard" else make_config(name)


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("name", NAMES)
def test_every_value_arrives_under_its_name_and_step(name: str, tmp_path: Path):
    record(tmp_path, config_with(name), [1, 2])
    (rows,) = received_of(name, tmp_path)
    assert [step for step, _ in rows] == [1, 2]
    for _, values in rows:
        assert values == values | VALUES
        assert values[f"metrics/sink_dropped/{name}"] == 0.0


def test_a_new_sink_is_one_file(tmp_path: Path):
    """`metrics.sinks` takes its name from the next start on, as `buffer.journal` that of a journal."""
    (tmp_path / "paper.py").write_text(NEW_SINK)
    services.__path__.append(str(tmp_path))
    try:
        assert sink_names() == ("mlflow", "paper", "swanlab", "trackio", "wandb")
        paper = SinkSection.model_construct(name="paper", arguments={"colour": "red"})
        metrics = make_config().metrics.model_copy(update={"sinks": (paper,)})
        missing, unknown = check_sinks(make_config().model_copy(update={"metrics": metrics}))
    finally:
        services.__path__.remove(str(tmp_path))
    assert "paper_library is not installed here" in missing
    assert unknown == "metrics.sinks: paper has no argument colour. It takes size"


def test_of_a_long_run_tensorboard_gets_some_steps_and_every_evaluation(tmp_path: Path):
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.open()
    for step in (9_999, 10_001, 10_002, 1_000_001, 1_000_064):
        sink.write({"actor/loss": 1.0}, step)
        sink.write({"val-core/gsm8k/acc/mean@1": 1.0}, step)
    sink.close()
    (rows,) = received_of("tensorboard", tmp_path)
    assert [step for step, values in rows if "actor/loss" in values] == [9_999, 10_002, 1_000_064]
    assert len(rows) == 5
    assert sum(map(is_drawn, range(1, 1_000_001))) < 50_000


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_of_a_step_that_has_passed_arrives_too(name: str, tmp_path: Path):
    record(tmp_path, config_with(name), [1, 3, 2])
    (rows,) = received_of(name, tmp_path)
    assert sorted(step for step, _ in rows) == [1, 2, 3]


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("name", SERVICE_NAMES)
def test_a_resumed_run_goes_on_in_the_same_place_and_another_run_has_its_own(name: str, tmp_path: Path):
    for folder, steps in (("a", [1, 2]), ("a", [3]), ("b", [1])):
        (tmp_path / folder).mkdir(exist_ok=True)
        record(tmp_path / folder, config_with(name), steps)
    found = received_of(name, tmp_path)
    assert [[step for step, _ in rows] for rows in found] == [[1, 2, 3], [1]]
    assert importlib.import_module(name).finishes() == [2, 1]


@pytest.mark.usefixtures("_stand_ins")
def test_the_arguments_of_the_configuration_reach_the_client_and_the_settings_go_along(tmp_path: Path):
    sinks = ({"wandb": {"project": "mine", "entity": "team"}}, {"mlflow": {"experiment": "mine"}})
    record(tmp_path, make_config(*sinks), [1])
    (run,) = importlib.import_module("wandb").RUNS.values()
    assert run.settings["project"] == "mine"
    assert run.settings["entity"] == "team"
    assert run.settings["config"]["run"]["name"] == "quick"
    assert run.settings["dir"] == str(tmp_path)
    mlflow = importlib.import_module("mlflow")
    assert list(mlflow.EXPERIMENTS) == ["mine"]
    (logged,) = mlflow.RUNS.values()
    assert logged.params["run.name"] == "quick"


def test_no_secret_of_the_environment_goes_along_with_the_settings(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
    label = label_of(make_config("wandb"), RunDir(tmp_path))
    assert label.settings["buffer"]["url"] == "redis://me:${REDIS_PASSWORD}@host:6379/0"
    assert "hunter2" not in str(label)


def test_a_service_whose_package_is_missing_is_refused_before_anything_starts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "stand_in" not in path])
    for name in SERVICE_NAMES:
        if importlib.util.find_spec(name) is not None:
            continue  # installed here
        (problem,) = check_sinks(make_config(name))
        assert f"{name} is not installed" in problem
        assert f"/bin/pip install {name}, or remove" in problem
        assert check_sinks in CHECKS, "the plan says so too"
        with pytest.raises(ConfigError, match="not installed"):
            open_sinks(make_config(name), RunDir(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_stand_ins")
def test_an_argument_that_mlflow_lacks_and_a_sink_that_stands_there_twice_are_refused():
    found = list(check_sinks(make_config({"mlflow": {"project": "x"}}, "wandb", {"wandb": {"project": "x"}})))
    assert ["more than once" in found[0], "no argument project" in found[1]] == [True, True]
    assert list(check_sinks(make_config(*SERVICE_NAMES))) == []


@pytest.mark.usefixtures("_stand_ins")
def test_a_missing_key_costs_the_rows_of_that_sink_and_nothing_else(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    boxes = open_sinks(make_config("wandb", "trackio"), RunDir(tmp_path))
    recorder = Recorder(tmp_path / "metrics.jsonl", RUNTIME, boxes)
    recorder.record({"training/global_step": 1, **VALUES})
    recorder.close()
    assert [box.metrics()[f"metrics/sink_dropped/{box.name}"] for box in boxes] == [1.0, 0.0]
    assert len(received_of("trackio", tmp_path)) == 1


def test_every_service_is_an_extra_of_the_project_and_a_name_that_the_configuration_knows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in SERVICE_NAMES:
        assert project["optional-dependencies"][name] == [sink_kind(name).package]
    assert tuple(sink.name for sink in make_config(*SERVICE_NAMES).metrics.sinks) == SERVICE_NAMES


def test_no_shipped_configuration_needs_a_service():
    for path in shipped().values():
        assert load_config(str(path), []).metrics.sinks == (), path
