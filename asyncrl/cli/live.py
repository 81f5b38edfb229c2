"""The live view: a snapshot of a run as one line of text or as a panel (pure).

Nothing here asks, waits or prints. A value that the snapshot lacks is shown as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.cli.bulletin import obstacle_text

Snapshot = Mapping[str, Any]

DASH = "-"
CLEARLY_MORE = 0.1
STATE_STYLES = {
    "running": "green",
    "finished": "green",
    "READY": "green",
    "training": "green",
    "failed": "bold red",
    "DEAD": "red",
    "RETIRED": "red",
    "gone": "red",
    "stopping": "yellow",
    "starting": "yellow",
}


def line_of(snapshot: Snapshot) -> str:
    """Return the snapshot as one line, without a step while there is none."""
    state = snapshot.get("state", DASH)
    phase = f" ({snapshot['phase']})" if snapshot.get("phase") else ""
    if not snapshot.get("metrics"):
        return f"{snapshot.get('run', 'run')}: {state}{phase}"
    fields = [
        f"step {_steps(snapshot)}",
        f"reward {_number(snapshot, 'critic/rewards/mean', '.3f')}",
        f"lag {_lag(snapshot)}",
        f"tokens/s {_rates(snapshot)}",
        f"idle {_idle(snapshot)}",
        f"{_number(snapshot, 'timing_s/step', '.2f')} s",
        waiting(snapshot),
    ]
    if snapshot.get("accuracy") is not None:
        fields.append(f"accuracy {snapshot['accuracy']:.3f}")
    if state != "running" or phase:
        fields.append(f"{state}{phase}")
    return "  ".join(filter(None, fields))


def resumed_line_of(snapshot: Snapshot) -> str:
    """Return where a resumed run goes on, empty while that and the ledger's account are not known."""
    residue = (snapshot.get("ledger") or {}).get("residue")
    if not snapshot.get("resumed_step") or residue is None:
        return ""
    return f"resumed at step {snapshot['resumed_step']}, residue {_plain(residue)}"


def panel_of(snapshot: Snapshot) -> RenderableType:
    """Return the snapshot as a panel: progress, rates, who waits for whom, services, ledger."""
    state = str(snapshot.get("state", DASH))
    style = STATE_STYLES.get(state, "") if state_of(snapshot) == state else "yellow"
    title = Text.assemble(str(snapshot.get("run", "run")), "  ", (state_of(snapshot), style))
    parts: list[RenderableType] = [_figures(snapshot)]
    if resumed := resumed_line_of(snapshot):
        parts.insert(0, Text(resumed, style="dim"))
    for one in reversed(snapshot.get("obstacles") or []):
        style = "bold red" if one.get("blocks") else "yellow"
        parts.insert(0, Text(f"{one.get('service')}: {obstacle_text(one)}", style=style))
    if snapshot.get("services"):
        parts += [Text(), _services(snapshot["services"])]
    if snapshot.get("error"):
        parts += [Text(), Text(str(snapshot["error"]), style="bold red")]
    return Panel(Group(*parts), title=title, title_align="left", expand=False)


def bottleneck(snapshot: Snapshot) -> str:
    """Return who sets the pace and why, in a sentence; empty if the snapshot does not say."""
    found = snapshot.get("bottleneck") or {}
    who, why, waits_for = (str(found.get(key) or "") for key in ("who", "why", "learner_waits_for"))
    sentence = f"{who}: {why}" if who else why
    return f"{sentence}; the learner waits for {waits_for}" if waits_for not in ("", who) else sentence


def row_of(snapshot: Snapshot) -> dict[str, str]:
    """Return the snapshot as a row of a table of several runs."""
    held = (snapshot.get("bottleneck") or {}).get("who")
    accuracy = snapshot.get("accuracy")
    return {
        "run": str(snapshot.get("run", DASH)),
        "state": state_of(snapshot),
        "step": _steps(snapshot),
        "reward": _number(snapshot, "critic/rewards/mean", ".3f"),
        "accuracy": DASH if accuracy is None else f"{accuracy:.3f}",
        "lag": _lag(snapshot),
        "tokens/s": _rates(snapshot),
        "idle": _idle(snapshot),
        "bottleneck": held or DASH,
    }


def state_of(snapshot: Snapshot) -> str:
    """Return the run's state, with what is unusual about it."""
    unusual = []
    if snapshot.get("paused"):
        unusual.append("paused")
    if snapshot.get("health", "ok") != "ok":
        unusual.append(str(snapshot["health"]))
    return ", ".join([str(snapshot.get("state", DASH)), *unusual])


def waiting(snapshot: Snapshot) -> str:
    """Return who waits for whom, in a sentence; empty while it is not known."""
    learner, replicas = (
        _metric(snapshot, "perf/learner_idle_share"),
        _metric(snapshot, "perf/rollout_idle_share"),
    )
    if learner is None or replicas is None:
        return ""
    if learner > replicas + CLEARLY_MORE:
        return "the learner waits for the replicas"
    if replicas > learner + CLEARLY_MORE:
        return "the replicas wait for the learner"
    return "neither side waits much longer than the other"


def table_of(values: Mapping[str, Any]) -> str:
    """Return plain values by name as aligned lines."""
    width = max(map(len, values), default=0)
    return "\n".join(f"{name:<{width}}  {_plain(value)}" for name, value in values.items())


def _figures(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    if snapshot.get("phase"):
        table.add_row("phase", str(snapshot["phase"]))
    table.add_row("step", _steps(snapshot))
    table.add_row("reward", _number(snapshot, "critic/rewards/mean", ".3f"))
    if snapshot.get("accuracy") is not None:
        table.add_row("accuracy", f"{snapshot['accuracy']:.3f} on held-out prompts")
    table.add_row("lag", f"{_lag(snapshot)} (mean/max, learner steps)")
    table.add_row("tokens/s", f"{_rates(snapshot)} (rollout/learner)")
    verdict = waiting(snapshot)
    table.add_row("idle", f"{_idle(snapshot)} (rollout/learner)" + (f": {verdict}" if verdict else ""))
    if bottleneck(snapshot):
        table.add_row("bottleneck", Text(bottleneck(snapshot)))
    if snapshot.get("ledger"):
        table.add_row(
            "ledger", ", ".join(f"{name} {_plain(value)}" for name, value in snapshot["ledger"].items())
        )
    return table


def _services(services: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns = ("service", "state", "version")
    has_gateway = any(service.get("gateway") for service in services.values())
    for column in (*columns, "gateway") if has_gateway else columns:
        table.add_column(column)
    for name in sorted(services):
        state, version = str(services[name].get("state") or DASH), services[name].get("version")
        table.add_row(
            name,
            Text(state, style=STATE_STYLES.get(state, "")),
            DASH if version is None else str(version),
            *([str(services[name].get("gateway") or "")] if has_gateway else []),
        )
    return table


def _metric(snapshot: Snapshot, name: str) -> float | None:
    value = (snapshot.get("metrics") or {}).get(name)
    return None if value is None else float(value)


def _number(snapshot: Snapshot, name: str, form: str) -> str:
    value = _metric(snapshot, name)
    return DASH if value is None else format(value, form)


def _steps(snapshot: Snapshot) -> str:
    return f"{snapshot.get('step', DASH)}/{snapshot.get('steps', DASH)}"


def _lag(snapshot: Snapshot) -> str:
    mean = _number(snapshot, "staleness/lag_mean", ".2f")
    return f"{mean}/{_number(snapshot, 'staleness/lag_max_trained', '.0f')}"


def _rates(snapshot: Snapshot) -> str:
    rollout = _number(snapshot, "perf/rollout_tokens_per_s", ",.0f")
    return f"{rollout}/{_number(snapshot, 'perf/learner_tokens_per_s', ',.0f')}"


def _idle(snapshot: Snapshot) -> str:
    rollout = _number(snapshot, "perf/rollout_idle_share", ".0%")
    return f"{rollout}/{_number(snapshot, 'perf/learner_idle_share', '.0%')}"


def _plain(value: Any) -> str:
    if value is None:
        return DASH
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_plain(item)}" for name, item in value.items()) or DASH
    return str(value)
