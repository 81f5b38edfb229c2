"""Planned against real transfers: the planner's model of a version, with rates taken from other sizes.

Real services on loopback, as in `rounds`. For each fleet, rates are taken from the smallest and the largest
size alone; with them the model of `asyncrl plan` says the seconds of a publish and of a transfer of the sizes
between.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncrl.core.config.tree import WeightSyncSection
from asyncrl.planner.plan.footprint.version_cost import VersionCost, WeightRates
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.weight_sync.peers.services import Fleet

MB = 10**6
FLEETS = (1, 3)
TAKEN, PLANNED = (16, 160), (32, 64, 112)
"""Megabytes of the versions from which rates are taken, and of those that are planned with them."""
NUM_TURNS, NUM_QUICK_TURNS, NUM_WARM_UP = 7, 5, 4
NUM_FLEETS, NUM_QUICK_FLEETS = 5, 1
"""Starts of a size: as their processes come to share the cores, they differ by up to a half."""
TARGET = 0.15
FIGURES = ("export_s", "group_s")
Points = Mapping[tuple[int, int], Mapping[str, float]]
"""Medians by bytes and receivers."""


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("asyncrl bench weight_sync_plan", __doc__, quick="one start of each size's services")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = measure(*((NUM_QUICK_FLEETS, NUM_QUICK_TURNS) if given.quick else (NUM_FLEETS, NUM_TURNS)))
    return report(given, results, table, check)


def measure(num_fleets: int, num_turns: int) -> dict[str, Any]:
    """Return planned and real seconds of each size and fleet, the latter medians of `num_fleets` starts."""
    found: dict[tuple[int, int], list[dict[str, float]]] = {}
    for _, num_receivers, size in itertools.product(range(num_fleets), FLEETS, sorted((*TAKEN, *PLANNED))):
        key, medians = _measure_size(size, num_receivers, num_turns)
        found.setdefault(key, []).append(medians)
    points = {
        key: {name: statistics.median(one[name] for one in some) for name in FIGURES}
        for key, some in found.items()
    }
    return {"benchmark": "weight_sync_plan", "rows": compare(points)}


def _measure_size(size: int, num_receivers: int, num_turns: int) -> tuple[tuple[int, int], dict[str, float]]:
    fleet = Fleet(num_receivers, size * MB, WeightSyncSection().bucket_bytes, has_keys=False)
    try:
        fleet.attend()
        turns = [fleet.sync() for _ in range(NUM_WARM_UP + num_turns)][NUM_WARM_UP:]
    finally:
        fleet.close()
    medians = {
        "export_s": statistics.median(turn.publish_s for turn in turns),
        "group_s": statistics.median(turn.transfer_s for turn in turns),
    }
    return (fleet.num_bytes, num_receivers), medians


def cost_of(num_bytes: int, num_receivers: int) -> VersionCost:
    """Return the cost of a version for receivers that are all on this host."""
    return VersionCost(num_bytes, 1, num_receivers, 0, 1, 1, os.cpu_count())


def rates_of(points: Points, num_receivers: int) -> WeightRates:
    """Return the rates that the smallest and the largest size of a fleet tell."""
    sizes = sorted(size for size, fleet in points if fleet == num_receivers)
    low, high = sizes[0], sizes[-1]
    (export_s, per_byte), (group_s, sent) = (
        _line(low, points[low, num_receivers][name], high, points[high, num_receivers][name])
        for name in FIGURES
    )
    copies = cost_of(low, num_receivers).num_copies
    return WeightRates(
        export_s=export_s, export_bytes_per_s=1 / per_byte, group_s=group_s, send_bytes_per_s=copies / sent
    )


def _line(x: int, y: float, other_x: int, other_y: float) -> tuple[float, float]:
    """Return the value at 0 and the slope of the line through two points."""
    slope = (other_y - y) / (other_x - x)
    return y - slope * x, slope


def compare(points: Points) -> list[dict[str, Any]]:
    """Return a row per planned size, fleet and figure: the seconds planned and measured."""
    rows = []
    for num_receivers in sorted({fleet for _, fleet in points}):
        rates = rates_of(points, num_receivers)
        sizes = sorted(size for size, fleet in points if fleet == num_receivers)[1:-1]
        for size, figure in ((size, figure) for size in sizes for figure in FIGURES):
            planned_s = getattr(cost_of(size, num_receivers), figure)(rates)
            measured_s = points[size, num_receivers][figure]
            rows.append(
                {
                    "num_bytes": size,
                    "num_receivers": num_receivers,
                    "figure": figure,
                    "planned_s": planned_s,
                    "measured_s": measured_s,
                    "deviation": planned_s / measured_s - 1.0,
                }
            )
    return rows


def table(results: dict[str, Any]) -> str:
    """Return the rows as text."""
    lines = [f"{'MB':>5} {'receivers':>9} {'':>9} {'planned s':>10} {'measured s':>10} {'deviation':>10}"]
    lines += [
        f"{row['num_bytes'] / MB:>5.0f} {row['num_receivers']:>9} {row['figure']:>9} "
        f"{row['planned_s']:>10.4f} {row['measured_s']:>10.4f} {row['deviation']:>+10.1%}"
        for row in results["rows"]
    ]
    return "\n".join(lines)


def check(results: dict[str, Any]) -> Verdict:
    """Return whether every figure was planned within `TARGET`, and the worst one."""
    ratios = {
        f"{row['figure']} of {row['num_bytes'] / MB:.0f} MB to {row['num_receivers']}, target {TARGET:.0%}": (
            TARGET / max(1e-9, abs(row["deviation"]))
        )
        for row in results["rows"]
    }
    return judge(ratios)
