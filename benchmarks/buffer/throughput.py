"""The buffer's full path beside bare pipes and beside what others use, in one run.

    asyncrl bench buffer [--sizes 4k] [--shapes 1x1] [--only none,pipe] [--quick] [--json FILE] [--check]

A group is encoded, sent, checked, booked in the ledger, journalled, fetched, decoded and acknowledged;
producers, the service and consumers are processes of their own. Every round runs all systems one after
the other; a figure is the median of the rounds. Latency is from when a group was due at its producer
until a consumer had decoded it, at half the rate that the system had in this very run. The other systems
run in environments of their own, made on first use.

The targets hold at 4k tokens, 1x1, which takes all systems, `--rounds` and `--seconds`: about 3 minutes.
The other sizes and shapes take one short round, without peers that carry one trajectory per entry: 5
minutes more; `--thorough` treats them alike. `--quick` takes the targets' size only, once, latencies of
ours only, and leaves out what needs an environment of its own and peers of one trajectory per entry.

Ours is to carry four times what the best peer does. Where the bare transport that ours goes over (the
ZMQ pipe, or XADD under the Redis journal) does not itself, no journal on it can: then both ratios are
printed, and that path is judged by its share of the bare transport alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from asyncrl.core.errors import AsyncrlError
from benchmarks.buffer.peers.crew import (
    Crew,
    Figures,
    PeerMissing,
    cache_folder,
    make_environment,
    percentile_s,
)
from benchmarks.buffer.peers.load import Turn
from benchmarks.harness.options import Verdict, judge, make_parser, report

GROUP_SIZE = 16
SIZES = {"1k": (1024, GROUP_SIZE), "4k": (4096, GROUP_SIZE), "16k": (16384, GROUP_SIZE), "1MB": (116_508, 1)}
"""Name: tokens of a trajectory (9 bytes each), trajectories of a group."""
SHAPES = {"1x1": (1, 1), "4x2": (4, 2)}
"""Producers x consumers."""
WARM_S, TURN_S, QUICK_TURN_S = 0.4, 2.0, 1.0
SHORT_TURN_S = 0.8
ROUNDS = 3
OURS = ("none", "file", "redis")
CEILINGS = {"none": "pipe", "file": "pipe", "redis": "xadd"}
"""Transport below each of asyncrl's journals, which bounds its throughput."""
LOAD = 0.5
"""Share of its own rate that a system is offered when latencies are taken."""
JUDGED = ("4k", "1x1")
MIN_OF_PIPE, MIN_OF_NONE, MIN_OF_XADD, MIN_OF_PEERS, MAX_P99_S = 0.4, 0.5, 0.5, 4.0, 0.010


@dataclass(frozen=True)
class System:
    """One row of the table.

    Attributes:
        way: Module and class of the way.
        role: `ours`, `ceiling`, `peer` (one of the four of the target) or `guest`.
        is_grouped: An entry is a group, else a trajectory. Ours and the ceilings carry groups.
        packages: Packages of its own environment; empty: ours.
    """

    title: str
    way: tuple[str, str]
    role: str
    options: dict[str, Any] = field(default_factory=dict)
    is_grouped: bool = True
    packages: tuple[str, ...] = ()


def systems() -> dict[str, System]:
    """Return all systems by the name that `--only` takes."""
    queue = ("TransferQueue==0.1.11", f"torch=={version('torch')}", f"ray=={version('ray')}")
    reverb = ("dm-reverb[tensorflow]==0.14.0",)
    found = {
        "pipe": System("bare ZMQ pipe, columnar", ("zmq_pipe", "ZmqPipe"), "ceiling"),
        "xadd": System("bare XADD, pipelined, acked", ("redis_pipes", "BareXadd"), "ceiling"),
    }
    for journal in OURS:
        found[journal] = System(
            f"asyncrl, journal: {journal}", ("ours", "Ours"), "ours", {"journal": journal}
        )
    found["pattern"] = System("PipelineRL's Redis pattern", ("redis_pipes", "RedisPattern"), "peer")
    for suffix, is_grouped, per in (("", False, "trajectory"), ("_groups", True, "group")):
        for name, title, way in (
            ("ray_queue", "Ray Queue", ("ray_pipes", "RayQueue")),
            ("ray_objects", "Ray object store", ("ray_pipes", "RayObjects")),
        ):
            found[name + suffix] = System(f"{title}, per {per}", way, "peer", is_grouped=is_grouped)
        found[f"transfer_queue{suffix}"] = System(
            f"TransferQueue, per {per}",
            ("transfer_queue_way", "TransferQueue"),
            "peer",
            packages=queue,
            is_grouped=is_grouped,
        )
    found["reverb"] = System("Reverb, per group", ("reverb_way", "Reverb"), "guest", packages=reverb)
    return found


@dataclass
class Row:
    """The figures of one system at one size and shape; `missing` says why there are none.

    `offered_per_s`: trajectories per second while latencies were taken.
    """

    system: str
    size: str
    shape: str
    rounds: list[Figures] = field(default_factory=list)
    paced: Figures | None = None
    offered_per_s: float = 0.0
    missing: str = ""

    @property
    def per_s(self) -> float:
        return statistics.median(one.per_s for one in self.rounds) if self.rounds else 0.0

    def as_values(self) -> dict[str, Any]:
        latencies = self.paced.latencies_s if self.paced else ()
        return {
            "system": self.system,
            "size": self.size,
            "shape": self.shape,
            "missing": self.missing,
            "per_s": self.per_s,
            "per_s_of_rounds": [one.per_s for one in self.rounds],
            "cpu_s_per_1000": statistics.median(one.cpu_s_per_1000 for one in self.rounds)
            if self.rounds
            else 0.0,
            "offered_per_s": self.offered_per_s,
            "p50_s": percentile_s(latencies, 50),
            "p99_s": percentile_s(latencies, 99),
            "num_latencies": len(latencies),
        }


class Comparison:
    """Runs the systems; keeps their processes from turn to turn."""

    def __init__(
        self, chosen: dict[str, System], folder: Path, logs: Path | None, is_thorough: bool = False
    ) -> None:
        self._systems = chosen
        self._is_thorough = is_thorough
        self._folder = folder
        self._logs = logs
        self._crews: dict[tuple[str, str], Crew] = {}
        self._missing: dict[str, str] = {}

    def measure(self, size: str, shape: str, rounds: int, turn_s: float, paced: Sequence[str]) -> list[Row]:
        """Return a row per system: `rounds` interleaved turns, and of those in `paced` a paced one behind."""
        is_judged = (size, shape) == JUDGED
        rows = {
            name: Row(name, size, shape)
            for name, system in self._systems.items()
            if is_judged or self._is_thorough or system.is_grouped
        }
        for number in range(rounds):
            for name, row in rows.items():
                figures = self._run(name, row, turn_s, 0.0)
                if figures is not None:
                    row.rounds.append(figures)
                if number == rounds - 1 and name in paced and row.per_s:
                    row.offered_per_s = LOAD * row.per_s
                    row.paced = self._run(name, row, 1.5 * turn_s, row.offered_per_s)
        return list(rows.values())

    def _run(self, name: str, row: Row, turn_s: float, per_s: float) -> Figures | None:
        try:
            if name in self._missing:
                raise PeerMissing(self._missing[name])
            figures = self._crew(name).run(self._turn(name, row, per_s), turn_s, WARM_S)
            print(f"{row.size} {row.shape} {name}: {figures.per_s:.0f}/s", file=sys.stderr)
            return figures
        except AsyncrlError as error:
            row.missing = self._missing[name] = error.message
            print(f"{name}: {error.message}", file=sys.stderr)
            self._drop(self._systems[name].way)
            return None

    def _turn(self, name: str, row: Row, per_s: float) -> Turn:
        num_tokens, group_size = SIZES[row.size]
        system = self._systems[name]
        return Turn(
            f"{row.size}-{row.shape}-{len(row.rounds)}-{per_s:.0f}",
            num_tokens,
            group_size,
            *SHAPES[row.shape],
            groups_per_s=per_s / group_size,
            per_entry=group_size if system.is_grouped else 1,
            options=system.options,
        )

    def _crew(self, name: str) -> Crew:
        """Return the way's processes, which its rows share."""
        system = self._systems[name]
        if system.way not in self._crews:
            if system.packages:
                print(f"{name}: environment with {' '.join(system.packages)}", file=sys.stderr)
            module, way = system.way
            python = make_environment(way, system.packages, self._folder)
            log = self._logs / f"{module}.log" if self._logs else None
            self._crews[system.way] = Crew(f"benchmarks.buffer.peers.{module}", way, python, log)
        return self._crews[system.way]

    def _drop(self, way: tuple[str, str]) -> None:
        crew = self._crews.pop(way, None)
        if crew is not None:
            crew.close()

    def close(self) -> None:
        """End all processes."""
        for way in list(self._crews):
            self._drop(way)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    given = read_arguments(arguments)
    chosen = systems()
    if given.only:
        chosen = {name: chosen[name] for name in given.only.split(",")}
    elif given.quick:
        chosen = {name: one for name, one in chosen.items() if one.is_grouped and not one.packages}
    comparison = Comparison(chosen, given.environments or cache_folder(), given.logs, given.thorough)
    rounds, turn_s = (1, QUICK_TURN_S) if given.quick else (given.rounds, given.seconds)
    paced = [name for name, system in chosen.items() if system.role == "ours" or not given.quick]
    rows: list[Row] = []
    try:
        for cell in cells(given):
            if cell == JUDGED or given.thorough:
                rows += comparison.measure(*cell, rounds, turn_s, paced)
            else:
                rows += comparison.measure(*cell, 1, min(turn_s, SHORT_TURN_S), paced)
    finally:
        comparison.close()
    results = {
        "benchmark": "buffer",
        "quick": given.quick,
        "rounds": rounds,
        "turn_s": turn_s,
        "titles": {name: system.title for name, system in chosen.items()},
        "rows": [row.as_values() for row in rows],
    }
    return report(given, results, table, check)


def cells(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the sizes and shapes to measure, the judged ones first: what ends early has them."""
    if given.quick:
        return [JUDGED]
    found = [(size, shape) for size in given.sizes.split(",") for shape in given.shapes.split(",")]
    return sorted(found, key=lambda cell: cell != JUDGED)


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = make_parser("asyncrl bench buffer", __doc__, "4k tokens, 1x1, one short round: under a minute")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {','.join(SIZES)}")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {','.join(SHAPES)}")
    parser.add_argument("--only", metavar="NAMES", help=f"of {','.join(systems())}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=TURN_S, help="of a turn")
    parser.add_argument("--thorough", action="store_true", help="all sizes and shapes as the judged ones")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="where peers' environments are kept")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where the processes' stderr goes")
    return parser.parse_args(arguments)


def table(results: dict[str, Any]) -> str:
    """Return a line per row."""
    figures = f"{'per s':>8} {'of pipe':>8} {'cpu s/1000':>11} {'p50 ms':>8} {'p99 ms':>8}"
    head = f"{'size':<5} {'shape':<6} {'system':<34} {figures}"
    lines = [head]
    for row in results["rows"]:
        start = f"{row['size']:<5} {row['shape']:<6} {results['titles'][row['system']]:<34}"
        if row["missing"]:
            lines.append(f"{start} {row['missing']}")
            continue
        pipe = find_row(results, "pipe", row["size"], row["shape"])
        share = f"{row['per_s'] / pipe['per_s']:>8.3f}" if pipe and pipe["per_s"] else f"{'':>8}"
        latencies = f"{1e3 * row['p50_s']:>8.2f} {1e3 * row['p99_s']:>8.2f}" if row["num_latencies"] else ""
        lines.append(f"{start} {row['per_s']:>8.0f} {share} {row['cpu_s_per_1000']:>11.3f} {latencies}")
    return "\n".join(lines)


def find_row(results: dict[str, Any], system: str, size: str, shape: str) -> dict[str, Any] | None:
    """Return the row of a system, None if it was not asked for or is missing."""
    for row in results["rows"]:
        if (row["system"], row["size"], row["shape"]) == (system, size, shape) and not row["missing"]:
            return dict(row)
    return None


def check(results: dict[str, Any]) -> Verdict:
    """Return whether every target at 4k tokens, 1x1, is met, and the worst ratio as a sentence."""
    found = {name: find_row(results, name, *JUDGED) for name in systems()}
    needed = [
        name
        for name, system in systems().items()
        if system.role != "guest" and (not results["quick"] or (system.is_grouped and not system.packages))
    ]
    if absent := [name for name in needed if found[name] is None]:
        return False, f"not measured at {' '.join(JUDGED)}: {', '.join(absent)}"
    rows = {name: row for name, row in found.items() if row is not None}
    per_s = {name: float(row["per_s"]) for name, row in rows.items()}
    peers = [name for name, system in systems().items() if system.role == "peer" and name in per_s]
    best = max(peers, key=per_s.__getitem__)
    ratios = {
        f"none of the pipe, target {MIN_OF_PIPE}": per_s["none"] / per_s["pipe"] / MIN_OF_PIPE,
        f"file of none, target {MIN_OF_NONE}": per_s["file"] / per_s["none"] / MIN_OF_NONE,
        f"redis of bare XADD, target {MIN_OF_XADD}": per_s["redis"] / per_s["xadd"] / MIN_OF_XADD,
    }
    told: dict[str, float] = {}
    for name in OURS:
        ceiling = CEILINGS[name]
        told[f"{ceiling}, bare, of {best}, the best peer"] = per_s[ceiling] / per_s[best]
        told[f"{name} of {best}, the best peer, over {ceiling}"] = per_s[name] / per_s[best]
        if per_s[ceiling] >= MIN_OF_PEERS * per_s[best]:
            what = f"{name} of {best}, the best peer, target {MIN_OF_PEERS:g}"
            ratios[what] = per_s[name] / per_s[best] / MIN_OF_PEERS
        ratios[f"p99 of {name} at {LOAD:.0%} load, target {1e3 * MAX_P99_S:g} ms"] = (
            MAX_P99_S / rows[name]["p99_s"]
        )
    print("times the best peer:")
    print("\n".join(f"{ratio:6.2f}  {name}" for name, ratio in told.items()))
    print("ratios to the targets:")
    print("\n".join(f"{ratio:6.2f}  {name}" for name, ratio in ratios.items()))
    return judge(ratios)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
