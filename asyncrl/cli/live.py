"""A run's snapshot as one line, as a row of a table, as text or as a panel (pure).

Nothing here asks, waits or prints. Words and figures are those of the page (`page.view`); one that
the snapshot lacks is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.cli.bulletin import TOLD_KINDS, line_of
from asyncrl.cli.reports.table import align
from asyncrl.control.snapshot import Snapshot
from asyncrl.core.files.printable import ESCAPED, INDENTED, printable
from asyncrl.core.metrics.run_names import FIRST_AFTER_START
from asyncrl.page.figures import DASH
from asyncrl.page.picture import Account, Event, Lag, Obstacle, Service, View
from asyncrl.page.pipeline import Node
from asyncrl.page.snapshot import shown
from asyncrl.page.view import view_of

TONE_STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "busy": "yellow"}
PANEL_WIDTH = 100
NUM_EVENTS = 8
NUM_NEWS = 3
"""Events in the panel, of the kinds that lines tell."""
LEGEND = "lag: mean/largest, in steps; tokens/s and idle: replicas/learner; s: the newest step"


# --- a line -----------------------------------------------------------------------------------


def fields_of(snapshot: Snapshot) -> dict[str, str]:
    """Return what a line says, by the name of each field; `step` alone stays while nothing changes."""
    view = view_of(snapshot)
    fields = {
        "step": f"step {_steps(snapshot)}",
        "reward": f"reward {_number(snapshot, 'critic/rewards/mean', '.3f')}",
        "lag": f"lag {_lag(snapshot)}",
        "rates": f"tokens/s {_rates(snapshot)}",
        "idle": f"idle {_idle(snapshot)}",
        "seconds": f"{_number(snapshot, 'timing_s/step', '.2f')} s",
        "accuracy": f"accuracy {snapshot.accuracy:.3f}" if snapshot.accuracy is not None else "",
        "left": f"{view['time_left']} left" if view["time_left"] else "",
        "bottleneck": view["bottleneck"]["title"].removesuffix(".") if view["bottleneck"]["node"] else "",
    }
    return {name: text for name, text in fields.items() if text}


def state_line_of(snapshot: Snapshot) -> str:
    """Return the run's name, its state and what it is busy with."""
    phase = f" ({snapshot.phase})" if snapshot.phase else ""
    return f"{snapshot.run or 'run'}: {state_of(snapshot)}{phase}"


def state_of(snapshot: Snapshot) -> str:
    """Return the run's state, with what is unusual about it."""
    unusual = []
    if snapshot.paused:
        unusual.append("paused")
    if snapshot.is_degraded:
        unusual.append(str(snapshot.health))
    return ", ".join([str(snapshot.state or DASH), *unusual])


# --- several runs -----------------------------------------------------------------------------


def row_of(snapshot: Snapshot) -> dict[str, str]:
    """Return the snapshot as a row of a table of several runs."""
    accuracy = snapshot.accuracy
    return {
        "run": snapshot.run or DASH,
        "state": state_of(snapshot),
        "step": _steps(snapshot),
        "left": view_of(snapshot)["time_left"] or DASH,
        "reward": _number(snapshot, "critic/rewards/mean", ".3f"),
        "accuracy": DASH if accuracy is None else f"{accuracy:.3f}",
        "lag": _lag(snapshot),
        "tokens/s": _rates(snapshot),
        "idle": _idle(snapshot),
        "bottleneck": snapshot.bottleneck.who or DASH,
    }


def table_of(values: Mapping[str, object]) -> list[str]:
    """Return plain values by name as aligned lines."""
    width = max(map(len, values), default=0)
    return [printable(f"{name:<{width}}  {_plain(value)}", ESCAPED) for name, value in values.items()]


# --- one run as text --------------------------------------------------------------------------


def text_of(snapshot: Snapshot, *, is_whole: bool = False) -> list[str]:
    """Return all that the page shows but curves and rollouts, as lines without colours or boxes.

    Args:
        is_whole: Each service of a large fleet has a line.
    """
    view = view_of(snapshot, is_whole=is_whole)
    sections = [
        _head(snapshot, view),
        _pipeline(view["nodes"]),
        _account(view["account"]),
        _lag_lines(view["lag"]),
        [*_services(view["services"]), *_groups(view)],
        _events(view["events"]),
    ]
    lines: list[str] = []
    for section in filter(None, sections):
        lines += ["", *section] if lines else section
    return [printable(line, INDENTED) for line in lines]


def _head(snapshot: Snapshot, view: View) -> list[str]:
    left = f"about {view['time_left']} left" if view["time_left"] else ""
    accuracy = f"held-out accuracy {view['accuracy']}" if view["accuracy"] != DASH else ""
    facts = ", ".join(filter(None, (f"step {view['step']} of {view['steps']}", left, accuracy)))
    found = view["bottleneck"]
    return list(
        filter(
            None,
            (
                f"{state_line_of(snapshot)}, {facts}",
                *(f"! {obstacle_line(one)}" for one in view["obstacles"]),
                view["place"],
                view["resumed"],
                view["error"],
                " ".join(filter(None, (found["title"], found["why"].strip(DASH), found["wait"]))),
            ),
        )
    )


def obstacle_line(one: Obstacle) -> str:
    """Return what keeps the run from its next step, of a view."""
    count = f" ({one['count']})" if one["count"] else ""
    return f"{one['service']}: {one['text']}{count}"


def _pipeline(nodes: list[Node]) -> list[str]:
    rows = []
    for node in nodes:
        figures = ", ".join(f"{name} {value}" for name, value in node["figures"])
        rows.append([node["title"], f"{node['value']} {node['unit']}", figures])
    return align(rows)


def _account(account: Account) -> list[str]:
    lines = [f"Account: residue {account['residue']}"]
    for law in account["laws"]:
        parts = " + ".join(f"{part['name']} {part['count']}" for part in law["parts"])
        lines.append(f"  {law['name']} {law['total']} = {parts}")
    return lines


def _lag_lines(lag: Lag) -> list[str]:
    head = (
        f"Lag of trained tokens, in steps: mean {lag['mean']}, largest {lag['max']}, bound {lag['max_lag']}, "
        f"masked {lag['masked']}"
    )
    bars = [f"{bar['lag']}: {bar['text']}" for bar in lag["bars"] if bar["share"] > 0]
    return [head, f"  {'   '.join(bars)}"] if bars else [head]


def _services(services: list[Service]) -> list[str]:
    if not services:
        return []
    columns = ["service", "state", "version", "behind", "heartbeat", "restarts", "gateway"]
    rows = [
        [
            *(one["name"], one["state"], one["version"], one["behind"], one["heartbeat"]),
            *(one["restarts"], one["gateway"]),
        ]
        for one in services
    ]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return align([columns, *rows])


def _groups(view: View) -> list[str]:
    """Return a line for each grouping of a large fleet, the worst groups first."""
    if not view["groupings"]:
        return []
    rows = [
        [one["title"], ", ".join(f"{group['name']} {group['count']}" for group in one["groups"])]
        for one in view["groupings"]
    ]
    return [
        *align(rows),
        f"{view['num_hidden']} services have no line; 'asyncrl status --services' shows all",
    ]


def _events(events: list[Event]) -> list[str]:
    if not events:
        return []
    rows = [
        [_clock_time(one["time"]), one["kind"], one["service"], one["text"]] for one in events[:NUM_EVENTS]
    ]
    return ["Events, the newest first", *align(rows)]


# --- one run as a panel -----------------------------------------------------------------------


def panel_of(snapshot: Snapshot, width: int = PANEL_WIDTH) -> RenderableType:
    """Return the snapshot as a panel of a fixed width: progress, rates, waits, services, news."""
    snapshot = shown(snapshot)
    view = view_of(snapshot)
    title = Text.assemble(view["run"], "  ", (state_of(snapshot), TONE_STYLES.get(view["tone"], "")))
    parts: list[RenderableType] = [
        Text(obstacle_line(one), TONE_STYLES.get(one["tone"], "")) for one in view["obstacles"]
    ]
    parts += [Text(view["resumed"], "dim")] if view["resumed"] else []
    if view["phase"]:
        parts.append(Text(view["phase"], "yellow"))
    parts += [_progress(snapshot, view, width), _figures(snapshot, view), *_states(view["services"])]
    parts += [Text(line) for line in _groups(view)]
    parts += _news(view["events"])
    if view["error"]:
        parts += [Text(), Text(view["error"], style="bold red")]
    return Panel(Group(*parts), title=title, title_align="left", width=width)


def _progress(snapshot: Snapshot, view: View, width: int) -> RenderableType:
    left = f"about {view['time_left']} left" if view["time_left"] else ""
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=1.0, completed=view["progress"] or 0.0, width=max(10, width // 3))
    grid.add_row(Text(f"step {_steps(snapshot)}"), bar, Text(left))
    return grid


def _figures(snapshot: Snapshot, view: View) -> Table:
    accuracy = f", held-out accuracy {view['accuracy']}" if view["accuracy"] != DASH else ""
    lag, found = view["lag"], view["bottleneck"]
    generated, trained = _rates(snapshot).split("/")
    replicas, learner = _idle(snapshot).split("/")
    rows = {
        "reward": f"{_number(snapshot, 'critic/rewards/mean', '.3f')}{accuracy}",
        "lag": f"mean {lag['mean']}, largest {lag['max']}, bound {lag['max_lag']} steps",
        "tokens/s": f"replicas {generated}, learner {trained}",
        "idle": f"replicas {replicas}, learner {learner} of their time",
        "pace": f"{found['title']} {found['why']}" if found["node"] else "",
        "account": f"residue {view['account']['residue']}",
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        if text:
            table.add_row(name, Text(text))  # a plain string would be read as markup
    return table


def _states(services: list[Service]) -> list[RenderableType]:
    """Return each replica with its version on one line, and the other services by state on another."""
    replicas, others = Text(), Text()
    for one in services:
        line = replicas if one["is_replica"] else others
        version = f" v{one['version']}" if one["is_replica"] and one["version"] != DASH else ""
        line.append(f"{one['name']} ").append(one["state"], TONE_STYLES.get(one["tone"], ""))
        line.append(f"{version}   ")
    gateways = [Text(f"{one['name']} gateway {one['gateway']}") for one in services if one["gateway"]]
    return [line for line in (replicas, others, *gateways) if line]


def _news(events: list[Event]) -> list[RenderableType]:
    """Return the newest events that hold a run up or keep it from learning, each cut to one line."""
    told = [one for one in events if one["kind"] in TOLD_KINDS][:NUM_NEWS]
    lines = [(f"{_clock_time(one['time'])} {line_of(one['service'], one['text'])}", one) for one in told]
    return [
        Text(line, TONE_STYLES.get(one["tone"], ""), no_wrap=True, overflow="ellipsis") for line, one in lines
    ]


# --- figures ----------------------------------------------------------------------------------


def _metric(snapshot: Snapshot, name: str) -> float | None:
    value = snapshot.metrics.get(name)
    return float(value) if isinstance(value, int | float) else None


def _clock_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%H:%M:%S")


def _number(snapshot: Snapshot, name: str, form: str) -> str:
    value = _metric(snapshot, name)
    return DASH if value is None else format(value, form)


def _of_learner(snapshot: Snapshot, name: str, form: str) -> str:
    """Return a figure of the learner; none of the first step, whose time holds the start of the run."""
    return DASH if _metric(snapshot, FIRST_AFTER_START) else _number(snapshot, name, form)


def _steps(snapshot: Snapshot) -> str:
    done, wanted = (DASH if one is None else str(one) for one in (snapshot.step, snapshot.steps))
    return f"{done}/{wanted}"


def _lag(snapshot: Snapshot) -> str:
    mean = _number(snapshot, "staleness/lag_mean", ".2f")
    return f"{mean}/{_number(snapshot, 'staleness/lag_max_trained', '.0f')}"


def _rates(snapshot: Snapshot) -> str:
    rollout = _number(snapshot, "perf/rollout_tokens_per_s", ",.0f")
    return f"{rollout}/{_of_learner(snapshot, 'perf/learner_tokens_per_s', ',.0f')}"


def _idle(snapshot: Snapshot) -> str:
    rollout = _number(snapshot, "perf/rollout_idle_share", ".0%")
    return f"{rollout}/{_of_learner(snapshot, 'perf/learner_idle_share', '.0%')}"


def _plain(value: object) -> str:
    if value is None:
        return DASH
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_plain(item)}" for name, item in value.items()) or DASH
    return str(value)
