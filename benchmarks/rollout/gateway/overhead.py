"""Overhead of the gateway over vLLM's own server: the same chats of several turns, on the same engine.

    python -m benchmarks.rollout.gateway.overhead --quick --check

Agents of another process have episodes of several turns, streamed or not, so many at once. The gateway's
begin with a session and end with a reward, and each answer is recorded; vLLM's server has the chats alone.
Engines: a scripted one, which takes next to no time of the server's processor, behind both; and vLLM on a
model of 0.1 M parameters. The servers are measured in turns. Target: 0.9 of vLLM's tokens per second. Beside
it: processor time of the server's process per token, and seconds from the kill of a replica inside a tool's
call to the next turn of that episode (`recovery`).
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.harness.rows import Row
from benchmarks.rollout.gateway.agents import Load, run_agents
from benchmarks.rollout.gateway.recovery import measure_recovery
from benchmarks.rollout.gateway.servers import Setting, make_model, run_gateway, run_vllm
from benchmarks.weight_sync.peers.peers import FRESH, Peer
from rollout_service.engine.protocol import engine_variant

MIN_SHARE = 0.9
SESSIONS = (1, 16, 64)
NUM_TURNS, NUM_TOKENS = 4, 32
START_S = 300.0
SERVERS = {"gateway": run_gateway, "vllm": run_vllm}
SCRIPTED, VLLM = "scripted", "vllm"


@dataclass(frozen=True)
class Plan:
    """Engines, measurements of each server, their seconds, and kills of replicas."""

    engines: tuple[str, ...]
    num_turns: int
    seconds: float
    num_kills: int


QUICK = Plan((SCRIPTED,), num_turns=2, seconds=1.0, num_kills=0)
FULL = Plan((SCRIPTED, VLLM), num_turns=5, seconds=2.5, num_kills=3)


def measure(plan: Plan) -> dict[str, Any]:
    """Return all figures. Raises ServiceFailed: a server did not start, or an agent failed."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = make_model(Path(name) / "model")
        cases = [case for engine in plan.engines for case in _compare(engine, folder, plan)]
        recovery = measure_recovery(plan.num_kills, Path(name)) if plan.num_kills else []
    return {"cases": cases, "recovery_s": recovery}


def _compare(engine: str, folder: Path, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the figures of both servers by load."""
    setting = Setting(folder, engine == SCRIPTED, engine_variant(SCRIPTED).tokens_per_s or 0.0)
    with contextlib.ExitStack() as opened:
        agents = opened.enter_context(contextlib.closing(Peer("agents", run_agents)))
        peers = {
            name: opened.enter_context(contextlib.closing(Peer(name, run, setting, way=FRESH)))
            for name, run in SERVERS.items()
        }
        urls = {name: peer.hear(START_S) for name, peer in peers.items()}
        for is_streamed, num_sessions in itertools.product((False, True), SESSIONS):
            load = Load(num_sessions, NUM_TURNS, NUM_TOKENS, is_streamed)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
            for turn in range(plan.num_turns):
                for name in list(SERVERS)[:: 1 if turn % 2 == 0 else -1]:
                    found[name].append(_measure(agents, peers[name], urls[name], load, plan.seconds))
            yield {
                "engine": engine,
                "sessions": num_sessions,
                "answers": "streamed" if is_streamed else "whole",
                "servers": {name: _columns(rates) for name, rates in found.items()},
            }


def _measure(agents: Peer, server: Peer, url: str, load: Load, seconds: float) -> dict[str, float]:
    before = server.ask("cpu_s")
    rates = agents.ask("work", url, load, server.name == "gateway", seconds)
    cpu_us = 1e6 * (server.ask("cpu_s") - before)
    return {"tokens_per_s": rates["tokens_per_s"], "cpu_us_per_token": cpu_us / rates["num_tokens"]}


def _columns(rates: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [one[name] for one in rates] for name in rates[0]}


def share_of(case: Mapping[str, Any]) -> float:
    """Return the gateway's tokens per second over those of vLLM's server, medians both."""
    rates = [median(case["servers"][name]["tokens_per_s"]) for name in SERVERS]
    return float(rates[0] / rates[1])


def make_rows(results: Mapping[str, Any]) -> list[Row]:
    """Return a row per case and server, with the gateway's share in its own, and one of the recovery."""
    rows = []
    for case in results["cases"]:
        parts = {name: case[name] for name in ("engine", "answers", "sessions")}
        for name, samples in case["servers"].items():
            share = {"share_of_vllm": share_of(case)} if name == "gateway" else {}
            rows.append(Row.of("gateway", {**parts, "server": name}, {**samples, **share}))
    if results["recovery_s"]:
        samples = {"to_the_next_turn_s": results["recovery_s"]}
        rows.append(Row.of("gateway", {"part": "recovery", "engine": SCRIPTED}, samples))
    return rows


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as a table."""
    head = (
        "engine",
        "answers",
        "sessions",
        "gateway tokens/s",
        "vLLM tokens/s",
        "share",
        "processor us/token",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for case in results["cases"]:
        tokens = [f"{median(one['tokens_per_s']):.0f}" for one in case["servers"].values()]
        cpu = [f"{median(one['cpu_us_per_token']):.0f}" for one in case["servers"].values()]
        cells = [case["engine"], case["answers"], str(case["sessions"]), *tokens, f"{share_of(case):.3f}"]
        lines.append(f"| {' | '.join([*cells, ' and '.join(cpu)])} |")
    if results["recovery_s"]:
        lines += [
            "",
            f"{median(results['recovery_s']):.2f} s from a replica's kill to the next turn elsewhere",
        ]
    return "\n".join(lines)


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge the gateway's share of vLLM's tokens per second, case by case."""
    return judge(
        {
            f"{case['engine']}, {case['answers']}, {case['sessions']} sessions": share_of(case) / MIN_SHARE
            for case in results["cases"]
        }
    )


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    quick = "the scripted engine alone, few turns, no kills"
    given = make_parser("benchmarks.rollout.gateway.overhead", __doc__, quick).parse_args(arguments)
    results = measure(QUICK if given.quick else FULL)
    return report(given, results, table, check, make_rows(results))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
