"""Admission of groups by a replica, measured on vLLM: fixed numbers, a full batch, its own limit.

    python -m benchmarks.rollout.concurrency_vllm --check

A real engine (random float32 weights on a CPU) with a KV cache that holds a full batch, or a third of one, so
that vLLM preempts. Each turn begins with an idle engine, warms up and counts iterations of the engine; where
the lengths change, they do so with the first that counts. Settings take turns; figures are medians. Judged
are tokens per second of the engine's work: every iteration at what its prompt and sampled tokens cost, by a
fit to all iterations of the engine (least absolute deviations), so that another load on the machine changes
nothing; tokens per second of the clock are kept beside. Target: the replica's rule, `adaptive`, gives 95 % of
the best fixed number on every row.
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

import numpy as np
import torch

from benchmarks.calibration.engine_curve import sampling_of
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.learner.inputs import save_qwen3
from benchmarks.rollout.ways import setting
from benchmarks.rollout.ways.engine_gauges import LoggedGauges, start_metered_engine
from benchmarks.rollout.ways.rules import GROUP_SIZE, Adaptive, Fixed, FullBatch
from benchmarks.weight_sync.peers.peers import now_s

TARGET = 0.95
MAX_TOKENS = 256
BLOCK_TOKENS = 128
"""Of vLLM's KV cache on a CPU."""
MODEL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
"""Small: an iteration costs about the same for few requests as for many, as on a GPU."""
CACHE_BLOCKS = {"roomy": 128, "tight": 24}
FIXED = (2, 4, 6, 8)
LENGTHS: Mapping[str, Sequence[int]] = {
    "fixed": (96,),
    "lognormal": tuple(
        min(MAX_TOKENS, round(random.Random(n).lognormvariate(4.0, 1.0)) + 1) for n in range(997)
    ),
    "long tail": (*(24,) * 9, MAX_TOKENS),
    "short": (24,),
    "long": (160, 192, 224, MAX_TOKENS),
}
"""Responses are drawn from these with a seed."""
Case = tuple[str, str, str]
"""KV cache, lengths in the warm-up, lengths then."""
CASES: tuple[Case, ...] = (
    ("tight", "short", "long"),
    ("tight", "long", "short"),
    *(("tight", mix, mix) for mix in ("lognormal", "long tail")),
    ("roomy", "lognormal", "lognormal"),
)


@dataclass(frozen=True)
class Plan:
    """Number of turns of each setting, and their iterations of warm-up and measurement."""

    num_turns: int
    warm_up: int
    measured: int
    cases: tuple[Case, ...] = CASES


FULL = Plan(num_turns=5, warm_up=100, measured=200)
QUICK = Plan(num_turns=1, warm_up=60, measured=150, cases=(("tight", "short", "long"),))
POLL_S = 0.02


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
            self._free = asyncio.Event()
            while True:
                while self.rule.wants_more(len(self._left), sum(self._left.values())):
                    serial = next(self._serials)
                    self._left[serial] = GROUP_SIZE
                    for index in range(GROUP_SIZE):
                        tasks.create_task(self._answer(serial, index))
                await self._free.wait()
                self._free.clear()

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
        self.rule.look(self.gauges.status(), sum(self._left.values()), self.num_requests)
        self._free.set()


def make_rules() -> dict[str, Fixed]:
    """Return fresh rules by name."""
    fixed = {str(number): Fixed(number) for number in FIXED}
    batch = setting.MAX_SEQUENCES
    return {**fixed, "full batch": FullBatch(batch), "adaptive": Adaptive(batch)}


@dataclass(frozen=True)
class Turn:
    """Outcome of one turn: its iterations, tokens and requests that ended, seconds, preemptions."""

    iterations: Sequence[tuple[int, int, float]]
    num_tokens: int
    num_requests: int
    seconds: float
    num_preempted: int


async def measure_rule(llm: Any, gauges: LoggedGauges, rule: Fixed, case: Case, plan: Plan) -> Turn:
    """Measure one turn, which begins with an idle engine."""
    _, first, then = case
    groups = Groups(llm, gauges, rule, LENGTHS[first])
    running = asyncio.ensure_future(groups.run())
    begun = len(gauges.iterations) + plan.warm_up
    await _reach(begun, gauges, running)
    groups.lengths = LENGTHS[then]
    start_s, num_tokens, num_requests = now_s(), groups.num_tokens, groups.num_requests
    begun, num_preempted = len(gauges.iterations), gauges.num_preempted
    await _reach(begun + plan.measured, gauges, running)
    turn = Turn(
        gauges.iterations[begun:],
        groups.num_tokens - num_tokens,
        groups.num_requests - num_requests,
        now_s() - start_s,
        gauges.num_preempted - num_preempted,
    )
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    while gauges.is_busy:
        await asyncio.sleep(POLL_S)
    return turn


async def _reach(number: int, gauges: LoggedGauges, running: asyncio.Future[None]) -> None:
    """Wait for an iteration; raises what has ended the load before."""
    while len(gauges.iterations) < number:
        await asyncio.wait([running], timeout=POLL_S)
        if running.done():
            running.result()


def fit_costs(iterations: Sequence[tuple[int, int, float]]) -> Any:
    """Return the milliseconds of an iteration, of a prompt token and of a sampled token in it."""
    figures = np.asarray(iterations)
    inputs = np.column_stack([np.ones(len(figures)), figures[:, :2]])
    weights = np.ones(len(figures))
    for _ in range(20):  # reweighted least squares: each residual counts once, not squared
        root = np.sqrt(weights)[:, None]
        costs = np.linalg.lstsq(inputs * root, figures[:, 2] * root[:, 0], rcond=None)[0]
        weights = 1 / np.maximum(np.abs(figures[:, 2] - inputs @ costs), 1e-3)
    return np.maximum(costs, 0.0)


def rates_of(turn: Turn, costs: Any) -> dict[str, float]:
    """Return tokens/s of the engine's work and of the clock, and preemptions per 1,000 responses."""
    figures = np.asarray(turn.iterations)
    work_s = (costs[0] * len(figures) + figures[:, :2].sum(0) @ costs[1:]) / 1e3
    return {
        "tokens_per_s": turn.num_tokens / work_s,
        "of_clock": turn.num_tokens / turn.seconds,
        "preemptions": 1000 * turn.num_preempted / max(1, turn.num_requests),
    }


async def measure_cache(folder: Path, cache: str, plan: Plan) -> list[dict[str, Any]]:
    """Return a row per case of the cache, measured on one engine."""
    gauges = LoggedGauges()
    llm = await start_metered_engine(folder, CACHE_BLOCKS[cache] * _block_bytes(), gauges)
    cases = [case for case in plan.cases if case[0] == cache]
    turns: dict[tuple[Case, str], list[Turn]] = {}
    try:
        for case, _ in itertools.product(cases, range(plan.num_turns)):
            for name, rule in make_rules().items():
                measured = await measure_rule(llm, gauges, rule, case, plan)
                turns.setdefault((case, name), []).append(measured)
    finally:
        llm.shutdown(timeout=1.0)
    costs = fit_costs(gauges.iterations)
    found = [
        {name: [rates_of(turn, costs) for turn in turns[case, name]] for name in make_rules()}
        for case in cases
    ]
    return [
        {
            "cache": cache,
            "lengths": _label(case),
            "costs_ms": costs.round(4).tolist(),
            "settings": medians(one),
        }
        for case, one in zip(cases, found, strict=True)
    ]


def _label(case: Case) -> str:
    _, first, then = case
    return first if first == then else f"{first}, then {then}"


def medians(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return the median figures of each setting, and its share of the best fixed number's."""
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
    """Measure every case."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        save_qwen3(folder, dtype=torch.float32, **MODEL)
        setting.build_tokenizer(int(MODEL["vocab_size"])).save_pretrained(folder)
        caches = dict.fromkeys(cache for cache, *_ in plan.cases)
        rows = [row for cache in caches for row in asyncio.run(measure_cache(folder, cache, plan))]
    return {"cases": rows, "iterations": plan.measured, "num_turns": plan.num_turns}


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    names = list(make_rules())
    title = (
        f"tokens/s of the engine's work by groups ({GROUP_SIZE} requests each) in flight, batches of "
        f"{setting.MAX_SEQUENCES}; rules: (share of the best fixed number; preemptions per 1,000 responses)"
    )
    lines = [title, "", f"| lengths | KV cache | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for row in results["cases"]:
        cells = [_cell(name, row["settings"][name]) for name in names]
        lines.append(f"| {row['lengths']} | {row['cache']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str, values: Mapping[str, float]) -> str:
    rate = f"{values['tokens_per_s']:,.0f}"
    return rate if name.isdigit() else f"{rate} ({values['ratio']:.2f}; {values['preemptions']:.0f})"


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge the replica's rule by its share of the best fixed number."""
    return judge(
        {
            f"{row['lengths']}, {row['cache']}": row["settings"]["adaptive"]["ratio"] / TARGET
            for row in results["cases"]
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and print them. Returns the exit code."""
    quick = "one turn of each setting, on one case"
    given = make_parser("concurrency_vllm", __doc__, quick).parse_args(arguments)
    return report(given, run(QUICK if given.quick else FULL), table, check)


if __name__ == "__main__":
    raise SystemExit(main())
