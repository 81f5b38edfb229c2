"""Cost of a weight sync, beside the cost of sending its bytes alone.

Real services on loopback: a coordinator, a publisher, 1, 2 and 4 receivers, a learner's process that
publishes; then receivers that join late. In turns with each sync, in the same run: the same by receivers that
map the publisher's copy, and by engines that get it from the learner directly; bare gloo broadcasts of the
same bytes in the same buckets, and tensor by tensor, between processes of their own; a memcpy; a plain copy
by the learner.
The full run adds a real vLLM engine: its pause against a local load of the same weights, and its speed
while a transfer goes on. Every ratio is the median of the turns' ratios.

The learner's stall, and a direct round, stand there by stage, beside what cannot be saved of them, measured
alone in the same turn: the copies, the digest and a call of a stall; packing, digest and call of a version
that is one bucket, where nothing overlaps. On each path of `--path` a receiver joins while
versions go out, and a sender is killed in the middle of one.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from asyncrl.core.config.tree import WeightSyncSection
from benchmarks.harness.figures import make_rows
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.harness.rows import Row
from benchmarks.reports.plots import save
from benchmarks.weight_sync.peers.deaths import NUM_RECEIVERS, measure_death
from benchmarks.weight_sync.peers.direct import run_learner, run_replica
from benchmarks.weight_sync.peers.engine import measure_engine
from benchmarks.weight_sync.peers.gloo import BUCKETED, MEMCPY, TENSORS, BareGroup
from benchmarks.weight_sync.peers.joiners import SPARE_S, measure_joiners
from benchmarks.weight_sync.peers.services import Fleet, Sync
from benchmarks.weight_sync.peers.trainer_client import ask_clients
from benchmarks.weight_sync.publish import MAX_RATIO, measure_publish
from benchmarks.weight_sync.stripes import COUNTS, QUICK_COUNTS, measure_stripes, parse_counts, stripes_lines

MB = 10**6
FULL = [(100, 1), (100, 2), (100, 4), (400, 1), (400, 2), (400, 4)]
QUICK = [(16, 1), (64, 1)]
"""Megabytes of a version, and receivers."""
NUM_TURNS, NUM_QUICK_TURNS, NUM_WARM_UP = 11, 5, 4
NUM_JOINERS, NUM_QUICK_JOINERS = 4, 1
STAGED, DIRECT, MAPPED = "staged", "direct", "mapped"
PATHS = (STAGED, DIRECT)
NUM_COPIES = {STAGED: 1, DIRECT: 2}
"""Of a version, that the learner waits for: into the segment, and a snapshot."""
STALL_PARTS = ("snapshot", "copy", "digest", "call", "gather", "other")
HOLD_S = {STAGED: 6.0, DIRECT: 3.0}
"""A publisher that died is missed after 3 s, and started anew; a learner's rank at once."""
NUM_ENGINE_TURNS, RATE_S = 5, 4.0
TARGET_RATE, TARGET_PAUSE, TARGET_FLOOR = 0.8, 1.5, 0.8
WAYS = (BUCKETED, TENSORS, MEMCPY)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    quick = "16 and 64 MB, fewer turns, no engine: under a minute"
    parser = make_parser("asyncrl bench weight_sync", __doc__, quick=quick)
    parser.add_argument("--bucket-bytes", type=int, default=WeightSyncSection().bucket_bytes)
    rows_help = "sizes to measure, without the engine: megabytes:receivers"
    parser.add_argument("--rows", nargs="+", type=parse_row, metavar="MB:N", help=rows_help)
    keys_help = "measure those sizes as off loopback: sockets with keys, broadcasts with tags"
    parser.add_argument("--keys", action="store_true", help=keys_help)
    path_help = "paths to measure, separated by commas: staged, direct; all without it"
    parser.add_argument("--path", type=parse_paths, default=PATHS, metavar="PATHS", help=path_help)
    stripes_help = "numbers of publishers that send a stripe each; 1,2,4 without it, 1,2 with --quick"
    parser.add_argument("--stripes", type=parse_counts, metavar="COUNTS", help=stripes_help)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # as a learner on a CPU does: with two a plain copy takes half as long
    has_engine = not given.quick and given.rows is None
    rows = given.rows or (QUICK if given.quick else FULL)
    how = {"quick": given.quick, "has_engine": has_engine, "has_keys": given.keys, "paths": given.path}
    how["stripes"] = given.stripes or (QUICK_COUNTS if given.quick else COUNTS)
    results = measure(rows, given.bucket_bytes, **how)
    code = report(given, results, table, check, describe(results))
    if given.json is not None and given.json.suffix != ".png":
        draw(results, given.json.with_suffix(".png"))  # last: the rows are kept if it fails
    return code


def parse_row(text: str) -> tuple[int, int]:
    """Return megabytes and receivers of `megabytes:receivers`; raises ValueError."""
    megabytes, _, num_receivers = text.partition(":")
    return int(megabytes), int(num_receivers)


def parse_paths(text: str) -> tuple[str, ...]:
    """Return the paths of `staged,direct`; raises ValueError."""
    found = tuple(dict.fromkeys(text.split(",")))
    if not set(found) <= set(PATHS):
        raise ValueError(text)
    return found


def measure(
    rows: Sequence[tuple[int, int]],
    bucket_bytes: int,
    *,
    quick: bool,
    has_engine: bool,
    has_keys: bool = False,
    paths: Sequence[str] = PATHS,
    stripes: Sequence[int] = (),
) -> dict[str, Any]:
    """Measure the rows (megabytes, receivers), and what concerns vLLM if `has_engine`."""
    num_joiners = NUM_QUICK_JOINERS if quick else NUM_JOINERS
    num_turns = NUM_QUICK_TURNS if quick else NUM_TURNS
    sizes = sorted({megabytes for megabytes, _ in rows})
    middle_bytes = max(sizes[-1] * MB, 2 * bucket_bytes)  # a version of one bucket has no middle to die in
    return {
        "benchmark": "weight_sync",
        "quick": quick,
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "bucket_bytes": bucket_bytes,
        "keys": has_keys,
        "rows": [
            measure_size(megabytes * MB, num_receivers, bucket_bytes, num_turns, has_keys, paths)
            for megabytes, num_receivers in rows
        ],
        "joiners": {
            path: measure_joiners(make_fleet(path, 1, sizes[-1] * MB, bucket_bytes), num_joiners)
            for path in paths
        },
        "deaths": {
            path: measure_death(make_fleet(path, NUM_RECEIVERS, middle_bytes, bucket_bytes)) for path in paths
        },
        "stripes": {
            str(count): measure_stripes(
                count, sizes[0 if quick else -1] * MB, bucket_bytes, num_turns, quick=quick
            )
            for count in stripes
            if STAGED in paths
        },
        "publish": [measure_publish(megabytes * MB, num_turns) for megabytes in sizes],
        "engine": measure_engine(NUM_ENGINE_TURNS, RATE_S, bucket_bytes) if has_engine else None,
        "vllm_clients": ask_clients() if has_engine else None,
    }


def make_fleet(
    path: str,
    num_receivers: int,
    num_bytes: int,
    bucket_bytes: int,
    has_keys: bool = True,
    *,
    maps: bool = False,
) -> Fleet:
    """Return services of a path; `maps` as of `Fleet`."""
    ends = (run_learner, run_replica) if path == DIRECT else None
    return Fleet(num_receivers, num_bytes, bucket_bytes, has_keys, maps=maps, entries=ends)


def measure_size(
    num_bytes: int,
    num_receivers: int,
    bucket_bytes: int,
    num_turns: int,
    has_keys: bool = False,
    paths: Sequence[str] = PATHS,
) -> dict[str, Any]:
    """Return the seconds of each turn and way for one size and number of receivers.

    The first sync forms the group and is given alone; some more let every segment be touched once.
    """
    ways = [(path, path) for path in paths] + [(MAPPED, STAGED)] * (STAGED in paths)
    with ExitStack() as stack:
        fleets = {}
        for way, path in ways:
            maps = way == MAPPED
            fleet = make_fleet(path, num_receivers, num_bytes, bucket_bytes, has_keys, maps=maps)
            fleets[way] = stack.enter_context(closing(fleet))
            fleet.attend()
        first = fleets[paths[0]].sync()
        bare = stack.enter_context(closing(BareGroup(num_receivers, num_bytes, bucket_bytes)))
        turns = [_take_turn(fleets, bare) for _ in range(NUM_WARM_UP + num_turns)][NUM_WARM_UP:]
    return {
        "num_bytes": fleets[paths[0]].num_bytes,
        "num_receivers": num_receivers,
        "first_transfer_s": first.transfer_s,
        **{name: [turn[name] for turn in turns] for name in turns[0]},
    }


def _take_turn(fleets: Mapping[str, Fleet], bare: BareGroup) -> dict[str, float]:
    figures: dict[str, float] = {}
    for way, fleet in fleets.items():
        sync = fleet.sync()
        of_way = "" if way == STAGED else f"{way}_"
        figures |= {f"{of_way or 'transfer_'}s": sync.transfer_s, f"{of_way}ready_s": sync.ready_s}
        if way in NUM_COPIES:
            parts = {"s": sync.publish_s, **fleet.learner.ask("parts")}
            figures |= {f"{of_way}publish_{name}": seconds for name, seconds in parts.items()}
        if way == DIRECT:
            figures |= _stages_of(fleet, sync)
    figures |= {f"{way}_s": bare.seconds(way) for way in WAYS}
    learner = next(iter(fleets.values())).learner
    return figures | {f"{act}_s": float(learner.ask(act)) for act in ("copy", "digest", "call")}


def _stages_of(fleet: Fleet, sync: Sync) -> dict[str, float]:
    """Return the seconds of a direct round: until packs travel, to their end, its report, a load.

    `packing_s` is in `carried_s`; `cpu_s` are the seconds that both ends together have computed meanwhile.
    """
    source, sinks = fleet.learner.ask("carried"), [worker.ask("carried") for worker in fleet.workers]
    ended_s, verified_s = max(sink["ended_s"] for sink in sinks), max(sync.times["verified"])
    return {
        "direct_round/ordered_s": source["began_s"] - min(sync.times["transfer"]),
        "direct_round/carried_s": ended_s - source["began_s"],
        "direct_round/packing_s": source["pack_s"],
        "direct_round/told_s": verified_s - ended_s,
        "direct_round/loaded_s": max(sync.times["loaded"]) - verified_s,
        "direct_round/cpu_s": sum(one["cpu_s"] for one in (source, *sinks)),
    }


def ratio(row: dict[str, Any], above: str, below: str) -> float:
    """Return the median over the turns of one figure divided by another one; nan if one was not measured."""
    if not {above, below} <= row.keys():
        return math.nan
    return float(statistics.median(a / b for a, b in zip(row[above], row[below], strict=True)))


def describe(results: dict[str, Any]) -> list[Row]:
    """Return a row per size and number of receivers, with the ratios of each turn, and those of the rest."""
    run = {"bucket_bytes": results["bucket_bytes"], "quick": results["quick"]}
    with_keys = {"keys": True} if results["keys"] else {}
    rows = [_describe_row(row, run | with_keys) for row in results["rows"]]
    rest = {name: value for name, value in results.items() if name not in ("rows", "keys")}
    return rows + make_rows("weight_sync", rest)


def _describe_row(row: dict[str, Any], run: dict[str, Any]) -> Row:
    ratios = {
        "of_bare_gloo": ("bucketed_s", "transfer_s"),
        "of_tensors": ("tensors_s", "transfer_s"),
        "of_memcpy": ("memcpy_s", "transfer_s"),
        "mapped_of_copied": ("transfer_s", "mapped_s"),
        "direct_of_bare_gloo": ("bucketed_s", "direct_s"),
        "direct_stall": ("direct_publish_s", "copy_s"),
        "stall": ("publish_s", "copy_s"),
    }
    samples: dict[str, Any] = {name: value for name, value in row.items() if not name.startswith("num_")}
    for name, way in {
        "gb_per_s": "transfer_s",
        "mapped_gb_per_s": "mapped_s",
        "direct_gb_per_s": "direct_s",
    }.items():
        if way in row:
            samples[name] = [row["num_bytes"] / seconds / 1e9 for seconds in row[way]]
    for name, (above, below) in ratios.items():
        if {above, below} <= row.keys():
            samples[name] = [a / b for a, b in zip(row[above], row[below], strict=True)]
    case = {"megabytes": round(row["num_bytes"] / MB), "receivers": row["num_receivers"], **run}
    return Row.of("weight_sync", case, samples)


def table(results: dict[str, Any]) -> str:
    """Return the ratios as text."""
    names = (
        "GB/s",
        "mapped",
        "direct",
        "of bare",
        "direct of",
        "of tensors",
        "of memcpy",
        "bare GB/s",
        "stall/copy",
        "ready s",
        "first s",
    )
    lines = [f"{'MB':>5} {'receivers':>9} " + " ".join(f"{name:>10}" for name in names)]
    lines += [_line(row) for row in results["rows"]]
    lines.append(
        f"buckets of {results['bucket_bytes'] / (1 << 20):g} MiB; GB/s to each receiver, copied, mapped and "
        "from the learner to the engine, digests included; shares of bare gloo"
    )
    for row in results["rows"]:
        lines += [*_stall_lines(row), *_round_lines(row), *_floor_lines(row, results["bucket_bytes"])]
    for path, joiners in results["joiners"].items():
        lines.append(_joiners_line(path, joiners))
    for path, death in results["deaths"].items():
        who = "a learner's rank" if path == DIRECT else "the publisher"
        lines.append(
            f"{path}, {death['num_bytes'] / MB:.0f} MB: {who} dies in the middle of a version, all have "
            f"loaded it {death['hold_s']:.2f} s later (a whole sync {death['sync_s']:.2f} s)"
        )
    lines += stripes_lines(results["stripes"])
    lines += [
        f"learner stall, {row['num_bytes'] / MB:.0f} MB, nobody receives: {row['ratio']:.2f} of a plain "
        f"copy; the copy, its digest and an empty call alone {row.get('floor', math.nan):.2f}"
        for row in results["publish"]
    ]
    if results["engine"] is not None:
        lines += _engine_lines(results["engine"])
    if results["vllm_clients"] is not None:
        lines += [f"vLLM's trainer client {name}: {said}" for name, said in results["vllm_clients"].items()]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    figures = (
        _rate(row, "transfer_s"),
        _rate(row, "mapped_s"),
        _rate(row, "direct_s"),
        ratio(row, "bucketed_s", "transfer_s"),
        ratio(row, "bucketed_s", "direct_s"),
        ratio(row, "tensors_s", "transfer_s"),
        ratio(row, "memcpy_s", "transfer_s"),
        _rate(row, "bucketed_s"),
        ratio(row, "publish_s", "copy_s"),
        statistics.median(row.get("ready_s", [math.nan])),
        row["first_transfer_s"],
    )
    sizes = f"{row['num_bytes'] / MB:>5.0f} {row['num_receivers']:>9} "
    return sizes + " ".join(f"{value:>10.3g}" for value in figures)


def _rate(row: dict[str, Any], name: str) -> float:
    """Return gigabytes per second that reach each receiver; nan where that was not measured."""
    return float(row["num_bytes"] / statistics.median(row[name]) / 1e9) if name in row else math.nan


def stall_floor(row: dict[str, Any], path: str) -> float:
    """Return how many plain copies the copies, the digest and one empty call of a stall take alone."""
    return NUM_COPIES[path] + ratio(row, "digest_s", "copy_s") + ratio(row, "call_s", "copy_s")


def rate_floor(row: dict[str, Any], path: str) -> float:
    """Return the share of bare gloo's rate that a version of one bucket can have: it is packed before it
    travels, digested after it has come, and told of by a message each way.
    """
    packing_s = row["direct_round/packing_s"] if path == DIRECT else [0.0] * len(row["bucketed_s"])
    parts = zip(row["bucketed_s"], row["digest_s"], row["call_s"], packing_s, strict=True)
    return float(statistics.median(bare_s / (bare_s + sum(rest)) for bare_s, *rest in parts))


def _stall_lines(row: dict[str, Any]) -> list[str]:
    lines = []
    for path in PATHS:
        of_path = "" if path == STAGED else f"{path}_"
        if f"{of_path}publish_call_s" not in row:
            continue  # this path was not measured, or not by part
        names = {part: f"{of_path}publish_{part}_s" for part in STALL_PARTS}
        parts = {part: ratio(row, name, "copy_s") for part, name in names.items() if name in row}
        lines.append(
            f"stall while they receive, {row['num_bytes'] / MB:.0f} MB to {row['num_receivers']}, {path}: "
            f"{ratio(row, f'{of_path}publish_s', 'copy_s'):.2f} plain copies ("
            + ", ".join(f"{part} {share:.2f}" for part, share in parts.items())
            + f"); its copies, its digest and an empty call alone {stall_floor(row, path):.2f}"
        )
    return lines


def _floor_lines(row: dict[str, Any], bucket_bytes: int) -> list[str]:
    if row["num_bytes"] > bucket_bytes or "call_s" not in row:
        return []
    ways = {STAGED: "transfer_s", DIRECT: "direct_s"}
    shares = [
        f"{path} {ratio(row, 'bucketed_s', way):.2f} of {rate_floor(row, path):.2f}"
        for path, way in ways.items()
        if way in row
    ]
    digest_ms, call_ms = (1e3 * statistics.median(row[name]) for name in ("digest_s", "call_s"))
    parts = f"its packing, a digest ({digest_ms:.1f} ms) and an empty call ({call_ms:.1f} ms)"
    size = f"{row['num_bytes'] / MB:.0f} MB, one bucket, to {row['num_receivers']}"
    return [f"{size}: share of bare gloo, and what {parts} alone would leave: {', '.join(shares)}"]


def _round_lines(row: dict[str, Any]) -> list[str]:
    if "direct_round/carried_s" not in row:
        return []
    stages = ("ordered", "carried", "packing", "told", "loaded", "cpu")
    found = {stage: 1e3 * statistics.median(row[f"direct_round/{stage}_s"]) for stage in stages}
    gloo_ms, digest_ms = (1e3 * statistics.median(row[name]) for name in ("bucketed_s", "digest_s"))
    size = f"{row['num_bytes'] / MB:.0f} MB to {row['num_receivers']}"
    inside = f"{found['packing']:.1f} of it packing; both ends compute {found['cpu']:.1f}"
    line = (
        f"direct round, {size}, ms: {found['ordered']:.1f} until packs travel, {found['carried']:.1f} under "
        f"way ({inside} on {os.cpu_count()} cores), {found['told']:.1f} until that is known, "
        f"{found['loaded']:.1f} to load; bare gloo {gloo_ms:.1f}, one digest {digest_ms:.1f}"
    )
    return [line]


def _joiners_line(path: str, joiners: dict[str, Any]) -> str:
    worst_s, sync_s = max(joiners["hello_to_ready_s"]), statistics.median(joiners["sync_s"])
    steps = f"{ratio(joiners, 'step_s', 'step_alone_s'):.2f} of its steps alone"
    size = f"{joiners['num_bytes'] / MB:.0f} MB"
    return (
        f"late joiners, {path}, {size}: hello to serving at most {worst_s:.2f} s, "
        f"{joiners['amid_s']:.2f} s while versions go out (one transfer and one load {sync_s:.2f} s); "
        f"the learner's steps meanwhile {steps}"
    )


def _engine_lines(engine: dict[str, Any]) -> list[str]:
    median = {name: statistics.median(engine[name]) for name in ("pause_s", "load_s", "reload_s")}
    speed = ratio(engine, "tokens_per_s_during_transfers", "tokens_per_s_alone")
    share = statistics.median(engine["transfer_share"])
    sizes = f"{engine['num_bytes'] / MB:.0f} MB, {engine['num_requests']} requests in flight"
    at_rest = f"{ratio(engine, 'pause_s', 'load_s'):.2f} of the same load at rest ({median['load_s']:.3f} s)"
    own = f"{ratio(engine, 'pause_s', 'reload_s'):.2f} of vLLM's own reload ({median['reload_s']:.3f} s)"
    busy = f"versions published and sent without a rest, {share:.0%} of the time in transfer"
    return [
        f"vLLM, {sizes}: pause {median['pause_s']:.3f} s, {at_rest}, {own}",
        f"generation with {busy}: {speed:.2f} of the rate without",
    ]


def _judge_row(row: dict[str, Any], bucket_bytes: int) -> dict[str, float]:
    """Return the ratios to their targets of the rates and stalls that were measured."""
    ratios, size = {}, f"{row['num_bytes'] / MB:.0f} MB, {row['num_receivers']} receivers"
    ways = {STAGED: ("transfer and digest", "transfer_s"), DIRECT: ("direct transfer", "direct_s")}
    for path, (what, way) in ways.items():
        if way in row:
            is_one = row["num_bytes"] <= bucket_bytes and "call_s" in row
            least = min(TARGET_RATE, TARGET_FLOOR * rate_floor(row, path)) if is_one else TARGET_RATE
            ratios[f"{what} of bare gloo, {size}, target {least:.2f}"] = ratio(row, "bucketed_s", way) / least
    for path, name in {STAGED: "publish_s", DIRECT: "direct_publish_s"}.items():
        if {name, "digest_s", "call_s"} <= row.keys():
            most = max(MAX_RATIO, stall_floor(row, path) / TARGET_FLOOR)
            what = f"{path} stall of a plain copy, {size}, target {most:.2f}"
            ratios[what] = most / ratio(row, name, "copy_s")
    return ratios


def check(results: dict[str, Any]) -> Verdict:
    """Return whether every target is met, and the worst ratio to a target as a sentence."""
    ratios: dict[str, float] = {}
    for row in results["rows"]:
        if row["num_receivers"] == 1:
            ratios |= _judge_row(row, results["bucket_bytes"])
    for path, joiners in results["joiners"].items():
        late_s = max(*joiners["hello_to_ready_s"], joiners["amid_s"])
        most_s = statistics.median(joiners["sync_s"]) + SPARE_S
        ratios[f"late joiner of a transfer, a load and 1 s, {path}"] = most_s / late_s
    for path, death in results["deaths"].items():
        most_s = HOLD_S[path] + death["sync_s"]
        ratios[f"dead sender of a sync and {HOLD_S[path]:g} s, {path}"] = most_s / death["hold_s"]
    for count, figures in results["stripes"].items():
        if "death" in figures:
            most_s = HOLD_S[STAGED] + figures["death"]["sync_s"]
            what = f"dead publisher of a sync and {HOLD_S[STAGED]:g} s, {count} stripes"
            ratios[what] = most_s / figures["death"]["hold_s"]
    for row in results["publish"]:
        size = f"{row['num_bytes'] / MB:.0f} MB"
        most = max(MAX_RATIO, row.get("floor", 0.0) / TARGET_FLOOR)
        ratios[f"learner stall of a plain copy, {size}, target {most:.2f}"] = most / row["ratio"]
    if results["engine"] is not None:
        pause = ratio(results["engine"], "pause_s", "load_s")
        ratios[f"pause of a local load, target {TARGET_PAUSE}"] = TARGET_PAUSE / pause
    return judge(ratios)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the rates of all ways, a group of bars per size and number of receivers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    rows = results["rows"]
    ways = {
        "asyncrl: transfer and digest": "transfer_s",
        "bare gloo, buckets": "bucketed_s",
        "bare gloo, tensor by tensor": "tensors_s",
        "memcpy": "memcpy_s",
    }
    for place, (label, name) in enumerate(ways.items()):
        at = [index + (place - 1.5) * 0.2 for index in range(len(rows))]
        axes.bar(at, [_rate(row, name) for row in rows], width=0.19, label=label)
    labels = [f"{row['num_bytes'] / MB:.0f} MB to {row['num_receivers']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylabel("GB/s to each receiver")
    axes.legend(loc="best", fontsize="small")
    save(figure, path)
