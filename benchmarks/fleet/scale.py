"""Scaling of a run: one, two and three live replicas, and the control plane's cost per trajectory.

    asyncrl bench scale [--only PARTS] [--quick] [--check] [--json FILE]

live: one run of `asyncrl up` goes from 1 to 2 to 3 replicas through `scale`, with scripted engines (200
tokens a second per request, so that two cores are no limit) and with vLLM (where on two cores a second
engine adds little).
virtual: 8 to 4,096 replicas at the token rate of a GPU (2,500/s each, groups of 16 answers of 4,096 tokens, a
step of one group per replica) in the planner's virtual time, with the real ledger and its order of waiting:
function calls of the buffer's requests per trajectory, at most 1.2 times those of the smallest fleet, and
their processor time, which the planner's own memory lengthens. The learner is once the slower side, so that
replicas wait for leases, once the faster.
sockets: 8, 64 and 512 replicas with connections of their own, played by two processes, against the buffer's
process: its processor time per trajectory at one and the same rate, over at least 20 steps of the learner. No
fleet may cost more than 1.2 times the smallest.
sync: computation of weight sync's coordinator, the service without its sockets, per member: of a version,
with receivers that obey at once, and of a heartbeat, a poll that returns empty. Every request has a turn of
its own.
control: computation of the supervisor per replica, with services that are made up: of a pulse while nothing
happens, of a snapshot for `asyncrl status` and the page, of a loss of an eighth of the replicas. Both for 8
to 1,024: no fleet may cost more per member than 1.2 times the smallest.
A replica trains one group per version, so a sixteenth of a version's computation belongs to a trajectory: it
is judged together with the buffer's computation too.
saturation: the buffer's process at its highest load; one core of it is full at `per_cpu_s`.

All of it takes about 10 minutes, `--quick` (scripted, 1 to 2 replicas; smaller fleets) under a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fleet.parts import ledger, live, sockets
from benchmarks.fleet.parts.control import ControlFleet
from benchmarks.fleet.parts.sync import SyncFleet
from benchmarks.harness.options import Verdict, end_on_sigterm, judge, make_parser, report
from benchmarks.harness.rows import Row

MAX_GROWTH = 1.2
PARTS = ("live", "virtual", "sockets", "sync", "control", "saturation")
FLEETS, QUICK_FLEETS = (8, 64, 512, 4096), (8, 512)
SOCKET_FLEETS, QUICK_SOCKET_FLEETS = (8, 64, 512), (8, 128)
MEMBERS = (8, 64, 512, 1024)
PER_MEMBER = {
    "sync": {"us_per_member": "version", "us_per_heartbeat": "heartbeat"},
    "control": {"us_per_pulse": "pulse", "us_per_snapshot": "snapshot", "us_per_loss": "loss"},
}
"""Judged figures of a part: microseconds of a member for each."""
LOADS = {"learner waits": 0.8, "replicas wait": 1.25}
"""Ratio of the learner's time for a step to the fleet's time to generate it."""
ROUNDS = 5
TRAJECTORIES, SYNCS = 8192, 1024
"""Of a fleet in virtual time, and members that a version reaches, or that poll, in each round, at least."""
MIN_PULSES, MIN_PULSED = 8, 4096
"""Pulses of a fleet, and of all its replicas together, at least."""
NUM_LOSSES = 5
SETTLING_STEPS = 2
SOCKET_GROUPS_PER_S = 40.0
"""Of all replicas together: 24 MB/s, a third of what two shared cores carry."""

Figures = dict[str, Any]
Say = Callable[[str], None]


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    given = read_arguments(arguments)
    end_on_sigterm()  # the live run must not outlive this
    results = measure(given, lambda sentence: print(sentence, file=sys.stderr, flush=True))
    return report(given, results, table, check, make_rows(results))


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = make_parser("asyncrl bench scale", __doc__, "fewer and smaller fleets, no vLLM: under a minute")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--only", type=_read_parts, default=PARTS, metavar="PARTS", help=f"of {','.join(PARTS)}"
    )
    return parser.parse_args(arguments)


def _read_parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"'{unknown[0]}' is none of {', '.join(PARTS)}")
    return parts


def measure(given: argparse.Namespace, say: Say) -> Figures:
    """Return the figures of all parts that were asked for.

    Raises:
        ServiceFailed: A process of a fleet, or the live run, has failed.
    """
    takes = {
        "live": measure_live,
        "virtual": measure_virtual,
        "sockets": measure_sockets,
        "sync": measure_sync,
        "control": measure_control,
        "saturation": measure_saturation,
    }
    found: Figures = {"benchmark": "scale", "quick": given.quick}
    for part in given.only:
        found[part] = takes[part](given.quick, say)
    return found


def measure_live(quick: bool, say: Say) -> list[Figures]:
    """Return a row per engine and number of replicas."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        if quick:
            return live.measure("scripted", (1, 2), 5.0, Path(folder), say)
        engines = ("scripted", "vllm")
        rows = [live.measure(engine, (1, 2, 3), 20.0, Path(folder), say) for engine in engines]
    return [row for found in rows for row in found]


def measure_virtual(quick: bool, say: Say) -> list[Figures]:
    """Return a row per load and fleet."""
    rows = []
    for load, factor in LOADS.items():
        for count in QUICK_FLEETS if quick else FLEETS:
            fleet = ledger.Fleet(count, factor)
            step = fleet.groups_per_step * ledger.GROUP_SIZE
            fleet.run(SETTLING_STEPS * step)
            say(f"{count} replicas are in their stride, {load}")
            cost = fleet.run(max(TRAJECTORIES, step))
            rows.append(
                {
                    "load": load,
                    "replicas": count,
                    "us_per_trajectory": cost.us_per_trajectory,
                    "tick_share": cost.tick_share,
                    "core_share": cost.core_share,
                    "trajectories_per_s": cost.trajectories / cost.virtual_s,
                    "residue": fleet.residue,
                    "calls_per_trajectory": fleet.count_calls(TRAJECTORIES // 4),
                }
            )
    return rows


def measure_sockets(quick: bool, say: Say) -> list[Figures]:
    """Return a row per fleet, all offered the same."""
    rows = []
    for count in QUICK_SOCKET_FLEETS if quick else SOCKET_FLEETS:
        load = sockets.Load(count, SOCKET_GROUPS_PER_S)
        taken = sockets.measure(load, 2.0 if quick else 5.0, 3.0 if quick else 20.0)
        cost = f"{taken.us_per_trajectory:.0f} us per trajectory"
        say(f"{count} replicas by sockets: {cost}, {taken.per_s / sockets.GROUP_SIZE:.1f} groups/s")
        rows.append(_describe(count, taken))
    return rows


def measure_saturation(quick: bool, say: Say) -> list[Figures]:
    """Return a row per fleet that sends as much as is taken."""
    rows = []
    for count in (8,) if quick else SOCKET_FLEETS:
        taken = sockets.measure(sockets.Load(count), 2.0 if quick else 5.0, 3.0 if quick else 10.0)
        say(f"{count} replicas by sockets, as much as goes: {taken.per_s:.0f} trajectories per second")
        per_cpu_s = 1e6 / taken.us_per_trajectory
        rows.append(
            _describe(count, taken)
            | {
                "per_cpu_s": per_cpu_s,
                "mb_per_cpu_s": per_cpu_s * sockets.GROUP_BYTES / sockets.GROUP_SIZE / 1e6,
                "gpu_replicas_per_cpu": per_cpu_s * ledger.NUM_TOKENS / ledger.GPU_TOKENS_PER_S,
            }
        )
    return rows


def _describe(count: int, taken: sockets.Taken) -> Figures:
    return {
        "replicas": count,
        "us_per_trajectory": taken.us_per_trajectory,
        "trajectories_per_s": taken.per_s,
        "mb_per_s": taken.per_s * sockets.GROUP_BYTES / sockets.GROUP_SIZE / 1e6,
        "core_share": taken.cpu_s / taken.seconds,
    }


def measure_sync(quick: bool, say: Say) -> list[Figures]:
    """Return a row per fleet: processor time of the coordinator."""
    rows = []
    for count in MEMBERS:
        fleet = SyncFleet(count)
        fleet.sync(1)  # it also forms the group
        times = max(1, SYNCS // count)
        synced = [fleet.sync(times) / times for _ in range(ROUNDS)]
        beaten = [fleet.beat(times) / times for _ in range(ROUNDS)]
        fleet.close()
        say(f"{count} members: {1e3 * statistics.median(synced):.1f} ms of the coordinator per version")
        rows.append(
            {
                "replicas": count,
                "us_per_member": [1e6 * one / count for one in synced],
                "us_per_heartbeat": [1e6 * one / count for one in beaten],
            }
        )
    return rows


def measure_control(quick: bool, say: Say) -> list[Figures]:
    """Return a row per fleet: processor time of the supervisor."""
    rows = []
    for count in MEMBERS:
        fleet = ControlFleet(count, max(MIN_PULSES, MIN_PULSED // count), NUM_LOSSES)
        fleet.run()
        say(f"{count} replicas: {1e3 * statistics.median(fleet.pulse_s):.1f} ms of the supervisor per pulse")
        rows.append(
            {
                "replicas": count,
                "us_per_pulse": [1e6 * one / count for one in fleet.pulse_s],
                "us_per_snapshot": [1e6 * one / count for one in fleet.view_s],
                "us_per_loss": [1e6 * one / fleet.num_lost for one in fleet.loss_s],
            }
        )
    return rows


def add_sync(socket_rows: Sequence[Figures], sync_rows: Sequence[Figures]) -> list[Figures]:
    """Return the rows of fleets in both, with the coordinator's part of a trajectory added.

    Of one fleet alone there are none: it has not grown.
    """
    sync_us = {row["replicas"]: _fastest(row["us_per_member"]) / ledger.GROUP_SIZE for row in sync_rows}
    both = [
        row | {"us_per_trajectory": row["us_per_trajectory"] + sync_us[row["replicas"]]}
        for row in socket_rows
        if row["replicas"] in sync_us
    ]
    return both if len(both) > 1 else []


def growth(rows: Sequence[Figures], name: str) -> float:
    """Return what the dearest fleet costs over what the smallest does, by the fastest rounds of each.

    Raises:
        ValueError: There is no other fleet to compare with.
    """
    smallest, *others = sorted(rows, key=_replicas)
    return max(_fastest(row[name]) for row in others) / _fastest(smallest[name])


def _replicas(row: Figures) -> int:
    return int(row["replicas"])


def _fastest(value: float | Sequence[float]) -> float:
    return float(value) if isinstance(value, int | float) else min(value)


def table(results: Figures) -> str:
    """Return all parts as text."""
    tell: dict[str, Callable[[Figures], str]] = {
        "live": _tell_live,
        "virtual": _tell_virtual,
        "sockets": _tell_sockets,
        "sync": partial(_tell_members, "sync"),
        "control": partial(_tell_members, "control"),
        "saturation": _tell_sockets,
    }
    return "\n".join(f"{part}, {tell[part](row)}" for part in PARTS for row in results.get(part, ()))


def _tell_live(row: Figures) -> str:
    told = (
        f"{row['engine']}, {row['replicas']} replicas: {row['tokens_per_s']:.0f} tokens/s, "
        f"learner idle {row['learner_idle_share']:.0%}, "
        f"step {row['step_s']:.3f} s, jitter {row['step_jitter']:.0%}"
    )
    if "first_trajectory_s" not in row:
        return told
    longest_s = row.get("joining_step_max_s", 0.0)
    return (
        f"{told}; first trajectory {row['first_trajectory_s']:.1f} s after the command, "
        f"longest step meanwhile {longest_s:.2f} s"
    )


def _tell_virtual(row: Figures) -> str:
    us, calls = _fastest(row["us_per_trajectory"]), row["calls_per_trajectory"]
    return (
        f"{row['load']}, {row['replicas']} replicas ({row['trajectories_per_s']:.0f} trajectories/s): "
        f"{us:.1f} us and {calls:.0f} calls per trajectory; {row['core_share']:.2%} of a core"
    )


def _tell_sockets(row: Figures) -> str:
    told = (
        f"{row['replicas']} replicas: {row['trajectories_per_s']:.0f} trajectories/s, "
        f"{row['mb_per_s']:.0f} MB/s, {row['us_per_trajectory']:.0f} us per trajectory"
    )
    if "per_cpu_s" not in row:
        return told
    return (
        f"{told}; one core is full at {row['per_cpu_s']:.0f}/s, {row['mb_per_cpu_s']:.0f} MB/s: "
        f"{row['gpu_replicas_per_cpu']:.0f} replicas of {ledger.GPU_TOKENS_PER_S:.0f} tokens/s"
    )


def _tell_members(part: str, row: Figures) -> str:
    told = (f"{_fastest(row[name]):.0f} us per {what}" for name, what in PER_MEMBER[part].items())
    return f"{row['replicas']} members, of each {', '.join(told)}"


def check(results: Figures) -> Verdict:
    """Judge the growth of a trajectory's and of a member's cost with the fleet, and the account."""
    ratios: dict[str, float] = {}
    for load in LOADS:
        rows = [row for row in results.get("virtual", ()) if row["load"] == load]
        if rows:
            ratios[f"calls per trajectory, {load}"] = MAX_GROWTH / growth(rows, "calls_per_trajectory")
            ratios[f"residue, {load}"] = float(not any(row["residue"] for row in rows))
    for part, names in PER_MEMBER.items():
        rows = results.get(part, ())
        is_whole = len(rows) > 1 and names.keys() <= rows[0].keys()  # stored rows may be of before a name was
        for name in names if is_whole else ():
            ratios[f"{part}, {name}"] = MAX_GROWTH / growth(rows, name)
    rows = results.get("sockets", ())
    if rows:
        ratios["cost per trajectory, by sockets"] = MAX_GROWTH / growth(rows, "us_per_trajectory")
        if together := add_sync(rows, results.get("sync", ())):
            name = "cost per trajectory, buffer and coordinator"
            ratios[name] = MAX_GROWTH / growth(together, "us_per_trajectory")
    return judge(ratios) if ratios else (False, "no judged part was measured")


def make_rows(results: Figures) -> list[Row]:
    """Return a row per line of the table."""
    rows = []
    for part in PARTS:
        for figures in results.get(part, ()):
            case = {"part": part, "replicas": figures["replicas"], "quick": int(results["quick"])}
            case |= {name: figures[name] for name in ("load", "engine") if name in figures}
            samples = {name: value for name, value in figures.items() if name not in case}
            step_samples = samples.pop("step_samples_s", None)
            samples.pop("joining_step_samples_s", None)
            row = Row.of("scale", case, samples)
            if step_samples is not None:
                row = row.with_samples("step_s", step_samples)
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
