"""Admission of groups by a replica, measured on vLLM: fixed numbers, its own rule, a controller.

    python -m benchmarks.rollout.concurrency_vllm --check

The rules of `concurrency` on a real engine (26 M random weights, float32 on a CPU), on three
mixes of lengths and two KV caches: one that holds a full batch, one that holds a third of it, so that vLLM
preempts. Each setting begins with an idle engine and is counted after a warm-up; settings take turns. A
controller would be kept if it gave 95 % of the best fixed number everywhere: `--check` judges the rule that
a replica has, `full batch`, by the same targets as the model's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.calibration.engine_curve import sampling_of
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.rollout.concurrency import PERIOD_S, TARGETS
from benchmarks.rollout.ways import setting
from benchmarks.rollout.ways.engine_gauges import LoggedGauges, start_metered_engine
from benchmarks.rollout.ways.rules import GROUP_SIZE, Adaptive, Fixed, FullBatch
from benchmarks.weight_sync.peers.engine import MODEL
from benchmarks.weight_sync.peers.peers import now_s

MAX_TOKENS = 256
BLOCK_TOKENS = 128
"""Of vLLM's KV cache on a CPU."""
CACHE_BLOCKS = {"roomy": 128, "tight": 24}
FIXED = (1, 2, 3, 4, 6, 8)
LENGTHS: Mapping[str, Sequence[int]] = {
    "fixed": (96,),
    "lognormal": tuple(
        min(MAX_TOKENS, round(random.Random(n).lognormvariate(4.0, 1.0)) + 1) for n in range(997)
    ),
    "long tail": (*(24,) * 9, MAX_TOKENS),
}
"""Responses are drawn from these with a seed."""


@dataclass(frozen=True)
class Plan:
    """Number of turns of each setting, their seconds of warm-up and measurement, and the mixes."""

    num_turns: int
    warm_up_s: float
    seconds: float
    mixes: tuple[str, ...] = tuple(LENGTHS)
    caches: tuple[str, ...] = tuple(CACHE_BLOCKS)


FULL = Plan(num_turns=2, warm_up_s=1.0, seconds=2.5)
QUICK = Plan(num_turns=1, warm_up_s=1.0, seconds=2.0, mixes=("lognormal",), caches=("tight",))


@dataclass
class Groups:
    """Keeps an engine busy with groups, as many as a rule wants, and counts tokens as they come."""

    llm: Any
    gauges: LoggedGauges
    rule: Fixed
    lengths: Sequence[int]
    num_tokens: int = 0
    num_requests: int = 0
    _left: dict[int, int] = field(default_factory=dict)
    _serials: Iterator[int] = field(default_factory=itertools.count)

    async def run(self) -> None:
        """Generate until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look())
            self._free = asyncio.Event()
            while True:
                while self.rule.wants_more(len(self._left), sum(self._left.values())):
                    serial = next(self._serials)
                    self._left[serial] = GROUP_SIZE
                    for index in range(GROUP_SIZE):
                        tasks.create_task(self._answer(serial, index))
                await self._free.wait()
                self._free.clear()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.rule.look(self.gauges)
            self._free.set()

    async def _answer(self, serial: int, index: int) -> None:
        from vllm.sampling_params import RequestOutputKind

        seed = serial * GROUP_SIZE + index
        num_tokens = random.Random(seed).choice(self.lengths)
        sampling = sampling_of(seed, num_tokens, RequestOutputKind.DELTA)
        letters = setting.make_prompt(serial, setting.PROMPT_TOKENS)
        request = {"type": "token", "prompt_token_ids": [ord(letter) for letter in letters]}
        async for output in self.llm.generate(request, sampling, f"{id(self):x}.{seed}"):
            self.num_tokens += len(output.outputs[0].token_ids)
        self.num_requests += 1
        self._left[serial] -= 1
        if not self._left[serial]:
            del self._left[serial]
        self._free.set()


def make_rules() -> dict[str, Fixed]:
    """Return fresh rules by name."""
    fixed = {str(number): Fixed(number) for number in FIXED}
    return {**fixed, "full batch": FullBatch(setting.MAX_SEQUENCES), "adaptive": Adaptive()}


async def measure_rule(
    llm: Any, gauges: LoggedGauges, rule: Fixed, lengths: Sequence[int], plan: Plan
) -> dict[str, float]:
    """Return tokens/s and preemptions per 1,000 responses of one turn, which begins with an idle engine."""
    groups = Groups(llm, gauges, rule, lengths)
    running = asyncio.ensure_future(groups.run())
    await asyncio.sleep(plan.warm_up_s)
    begun, num_tokens, num_requests = now_s(), groups.num_tokens, groups.num_requests
    num_preempted = gauges.num_preempted
    await asyncio.wait([running], timeout=plan.seconds)
    rate = (groups.num_tokens - num_tokens) / (now_s() - begun)
    num_ended = groups.num_requests - num_requests
    preempted = 1000 * (gauges.num_preempted - num_preempted) / max(1, num_ended)
    if running.done():
        running.result()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    while gauges.is_busy:
        await asyncio.sleep(0.05)
    return {"tokens_per_s": rate, "preemptions": preempted}


async def measure_cache(folder: Path, cache: str, plan: Plan) -> list[dict[str, Any]]:
    """Return a row per mix of lengths, measured on one engine."""
    gauges = LoggedGauges()
    llm = await start_metered_engine(folder, CACHE_BLOCKS[cache] * _block_bytes(), gauges)
    try:
        return [await _measure_mix(llm, gauges, mix, cache, plan) for mix in plan.mixes]
    finally:
        llm.shutdown(timeout=1.0)


async def _measure_mix(llm: Any, gauges: LoggedGauges, mix: str, cache: str, plan: Plan) -> dict[str, Any]:
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in make_rules()}
    for _ in range(plan.num_turns):
        for name, rule in make_rules().items():
            turns[name].append(await measure_rule(llm, gauges, rule, LENGTHS[mix], plan))
    return {"mix": mix, "cache": cache, "settings": _medians(turns)}


def _medians(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    found = {
        name: {key: round(median(turn[key] for turn in measured), 1) for key in measured[0]}
        for name, measured in turns.items()
    }
    best = max(found[str(number)]["tokens_per_s"] for number in FIXED)
    return {
        name: {**values, "ratio": round(values["tokens_per_s"] / best, 3)} for name, values in found.items()
    }


def _block_bytes() -> int:
    per_layer = 2 * MODEL["num_key_value_heads"] * MODEL["head_dim"] * 4
    return int(BLOCK_TOKENS * MODEL["num_hidden_layers"] * per_layer)


def run(plan: Plan) -> dict[str, Any]:
    """Measure every mix on every cache."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = setting.make_folder(Path(name))
        rows = [row for cache in plan.caches for row in asyncio.run(measure_cache(folder, cache, plan))]
    return {"cases": rows, "turn_s": plan.seconds, "num_turns": plan.num_turns}


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    names = list(make_rules())
    title = (
        f"tokens/s by groups ({GROUP_SIZE} requests each) in flight, batches of {setting.MAX_SEQUENCES}; "
        "rules: (share of the best fixed number; preemptions per 1,000 responses)"
    )
    lines = [
        title,
        "",
        f"| lengths | KV cache | {' | '.join(names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    for row in results["cases"]:
        cells = [_cell(name, row["settings"][name]) for name in names]
        lines.append(f"| {row['mix']} | {row['cache']} | {' | '.join(cells)} |")
    worst = min(row["settings"]["adaptive"]["ratio"] for row in results["cases"])
    lines += ["", f"the controller at its worst: {worst:.2f} of the best fixed number"]
    return "\n".join(lines)


def _cell(name: str, values: Mapping[str, float]) -> str:
    rate = f"{values['tokens_per_s']:,.0f}"
    return rate if name.isdigit() else f"{rate} ({values['ratio']:.2f}; {values['preemptions']:.0f})"


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge the rule that a replica has, in every case, by the targets of its KV cache."""
    return judge(
        {
            f"full batch, {row['mix']}, {row['cache']}": row["settings"]["full batch"]["ratio"]
            / TARGETS[row["cache"]]
            for row in results["cases"]
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and print them. Returns the exit code."""
    quick = "one turn of each setting, on one mix and one cache"
    given = make_parser("concurrency_vllm", __doc__, quick).parse_args(arguments)
    return report(given, run(QUICK if given.quick else FULL), table, check)


if __name__ == "__main__":
    raise SystemExit(main())
