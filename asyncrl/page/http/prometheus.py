"""The snapshot of a run in Prometheus' text format, and the answer to a health check.

Owns the names there: that of the registry behind `asyncrl_`, other characters than letters and digits as
`_`; a `<word>` stays as the word and its value becomes a label. Everything carries the label `run`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from asyncrl.control.snapshot import Health, Snapshot
from asyncrl.core.metrics import find, variables_of
from asyncrl.core.states import SERVICE_FAULTS, RunState, ServiceState

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "asyncrl_"
OK, UNAVAILABLE = 200, 503
NOT_UP = (*SERVICE_FAULTS, ServiceState.SILENT)


class _Sample(NamedTuple):
    labels: dict[str, str]
    value: float


def prometheus_text(snapshot: Snapshot, row: Mapping[str, object]) -> str:
    """Return the text that Prometheus scrapes.

    Args:
        snapshot: Of the supervisor; its `evaluation` is the newest row of one.
        row: The newest row of metrics.
    """
    from prometheus_client import generate_latest

    return generate_latest(_Collector(snapshot, row)).decode()


def health_answer(snapshot: Snapshot) -> tuple[int, dict[str, object]]:
    """Return the HTTP status and the body of `/health`: 200 while the run is well, else 503."""
    is_failed = snapshot.state == RunState.FAILED or bool(snapshot.error)  # or is being ended for it
    status = "failed" if is_failed else snapshot.health or Health.OK
    body: dict[str, object] = {"status": status}
    body |= {"run": snapshot.run, "state": snapshot.state, "step": snapshot.step, "error": snapshot.error}
    return OK if status == Health.OK else UNAVAILABLE, body


def prometheus_name(name: str) -> str:
    """Return the name under which a metric of the registry is scraped.

    >>> prometheus_name("timing_s/<stage>"), prometheus_name("val-core/<source>/<variable>/<metric>")
    ('asyncrl_timing_s_stage', 'asyncrl_val_core_source_variable_metric')
    """
    return PREFIX + re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


class _Collector:
    """A registry as `generate_latest` needs it; made for one answer."""

    def __init__(self, snapshot: Snapshot, row: Mapping[str, object]) -> None:
        self._snapshot = snapshot
        self._row = row
        self._run = snapshot.run

    def collect(self) -> Iterator[Family]:
        yield from self._of_metrics()
        yield from self._of_run()
        yield from self._of_services()
        yield from self._of_ledger()

    def _of_metrics(self) -> Iterator[Family]:
        found: dict[str, tuple[str, dict[tuple[str, ...], _Sample]]] = {}
        for name, value in {**self._snapshot.evaluation, **self._row}.items():
            if "/" not in name or not isinstance(value, int | float):
                continue
            metric = find(name)
            about = f"{metric.meaning} (unit: {metric.unit})" if metric else "Not in the table of metrics"
            family = prometheus_name(metric.name if metric else name)
            labels = variables_of(name)
            samples = found.setdefault(family, (about, {}))[1]
            samples.setdefault(tuple(labels.values()), _Sample(labels, float(value)))  # no series comes twice
        for family, (about, samples) in sorted(found.items()):
            yield self._family(family, about, list(samples.values()))

    def _of_run(self) -> Iterator[Family]:
        snapshot = self._snapshot
        state = str(snapshot.state or "")
        yield self._family("asyncrl_run_state", "1 for the state of the run", [_Sample({"state": state}, 1)])
        is_well = health_answer(snapshot)[0] == OK
        yield self._single("asyncrl_run_healthy", "1 unless the run is degraded or has failed", is_well)
        resumed = "The step that this start of the run went on from (unit: steps)"
        accuracy = "Share of held-out prompts answered right, newest evaluation (unit: share)"
        for name, value, about in (
            ("step", snapshot.step, "Learner steps done (unit: steps)"),
            ("steps", snapshot.steps, "Learner steps that the run shall take (unit: steps)"),
            ("resumed_step", snapshot.resumed_step, resumed),
            ("accuracy", snapshot.accuracy, accuracy),
        ):
            if value is not None:
                yield self._single(f"asyncrl_run_{name}", about, value)

    def _of_services(self) -> Iterator[Family]:
        services = self._snapshot.services
        states = {name: service.state for name, service in services.items()}
        up = [_Sample({"service": name}, state not in NOT_UP) for name, state in states.items()]
        yield self._family("asyncrl_service_up", "1 if the service answers and has not failed", up)
        held = [_Sample({"service": name, "state": state}, 1) for name, state in states.items()]
        yield self._family("asyncrl_service_state", "1 for the state of the service", held)
        versions = {name: service.number for name, service in services.items()}
        ages_s = {name: service.heartbeat_age_s for name, service in services.items()}
        restarts = {name: service.restarts for name, service in services.items()}
        values: tuple[tuple[str, Mapping[str, float | None], str], ...] = (
            ("version", versions, "Policy version that the service holds"),
            ("heartbeat_age_s", ages_s, "Since its last heartbeat (unit: s)"),
            ("restarts_total", restarts, "Times that it was started again (unit: count)"),
        )
        for name, told, about in values:
            samples = [_Sample({"service": one}, value) for one, value in told.items() if value is not None]
            if samples:
                yield self._family(f"asyncrl_service_{name}", about, samples)

    def _of_ledger(self) -> Iterator[Family]:
        ledger = self._snapshot.ledger
        if ledger is None:
            return
        for name, value, about in (
            ("issued", ledger.issued, "Tickets issued so far (unit: tickets)"),
            ("trained", ledger.trained, "Tickets trained so far (unit: tickets)"),
            ("prompts_drawn", ledger.prompts_drawn, "Prompts drawn so far (unit: prompts)"),
            ("given_up", ledger.given_up, "Prompts given up so far (unit: prompts)"),
            ("open", ledger.open, "Prompts under way (unit: prompts)"),
            ("residue", ledger.residue, "What the laws of the ledger leave unexplained (unit: tickets)"),
            (
                "stored_groups",
                ledger.stored_groups,
                "Complete groups that wait for the learner (unit: groups)",
            ),
        ):
            yield self._single(f"asyncrl_ledger_{name}", about, value)
        pending = msgspec.structs.asdict(ledger.pending)
        for name, label, counts, about in (
            ("dropped", "reason", ledger.dropped, "Tickets dropped so far (unit: tickets)"),
            ("pending", "state", pending, "Tickets that are neither trained nor dropped (unit: tickets)"),
        ):
            if samples := [_Sample({label: one}, count) for one, count in counts.items()]:
                yield self._family(f"asyncrl_ledger_{name}", about, samples)

    def _single(self, name: str, about: str, value: float) -> Family:
        return self._family(name, about, [_Sample({}, value)])

    def _family(self, name: str, about: str, samples: list[_Sample]) -> Family:
        from prometheus_client.core import Metric as Family

        is_counter = name.endswith("_total")
        made = Family(name.removesuffix("_total"), about, "counter" if is_counter else "gauge")
        for labels, value in samples:
            made.add_sample(name, {"run": self._run, **labels}, float(value))
        return made
