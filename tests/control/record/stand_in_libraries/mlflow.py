"""A stand-in for the library `mlflow`: takes the same calls and remembers them. Nothing else."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

RUNS: dict[str, _Run] = {}
EXPERIMENTS: dict[str, str] = {}
NAME = re.compile(r"[/\w.\- ]+")


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


class _Run:
    def __init__(self, run_id: str, experiment: str, run_name: str, tags: dict[str, str]) -> None:
        self.info = types.SimpleNamespace(run_id=run_id)
        self.experiment, self.run_name, self.tags = experiment, run_name, tags
        self.rows: dict[int, dict[str, float]] = {}
        self.params: dict[str, str] = {}
        self.status = "RUNNING"
        self.num_finishes = 0


class MlflowClient:
    def __init__(self, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        self.tracking_uri = tracking_uri

    def get_experiment_by_name(self, name: str) -> Any:
        found = EXPERIMENTS.get(name)
        return None if found is None else types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        return EXPERIMENTS.setdefault(name, str(len(EXPERIMENTS)))

    def search_runs(
        self, experiment_ids: list[str], filter_string: str = "", max_results: int = 1000
    ) -> list[_Run]:
        tag, value = re.fullmatch(r"tags\.(\w+) = '(\w+)'", filter_string).groups()
        found = [run for run in RUNS.values() if run.tags.get(tag) == value]
        return [run for run in found if run.experiment in experiment_ids][:max_results]

    def create_run(
        self,
        experiment_id: str,
        start_time: int | None = None,
        tags: dict[str, str] | None = None,
        run_name: str | None = None,
    ) -> _Run:
        return RUNS.setdefault(
            str(len(RUNS)), _Run(str(len(RUNS)), experiment_id, run_name or "", tags or {})
        )

    def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
        RUNS[run_id].status = status or RUNS[run_id].status

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = (), tags: Any = ()
    ) -> None:
        assert len(params) <= 100
        assert len(metrics) <= 1000
        assert all(NAME.fullmatch(metric.key) for metric in metrics)
        run = RUNS[run_id]
        for param in params:
            assert len(param.value) <= 500
            assert run.params.setdefault(param.key, param.value) == param.value, "parameters do not change"
        for metric in metrics:
            assert metric.timestamp > 10**12, "milliseconds"
            run.rows.setdefault(metric.step, {})[metric.key] = metric.value

    def set_terminated(self, run_id: str, status: str | None = None, end_time: int | None = None) -> None:
        RUNS[run_id].status = status or "FINISHED"
        RUNS[run_id].num_finishes += 1


entities = types.ModuleType("mlflow.entities")
entities.Metric, entities.Param = Metric, Param
sys.modules["mlflow.entities"] = entities


def received() -> list[list[tuple[int, dict[str, float]]]]:
    found = []
    for run in RUNS.values():
        rows = run.rows.items()
        plain = [(step, {name.replace("_at_", "@"): v for name, v in row.items()}) for step, row in rows]
        found.append(plain)
    return found


def finishes() -> list[int]:
    return [run.num_finishes for run in RUNS.values()]
