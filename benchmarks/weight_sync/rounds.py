"""Cost of a weight sync, beside the cost of sending its bytes alone.

Real services on loopback: a coordinator, a publisher, 1, 2 and 4 receivers, a learner's process that
publishes; then receivers that join late. In turns with each sync, in the same run: the same by receivers that
map the publisher's copy, and by engines that get it from the learner directly; bare gloo broadcasts of the
same bytes in the same buckets, and tensor by tensor, between processes of their own; a memcpy; a plain copy
by the learner.
The full run adds a real vLLM engine: its pause against a local load of the same weights, and its speed
while a transfer goes on. Every ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncrl.core.config.tree import WeightSyncSection
from benchmarks.harness.figures import make_rows
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.harness.rows import Row
from benchmarks.reports.plots import save
from benchmarks.weight_sync.peers.direct import run_learner, run_replica
from benchmarks.weight_sync.peers.engine import measure_engine
from benchmarks.weight_sync.peers.gloo import BUCKETED, MEMCPY, TENSORS, BareGroup
from benchmarks.weight_sync.peers.joiners import SPARE_S, measure_joiners
from benchmarks.weight_sync.peers.services import Fleet
from benchmarks.weight_sync.peers.trainer_client import ask_clients
from benchmarks.weight_sync.publish import MAX_RATIO, measure_publish

MB = 10**6
FULL = [(100, 1), (100, 2), (100, 4), (400, 1), (400, 2), (400, 4)]
QUICK = [(16, 1), (64, 1), (64, 2)]
"""Megabytes of a version, and receivers."""
NUM_TURNS, NUM_QUICK_TURNS, NUM_WARM_UP = 11, 7, 4
NUM_JOINERS = 4
NUM_ENGINE_TURNS, RATE_S = 5, 4.0
TARGET_RATE, TARGET_PAUSE = 0.8, 1.5
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
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # as a learner on a CPU does: with two a plain copy takes half as long
    has_engine = not given.quick and given.rows is None
    rows = given.rows or (QUICK if given.quick else FULL)
    results = measure(rows, given.bucket_bytes, quick=given.quick, has_engine=has_engine, has_keys=given.keys)
    code = report(given, results, table, check, describe(results))
    if given.json is not None and given.json.suffix != ".png":
        draw(results, given.json.with_suffix(".png"))  # last: the rows are kept if it fails
    return code


def parse_row(text: str) -> tuple[int, int]:
    """Return megabytes and receivers of `megabytes:receivers`; raises ValueError."""
    megabytes, _, num_receivers = text.partition(":")
    return int(megabytes), int(num_receivers)


def measure(
    rows: Sequence[tuple[int, int]],
    bucket_bytes: int,
    *,
    quick: bool,
    has_engine: bool,
    has_keys: bool = False,
) -> dict[str, Any]:
    """Measure the rows (megabytes, receivers), and what concerns vLLM if `has_engine`."""
    num_turns = NUM_QUICK_TURNS if quick else NUM_TURNS
    sizes = sorted({megabytes for megabytes, _ in rows})
    return {
        "benchmark": "weight_sync",
        "quick": quick,
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "bucket_bytes": bucket_bytes,
        "keys": has_keys,
        "rows": [
            measure_size(megabytes * MB, num_receivers, bucket_bytes, num_turns, has_keys)
            for megabytes, num_receivers in rows
        ],
        "joiners": measure_joiners(sizes[-1] * MB, bucket_bytes, NUM_JOINERS),
        "publish": [measure_publish(megabytes * MB, num_turns) for megabytes in sizes],
        "engine": measure_engine(NUM_ENGINE_TURNS, RATE_S, bucket_bytes) if has_engine else None,
        "vllm_clients": ask_clients() if has_engine else None,
    }


def measure_size(
    num_bytes: int, num_receivers: int, bucket_bytes: int, num_turns: int, has_keys: bool = False
) -> dict[str, Any]:
    """Return the seconds of each turn and way for one size and number of receivers.

    The first sync forms the group and is given alone; some more let every segment be touched once.
    """
    with ExitStack() as stack:
        fleet = stack.enter_context(closing(Fleet(num_receivers, num_bytes, bucket_bytes, has_keys)))
        fleet.attend()
        first = fleet.sync()
        mapping = stack.enter_context(
            closing(Fleet(num_receivers, num_bytes, bucket_bytes, has_keys, maps=True))
        )
        mapping.attend()
        ends = (run_learner, run_replica)
        direct = stack.enter_context(
            closing(Fleet(num_receivers, num_bytes, bucket_bytes, has_keys, entries=ends))
        )
        direct.attend()
        bare = stack.enter_context(closing(BareGroup(num_receivers, num_bytes, bucket_bytes)))
        fleets = Fleets(fleet, mapping, direct)
        turns = [_take_turn(fleets, bare) for _ in range(NUM_WARM_UP + num_turns)][NUM_WARM_UP:]
    return {
        "num_bytes": fleet.num_bytes,
        "num_receivers": num_receivers,
        "first_transfer_s": first.transfer_s,
        **{name: [turn[name] for turn in turns] for name in turns[0]},
    }


class Fleets(NamedTuple):
    """The same services three times: receivers that get copies, that map, whose engines receive."""

    copying: Fleet
    mapping: Fleet
    direct: Fleet


def _take_turn(fleets: Fleets, bare: BareGroup) -> dict[str, float]:
    sync, mapped, direct = (fleet.sync() for fleet in fleets)
    figures = {"transfer_s": sync.transfer_s, "publish_s": sync.publish_s, "ready_s": sync.ready_s}
    figures |= {"mapped_s": mapped.transfer_s, "mapped_ready_s": mapped.ready_s}
    figures |= {"direct_s": direct.transfer_s, "direct_ready_s": direct.ready_s}
    figures |= {"direct_publish_s": direct.publish_s}
    figures |= {f"{way}_s": bare.seconds(way) for way in WAYS}
    return {**figures, "copy_s": fleets.copying.copy_s()}


def ratio(row: dict[str, Any], above: str, below: str) -> float:
    """Return the median over the turns of one figure divided by another one."""
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
    samples["gb_per_s"] = [row["num_bytes"] / seconds / 1e9 for seconds in row["transfer_s"]]
    for way in ("mapped", "direct"):
        samples[f"{way}_gb_per_s"] = [row["num_bytes"] / seconds / 1e9 for seconds in row[f"{way}_s"]]
    for name, (above, below) in ratios.items():
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
    lines.append(_joiners_line(results["joiners"]))
    lines += [
        f"learner stall, {row['num_bytes'] / MB:.0f} MB, nobody receives: {row['ratio']:.2f} of a plain copy"
        for row in results["publish"]
    ]
    if results["engine"] is not None:
        lines += _engine_lines(results["engine"])
    if results["vllm_clients"] is not None:
        lines += [f"vLLM's trainer client {name}: {said}" for name, said in results["vllm_clients"].items()]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    values = (
        _rate(row, "transfer_s"),
        _rate(row, "mapped_s"),
        _rate(row, "direct_s"),
        ratio(row, "bucketed_s", "transfer_s"),
        ratio(row, "bucketed_s", "direct_s"),
        ratio(row, "tensors_s", "transfer_s"),
        ratio(row, "memcpy_s", "transfer_s"),
        _rate(row, "bucketed_s"),
        ratio(row, "publish_s", "copy_s"),
        statistics.median(row["ready_s"]),
        row["first_transfer_s"],
    )
    sizes = f"{row['num_bytes'] / MB:>5.0f} {row['num_receivers']:>9} "
    return sizes + " ".join(f"{value:>10.3g}" for value in values)


def _rate(row: dict[str, Any], name: str) -> float:
    """Return gigabytes per second that reach each receiver."""
    return float(row["num_bytes"] / statistics.median(row[name]) / 1e9)


def _joiners_line(joiners: dict[str, Any]) -> str:
    worst_s, sync_s = max(joiners["hello_to_ready_s"]), statistics.median(joiners["sync_s"])
    steps = f"{ratio(joiners, 'step_s', 'step_alone_s'):.2f} of its steps alone"
    return (
        f"late joiners, {joiners['num_bytes'] / MB:.0f} MB: hello to serving at most {worst_s:.2f} s "
        f"(one transfer and one load {sync_s:.2f} s); the learner's steps meanwhile {steps}"
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


def check(results: dict[str, Any]) -> Verdict:
    """Return whether every target is met, and the worst ratio to a target as a sentence."""
    ratios = {}
    for row in results["rows"]:
        size = f"{row['num_bytes'] / MB:.0f} MB, {row['num_receivers']} receivers"
        if row["num_receivers"] == 1:
            rate = ratio(row, "bucketed_s", "transfer_s")
            ratios[f"transfer and digest of bare gloo, {size}, target {TARGET_RATE}"] = rate / TARGET_RATE
            if "direct_s" not in row:
                continue  # stored before there was that path
            rate = ratio(row, "bucketed_s", "direct_s")
            ratios[f"direct transfer of bare gloo, {size}, target {TARGET_RATE}"] = rate / TARGET_RATE
    joiners = results["joiners"]
    late_s = max(joiners["hello_to_ready_s"])
    ratios["late joiner of a transfer, a load and 1 s"] = (
        statistics.median(joiners["sync_s"]) + SPARE_S
    ) / late_s
    for row in results["publish"]:
        size = f"{row['num_bytes'] / MB:.0f} MB"
        ratios[f"learner stall of a plain copy, {size}, target {MAX_RATIO}"] = MAX_RATIO / row["ratio"]
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
