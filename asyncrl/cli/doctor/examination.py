"""`asyncrl doctor`: all examinations, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from asyncrl.cli.doctor import exposure, gpus, machine, packages, ray
from asyncrl.cli.doctor.finding import Finding
from asyncrl.cli.exits import show
from asyncrl.cli.reports.table import align
from asyncrl.control.machine.resources import count_gpus


def examine(runs_dir: str, address: str = "") -> Iterator[Finding]:
    """Yield what was found, one thing after the other; of the Ray cluster at `address` too, if given."""
    yield from packages.check_python()
    yield from packages.check_packages()
    yield from packages.check_environments()
    yield from packages.check_torch(count_gpus())
    yield from machine.check_processors()
    yield from gpus.check_gpus()
    yield from machine.check_memory()
    yield from gpus.check_presets()
    yield from machine.check_disk(runs_dir)
    yield from machine.check_limits()
    yield from machine.check_sockets()
    yield from machine.check_redis()
    yield from machine.check_sandbox()
    yield from ray.check_version()
    yield from ray.check_ports()
    yield from ray.check_object_store()
    yield from machine.check_leftovers()
    yield from exposure.check_folders(runs_dir)
    yield from exposure.check_ray_token()
    yield from exposure.check_live_runs(runs_dir)
    yield from ray.check_processes()
    yield from ray.check_sessions()
    if address:
        yield from ray.check_cluster(address)


def print_findings(runs_dir: str, as_json: bool, address: str = "") -> bool:
    """Print what was found; return whether a run can work here."""
    findings = list(examine(runs_dir, address))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        show(*text_of(findings))
    return all(finding.verdict != "fail" for finding in findings)


def text_of(findings: Sequence[Finding]) -> list[str]:
    """Return a line per finding, the advice below those that need one, and the sum."""
    heads = align([[finding.verdict, finding.what, finding.found] for finding in findings])
    lines = []
    for head, finding in zip(heads, findings, strict=True):
        lines.append(head)
        if finding.advice:
            lines.append(f"      -> {finding.advice}")
    counts = {verdict: sum(one.verdict == verdict for one in findings) for verdict in ("ok", "warn", "fail")}
    return [*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())]
