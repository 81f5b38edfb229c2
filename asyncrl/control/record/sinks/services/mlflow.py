"""MLflow as a sink (`mlflow`), by its client: nothing of it is global to the process.

Where the server is, and its secrets, come from MLFLOW_TRACKING_URI and the variables beside it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from asyncrl.control.record.sinks.protocol import DEFAULT_PROJECT, RunLabel, SinkKind, load_library

ARGUMENTS = ("tracking_uri", "experiment", "run_name", "tags")
ID_TAG = "asyncrl_id"
MAX_PARAMS = 100
"""A server takes no more of them in one call; of metrics it takes 1000."""
MAX_PARAM_CHARACTERS = 500
"""Length that every version of a server takes."""


class MlflowSink:
    """Logs to one run of an experiment. `arguments`: see `ARGUMENTS`."""

    name = "mlflow"

    def __init__(self, label: RunLabel, arguments: Mapping[str, object]) -> None:
        self._label = label
        self._uri = arguments.get("tracking_uri")
        self._experiment = str(arguments.get("experiment", DEFAULT_PROJECT))
        self._run_name = str(arguments.get("run_name", label.name))
        tags = arguments.get("tags")
        self._tags = {**(tags if isinstance(tags, dict) else {}), ID_TAG: label.id}

    def open(self) -> None:
        self._library = load_library("mlflow")
        self._client = self._library.MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
        )
        known = self._client.search_runs(
            [experiment], filter_string=f"tags.{ID_TAG} = '{self._label.id}'", max_results=1
        )
        if known:
            self._run_id = known[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        run = self._client.create_run(experiment, run_name=self._run_name, tags=self._tags)
        self._run_id = run.info.run_id
        self._log_settings()

    def write(self, values: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        metric = self._library.entities.Metric
        metrics = [metric(plain_name(name), value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _log_settings(self) -> None:
        param = self._library.entities.Param
        params = [
            param(key, str(value)[:MAX_PARAM_CHARACTERS]) for key, value in leaves_of(self._label.settings)
        ]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MAX_PARAMS])


SINK = SinkKind(MlflowSink, package="mlflow", arguments=ARGUMENTS)


def plain_name(name: str) -> str:
    """Return a metric's name in the characters that MLflow allows.

    >>> plain_name("val-core/gsm8k/acc/mean@4")
    'val-core/gsm8k/acc/mean_at_4'
    """
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))


def leaves_of(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (section.key, value) of nested settings.

    >>> list(leaves_of({"run": {"name": "a"}}))
    [('run.name', 'a')]
    """
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
