"""Several publishers, each of which sends its stripe of every version, beside as many bare groups at once.

All on one machine, on the staged path. The bare groups broadcast the same bytes in the same buckets, each its
share; N stripes have buckets of an Nth. A late joiner and a publisher that dies at a bucket are measured with
more than one stripe (with one they are in the rows of the staged path), and not by `--quick`, which takes the
smallest size.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from benchmarks.weight_sync.peers.deaths import NUM_RECEIVERS, measure_death
from benchmarks.weight_sync.peers.gloo import BUCKETED, BareGroup
from benchmarks.weight_sync.peers.joiners import measure_joiners
from benchmarks.weight_sync.peers.services import Fleet

COUNTS, QUICK_COUNTS = (1, 2, 4), (1, 2)
NUM_WARM_UP, NUM_JOINERS = 4, 1


def parse_counts(text: str) -> tuple[int, ...]:
    """Return the counts of `1,2,4`; raises ValueError."""
    counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    if min(counts) < 1:
        raise ValueError(text)
    return counts


def measure_stripes(
    count: int, num_bytes: int, bucket_bytes: int, num_turns: int, *, quick: bool
) -> dict[str, Any]:
    """Return the seconds of `count` stripes to one receiver; a joiner's and a death's too unless `quick`."""
    bucket_bytes //= count  # so that a stripe has as many buckets as a version of one stripe
    with ExitStack() as stack:
        fleet = stack.enter_context(closing(Fleet(1, num_bytes, bucket_bytes, False, num_stripes=count)))
        fleet.attend()
        fleet.sync()
        share = num_bytes // count
        groups = [stack.enter_context(closing(BareGroup(1, share, bucket_bytes))) for _ in range(count)]
        bare_bytes = sum(group.num_bytes() for group in groups)
        turns = [(fleet.sync().transfer_s, send_at_once(groups)) for _ in range(NUM_WARM_UP + num_turns)]
    transfer_s, bare_s = (list(column) for column in zip(*turns[NUM_WARM_UP:], strict=True))
    figures: dict[str, Any] = {
        "num_bytes": fleet.num_bytes,
        "bare_bytes": bare_bytes,
        "transfer_s": transfer_s,
        "bare_s": bare_s,
    }
    if count > 1 and not quick:
        late = measure_joiners(Fleet(1, num_bytes, bucket_bytes, num_stripes=count), NUM_JOINERS)
        fleet = Fleet(NUM_RECEIVERS, num_bytes, bucket_bytes, num_stripes=count)
        figures |= {"joiner": late, "death": measure_death(fleet)}
    return figures


def send_at_once(groups: Sequence[BareGroup]) -> float:
    """Return the seconds from the first group's start to the last one's end."""
    for group in groups:
        group.begin(BUCKETED)
    began, ended = zip(*(group.end(BUCKETED) for group in groups), strict=True)
    return float(max(ended) - min(began))


def share_of_bare(figures: dict[str, Any]) -> float:
    """Return the median over the turns of the rate beside that of the bare groups."""
    size = figures["num_bytes"] / figures["bare_bytes"]
    turns = zip(figures["bare_s"], figures["transfer_s"], strict=True)
    return float(statistics.median(size * bare_s / transfer_s for bare_s, transfer_s in turns))


def stripes_lines(stripes: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each number of stripes."""
    lines = []
    for count, figures in stripes.items():
        size = f"{figures['num_bytes'] / 1e6:.0f} MB"
        line = f"stripes {count}, {size} to 1: {share_of_bare(figures):.2f} of as many bare groups at once"
        if "death" in figures:
            late, death = figures["joiner"], figures["death"]
            line += (
                f"; late joiner serves after {max(late['hello_to_ready_s']):.2f} s, {late['amid_s']:.2f} s "
                f"while versions go out; a publisher dies, all have loaded {death['hold_s']:.2f} s later "
                f"(a whole sync {death['sync_s']:.2f} s)"
            )
        lines.append(line)
    return lines
