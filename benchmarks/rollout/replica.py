"""Overhead of a replica over vLLM: its whole path against a bare AsyncLLM, on the same prompts, in turns.

Ours is a replica as a run has it: leases from a buffer in another process, groups, rewards, pushes into a
file journal, over encrypted sockets, with weights that came by weight sync. Bare is an AsyncLLM with requests
in and outputs out. Both keep the same number of requests in flight, with the same lengths, seeds and
log-probs. Only one of them runs at a time: the other's engine core is stopped where it is, so that no turn
begins empty. Replicas whose episodes have four short turns, and replicas whose gateway serves agents of
another process, are measured beside it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from asyncrl.core.service import ServiceContext
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.rollout.ways import setting
from benchmarks.rollout.ways.agents import run_agents
from benchmarks.rollout.ways.bare import PREFIX_RESPONSE_TOKENS, PREFIX_TOKENS
from benchmarks.rollout.ways.contest import run_contest
from benchmarks.rollout.ways.ours import run_buffer
from benchmarks.rollout.ways.setting import START_S, Rate
from benchmarks.weight_sync.peers.peers import FRESH, Peer
from benchmarks.weight_sync.peers.services import Fleet

GATEWAY = "gateway"
MIN_SHARE = 0.95
BUCKET_BYTES = 16 << 20


@dataclass(frozen=True)
class Plan:
    """Replicas, turns of each way, their seconds, and turns that compare prefixes."""

    replicas: tuple[str, ...]
    num_turns: int
    seconds: float
    num_prefix_turns: int


QUICK = Plan((setting.PLAIN,), num_turns=4, seconds=2.0, num_prefix_turns=1)
FULL = Plan((setting.PLAIN, *setting.EXTRAS), num_turns=8, seconds=2.5, num_prefix_turns=3)


class System:
    """Weight sync, a buffer for each replica, and the process in which all generate.

    Args:
        names: Of the replicas, see `setting.make_config`.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._open = contextlib.ExitStack()
        self._names = names
        with contextlib.ExitStack() as failed:
            failed.callback(self._open.close)
            self._fleet = Fleet(len(names), folder, BUCKET_BYTES)
            self._open.callback(self._fleet.close)
            contexts = {name: self._context(name, folder) for name in names}
            self.contest = Peer("rollout.0", run_contest, contexts, folder, way=FRESH)
            self._open.callback(self.contest.close)
            failed.pop_all()

    def _context(self, name: str, folder: Path) -> ServiceContext:
        """Start a buffer, and return what the replica of that name has to know."""
        config = setting.make_config(folder, name)
        common = replace(self._fleet.context, config=config, run_dir=Path(config.run.dir))
        buffer = Peer(f"buffer of {name}", run_buffer, replace(common, name="buffer.0"))
        self._open.callback(buffer.close)
        addresses = {**common.addresses, "buffer.0": buffer.hear()}
        return replace(common, addresses=addresses, name=f"rollout.{self._names.index(name)}")

    def start(self) -> None:
        """Publish the weights, and wait until every way generates."""
        self.contest.hear(START_S)
        self._fleet.publish()
        self._fleet.follow("loaded")
        if GATEWAY in self._names:
            url = self.contest.ask("gateway", GATEWAY)
            self._agents = Peer("agents", run_agents, url, setting.IN_FLIGHT)
            self._open.callback(self._agents.close)
        self.contest.ask("hold")

    def check(self) -> None:
        """Raise ServiceFailed if the agents have failed."""
        if GATEWAY in self._names:
            self._agents.ask("check")

    def close(self) -> None:
        """End everything, the replicas first."""
        self._open.close()


def measure(plan: Plan) -> dict[str, Any]:
    """Return all figures.

    Raises:
        ServiceFailed: A process has failed, for example because vLLM could not start.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = setting.make_folder(Path(name))
        with contextlib.closing(System(plan.replicas, folder)) as system:
            system.start()
            start_s = time.monotonic() - began
            ways = alternate(system.contest, ["bare", *plan.replicas], plan.num_turns, plan.seconds)
            system.check()
            counters = system.contest.ask("counters")
            prefixes = system.contest.ask("compare_prefixes", plan.num_prefix_turns)
    results = {"start_s": start_s, "counters": counters, "turn_s": plan.seconds}
    return results | {"ways": _columns(ways), "prefixes": _columns(prefixes)}


def alternate(contest: Peer, names: Sequence[str], num_turns: int, seconds: float) -> dict[str, list[Rate]]:
    """Return each way's rates, turn by turn; every other turn goes through the ways backwards."""
    rates: dict[str, list[Rate]] = {name: [] for name in names}
    for turn in range(num_turns):
        for name in names if turn % 2 == 0 else names[::-1]:
            rates[name].append(contest.ask("measure", name, seconds))
    return rates


def _columns(rates: Mapping[str, Sequence[Rate]]) -> dict[str, dict[str, list[float]]]:
    return {
        name: {key: [getattr(rate, key) for rate in found] for key in Rate.__annotations__}
        for name, found in rates.items()
    }


def share_of(results: Mapping[str, Any], table: str, name: str, base: str) -> float:
    """Return `name`'s tokens per second over those of `base`, in one of the tables.

    The medians over the turns are compared. Tokens of requests that are in flight count in the turn in which
    they were sampled.
    """
    rates = results[table]
    return float(median(rates[name]["tokens_per_s"]) / median(rates[base]["tokens_per_s"]))


def make_table(results: Mapping[str, Any]) -> str:
    """Return the rows as a table."""
    head = ("way", "tokens/s", "lowest to highest", "requests/s", "in flight", "tokens/s of its base")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    prefix = f"{PREFIX_TOKENS} prompt, {PREFIX_RESPONSE_TOKENS} response tokens, prefix cache"
    for table, base, label in (("ways", "bare", ""), ("prefixes", "off", f"{prefix} ")):
        for name, found in results[table].items():
            tokens = found["tokens_per_s"]
            row = (
                label + name,
                f"{median(tokens):.0f}",
                f"{min(tokens):.0f} to {max(tokens):.0f}",
                f"{median(found['requests_per_s']):.1f}",
                f"{fmean(found['in_flight']):.0f}" if table == "ways" else "-",
                f"{share_of(results, table, name, base):.3f}",
            )
            lines.append(f"| {' | '.join(row)} |")
    foot = f"started after {results['start_s']:.0f} s; what replicas counted: {results['counters']}"
    return "\n".join([*lines, "", foot])


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge what a replica adds; what the prefix cache gives is shown."""
    return judge({"ours of bare, tokens/s": share_of(results, "ways", "ours", "bare") / MIN_SHARE})


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser(
        "benchmarks.rollout.replica", __doc__, "few turns, without several turns and gateway"
    )
    given = parser.parse_args(arguments)
    return report(given, measure(QUICK if given.quick else FULL), make_table, check)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
