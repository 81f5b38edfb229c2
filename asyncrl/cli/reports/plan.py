"""`asyncrl plan`: what a configuration will take, and what would change in a run, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from asyncrl.cli import exits
from asyncrl.cli.reports.table import align
from asyncrl.cli.run.difference import Change, compare_with_run
from asyncrl.cli.run.handle import attach
from asyncrl.cli.up import find_config, placed
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.config.load import find_run_folder, load
from asyncrl.core.config.secrets import hide_passwords
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.planner import plan
from asyncrl.planner.plan.footprint.memory import HOST
from asyncrl.planner.plan.footprint.shared_memory import SHM_DIR, free_bytes
from asyncrl.planner.rates import ASSUMED

GB = 10**9
NO_DIFFERENCE = "nothing differs"


def print_plan(
    configs: Sequence[str],
    overrides: Sequence[str],
    run: str | None,
    runs_dir: str,
    as_json: bool,
    is_elsewhere: bool = False,
) -> None:
    """Print the plan of a configuration, and how it differs from the run of its name or from `run`.

    Raises:
        ConfigError: With every problem that the configuration has, each with its place. Nothing is started.
    """
    loaded = load([find_config(name) for name in configs], overrides)
    folder = RunDir(Path(loaded.config.run.dir) / loaded.config.run.name)
    if run is not None:
        folder = RunDir(find_run_folder(run, runs_dir))
    is_live = attach(folder) is not None
    try:
        found = _choose_check(is_live, is_elsewhere)(loaded.config)
    except ConfigError as error:
        raise placed(error, loaded) from error
    has_run = folder.resolved.exists()
    changes = compare_with_run(folder, loaded.config) if has_run else None
    if as_json:
        print(json.dumps(_values(found, changes, folder, is_live), indent=2))
        return
    exits.show(*_lines(found))
    if changes is not None:
        exits.show("", *_difference(changes, folder, is_live))
    if found.shared_memory is not None and not is_elsewhere:
        told = found.shared_memory.describe(free_bytes())
        exits.say(told if told.startswith("warning") else "")


def _choose_check(is_live: bool, is_elsewhere: bool) -> Callable[[Config], plan.Plan]:
    if is_elsewhere:
        return plan.check_elsewhere
    return plan.check_beside if is_live else plan.check


def print_schema() -> None:
    """Print the JSON Schema of a configuration, for editors."""
    from asyncrl.cli.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


def _values(
    found: plan.Plan, changes: list[Change] | None, folder: RunDir, is_live: bool
) -> dict[str, object]:
    values = asdict(found) | {
        "num_processes": found.num_processes,
        "num_cpus": found.num_cpus,
        "num_gpus": found.num_gpus,
    }
    if changes is not None:
        shown = [
            asdict(change) | {"was": _show(change.was), "becomes": _show(change.becomes)}
            for change in changes
        ]
        values["difference"] = {"run": str(folder.path), "is_live": is_live, "changes": shown}
    return values


def _lines(found: plan.Plan) -> Iterator[str]:
    yield "services"
    rows = [("", "count", "processes", "CPUs", "GPUs", "where")]
    for one in found.placement:
        numbers = (str(one.count), str(one.num_processes), f"{one.cpus:g}", f"{one.gpus:g}")
        rows.append((one.kind, *numbers, one.where))
    rows.append(("all", "", str(found.num_processes), f"{found.num_cpus:g}", f"{found.num_gpus:g}", ""))
    yield from _indent(align(rows))
    yield "ports"
    yield from _indent(align(list(found.ports.items())))
    yield "memory, at most"
    yield from _indent(align(list(_memory_rows(found))))
    flight = found.in_flight
    yield "in flight, at most"
    yield f"  {flight.groups} groups: {flight.rule}"
    yield f"  {flight.trajectories} trajectories with {flight.tokens:,} sampled tokens"
    yield f"  {flight.sequences} sequences at once in the engines"
    yield "weights"
    yield f"  {found.weight_sync.backend}: {found.weight_sync.why}"
    yield from _indent(align(list(_version_rows(found))))
    yield "derived"
    yield from _indent(align([(one.name, _show(one.value), one.rule) for one in found.derived]))
    if found.notes:
        yield "note"
        yield from _indent(found.notes)
    if found.not_checked:
        yield "not checked"
        yield from _indent(found.not_checked)


def _version_rows(found: plan.Plan) -> Iterator[tuple[str, ...]]:
    """Yield what one version costs, with assumed rates, and the memory for it."""
    for stage in found.version:
        yield stage.name, f"{stage.seconds:.3g} s", f"{stage.num_bytes / GB:.3g} GB", stage.rule
    if found.version and found.shared_memory is not None:
        room = f"{found.shared_memory.num_bytes / GB:.3g} GB"
        yield "host memory", "", room, found.shared_memory.rule
        yield "GPU memory", "", "0 GB", "loads go into the weights that the engine has"
        yield "rates", "", "", ASSUMED


def _memory_rows(found: plan.Plan) -> Iterator[tuple[str, ...]]:
    for part in found.memory:
        yield part.where, f"{part.num_bytes / GB:.2f} GB", part.what, part.rule
    for where in dict.fromkeys(part.where for part in found.memory):
        total = sum(part.num_bytes for part in found.memory if part.where == where)
        yield where, f"{total / GB:.2f} GB", "all", _room(where)
    if found.shared_memory is None:
        yield "/dev/shm", "?", "versions on their way", "the model's size is known once its files are here"


def _room(where: str) -> str:
    """Return what this machine has of that memory; nothing of a GPU's, which is not looked at."""
    free = {HOST: psutil.virtual_memory().available, str(SHM_DIR): free_bytes()}
    return f"{free[where] / GB:.2f} GB are free here" if where in free else ""


def _difference(changes: Sequence[Change], folder: RunDir, is_live: bool) -> Iterator[str]:
    state = "live run" if is_live else "run"
    yield f"against the {state} in {folder.path}"
    if not changes:
        yield f"  {NO_DIFFERENCE}"
    rows = []
    for change in changes:
        verdict = "takes effect at a resume" if change.at_resume else f"refused at a resume: {change.why}"
        rows.append((change.key, f"{_show(change.was)} -> {_show(change.becomes)}", verdict))
    yield from _indent(align(rows))


def _show(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return hide_passwords(text)


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
