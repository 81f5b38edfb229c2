"""Admission of groups by a replica, simulated: fixed numbers, a full batch, its own limit.

    python -m benchmarks.rollout.concurrency --check

A model of vLLM's scheduler, not vLLM (that is `concurrency_vllm`): requests in order of arrival,
a batch limit, a KV cache of blocks. Where a block is wanted and none is free, the youngest running request
loses its own and is computed anew. Three rules: a fixed number of groups in flight; `full batch`: a further
group whenever the unfinished requests leave room for a group beside a batch and a quarter; and `adaptive`,
the rule of a replica, which holds fewer where the engine preempts. Where the lengths change they do so in the
middle, and what comes after is counted. Figures are medians over draws of the lengths. Target of `adaptive`:
95 % of the tokens/s of the best fixed number, on every row.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import median
from typing import Any

from asyncrl.core.status.replica import CacheStatus
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.rollout.ways.rules import GROUP_SIZE, Adaptive, Fixed, FullBatch

PROMPT_TOKENS = 128
MAX_TOKENS = 4096
BLOCK_TOKENS = 16
MAX_SEQUENCES = 256
STEP_S, PER_REQUEST_S, PER_PREFILL_TOKEN_S = 0.010, 0.00004, 0.00002
"""A decode step of a GPU: mostly reading the weights, a little for each request, and prompts by the token."""
FIXED = (8, 16, 24, 32, 64, 128)
TARGET = 0.95
DURATION_S = 600.0
"""Of the model's time: a shorter one counts little but what was taken at the start, or before a change."""
WHOLE_SEEDS, QUICK_SEEDS = 9, 3

Draw = Callable[[random.Random], int]


def _cut(tokens: float) -> int:
    return min(MAX_TOKENS, max(1, round(tokens)))


MIXES: Mapping[str, Draw] = {
    "fixed": lambda source: 384,
    "lognormal": lambda source: _cut(256 * math.exp(source.gauss(0.0, 1.0))),
    "long tail": lambda source: 96 if source.random() < 0.9 else MAX_TOKENS,
    "short": lambda source: 96,
    "long": lambda source: _cut(1024 * math.exp(source.gauss(0.0, 0.7))),
}
STEADY = ("fixed", "lognormal", "long tail")
CHANGES = (("short", "long"), ("long", "short"), ("long tail", "lognormal"))
CACHES = {"roomy": 400_000, "tight": 40_000}
"""KV caches, in tokens."""


@dataclass(eq=False)
class Request:
    """A response on its way: `num_wanted` tokens, of which `num_done` were sampled when it last waited."""

    group: int
    num_wanted: int
    num_done: int = 0


@dataclass
class Engine:
    """The scheduler's model. One `step` is one pass of the model over all running requests.

    Attributes:
        running: The tick before its first token, had it never waited, by request, the oldest first.
        free_blocks: Of the KV cache.
        num_sampled, num_preempted: Since the start.
    """

    num_blocks: int
    waiting: deque[Request] = field(default_factory=deque)
    running: dict[Request, int] = field(default_factory=dict)
    num_sampled: int = 0
    num_preempted: int = 0
    free_blocks: int = 0
    tick: int = 0

    def __post_init__(self) -> None:
        self.free_blocks = self.num_blocks
        self._ends: dict[int, list[tuple[Request, int]]] = {}
        self._num_at = Counter[int]()  # running, by the phase in which each wants a block

    def status(self) -> CacheStatus:
        """Return the figures that an engine tells."""
        usage = 1 - self.free_blocks / self.num_blocks
        return CacheStatus(0, 0, self.num_preempted, usage, len(self.running), len(self.waiting))

    def step(self) -> tuple[float, list[Request]]:
        """Sample a token for every running request; return (seconds, requests that ended)."""
        prefilled = self._admit()
        self._make_room()
        self.tick += 1
        num_running = len(self.running)
        self.num_sampled += num_running
        ended = [one for one, begun in self._ends.pop(self.tick, ()) if self.running.get(one) == begun]
        for request in ended:
            self.free_blocks += self._leave(request)
        return STEP_S + PER_REQUEST_S * num_running + PER_PREFILL_TOKEN_S * prefilled, ended

    def _admit(self) -> int:
        num_tokens = 0
        while self.waiting and len(self.running) < MAX_SEQUENCES:
            request = self.waiting[0]
            if _blocks(request.num_done) > self.free_blocks:
                break
            self.free_blocks -= _blocks(request.num_done)
            num_tokens += PROMPT_TOKENS + request.num_done
            self._enter(self.waiting.popleft())
        return num_tokens

    def _make_room(self) -> None:
        """Give each running request a block for its next token; the youngest ones lose theirs for it."""
        while self._num_at[self.tick % BLOCK_TOKENS] > self.free_blocks:
            youngest = next(reversed(self.running))
            self.free_blocks += self._leave(youngest)
            self.waiting.appendleft(youngest)
            self.num_preempted += 1
        self.free_blocks -= self._num_at[self.tick % BLOCK_TOKENS]

    def _enter(self, request: Request) -> None:
        begun = self.running[request] = self.tick - request.num_done
        self._num_at[(begun - PROMPT_TOKENS) % BLOCK_TOKENS] += 1
        self._ends.setdefault(begun + request.num_wanted, []).append((request, begun))

    def _leave(self, request: Request) -> int:
        """Take a request out; return its blocks."""
        begun = self.running.pop(request)
        self._num_at[(begun - PROMPT_TOKENS) % BLOCK_TOKENS] -= 1
        request.num_done = self.tick - begun
        return _blocks(request.num_done)


def _blocks(num_done: int) -> int:
    return -(-(PROMPT_TOKENS + num_done) // BLOCK_TOKENS)


@dataclass(frozen=True)
class Outcome:
    """Outcome of one setting: tokens/s, groups in flight on average, preemptions per 1,000 responses."""

    tokens_per_s: float
    groups: float
    preemptions: float


def measure(
    draws: Sequence[Draw], cache_tokens: int, rule: Fixed, duration_s: float, seed: int = 0
) -> Outcome:
    """Keep a replica busy for `duration_s` of the model's time.

    The first half is not counted; of two mixes of lengths it has the first.
    """
    source, engine = random.Random(seed), Engine(cache_tokens // BLOCK_TOKENS)
    left: dict[int, int] = {}
    serial = num_ended = 0
    now_s = 0.0
    start_s = duration_s / 2
    begun: tuple[float, int, int, int] | None = None
    sizes: list[int] = []
    while now_s < duration_s:
        while rule.wants_more(len(left), len(engine.running) + len(engine.waiting)):
            left[serial] = GROUP_SIZE
            draw = draws[0] if now_s < start_s else draws[-1]
            engine.waiting.extend(Request(serial, draw(source)) for _ in range(GROUP_SIZE))
            serial += 1
        step_s, ended = engine.step()
        now_s += step_s
        for request in ended:
            left[request.group] -= 1
            if not left[request.group]:
                del left[request.group]
        num_ended += len(ended)
        if ended:
            rule.look(engine.status(), len(engine.running) + len(engine.waiting), num_ended)
        if begun is None and now_s >= start_s:
            begun = now_s, engine.num_sampled, engine.num_preempted, num_ended
        if begun is not None:
            sizes.append(len(left))
    assert begun is not None, "the time is longer than one step"
    begun_s, sampled, preempted, ended_before = begun
    per_1000 = 1000 * (engine.num_preempted - preempted) / max(1, num_ended - ended_before)
    rate = (engine.num_sampled - sampled) / (now_s - begun_s)
    return Outcome(rate, sum(sizes) / len(sizes), per_1000)


def run(num_seeds: int) -> list[dict[str, Any]]:
    """Return one row per length mix and cache: every fixed number, the controller, and their ratio."""
    return [_run_case(mixes, cache, num_seeds) for mixes, cache in _cases()]


def _cases() -> Iterator[tuple[Sequence[str], str]]:
    yield from (((mix,), cache) for mix in STEADY for cache in CACHES)
    yield from ((change, "tight") for change in CHANGES)


def _run_case(mixes: Sequence[str], cache: str, num_seeds: int) -> dict[str, Any]:
    draws = [MIXES[mix] for mix in mixes]

    def run_rule(make: Callable[[int], Fixed], number: int) -> Outcome:
        found = [measure(draws, CACHES[cache], make(number), DURATION_S, seed) for seed in range(num_seeds)]
        return Outcome(*(median(figures) for figures in zip(*map(astuple, found), strict=True)))

    fixed = {number: run_rule(Fixed, number) for number in FIXED}
    best = max(fixed.values(), key=lambda outcome: outcome.tokens_per_s).tokens_per_s
    rules = {"full batch": run_rule(FullBatch, MAX_SEQUENCES), "adaptive": run_rule(Adaptive, MAX_SEQUENCES)}
    return {
        "mix": ", then ".join(mixes),
        "cache": cache,
        "fixed": {str(number): round(outcome.tokens_per_s) for number, outcome in fixed.items()},
        "best": round(best),
        "rules": {
            name: {
                "tokens_per_s": round(outcome.tokens_per_s),
                "groups": round(outcome.groups, 1),
                "preemptions": round(outcome.preemptions, 1),
                "ratio": round(outcome.tokens_per_s / best, 3),
            }
            for name, outcome in rules.items()
        },
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    numbers = " | ".join(str(number) for number in FIXED)
    lines = [
        f"tokens/s by groups ({GROUP_SIZE} requests each) in flight; rules: (groups held; share of the best)",
        "",
        f"| lengths | KV cache | {numbers} | full batch | adaptive |",
        "|---|---|" + "---|" * (len(FIXED) + 2),
    ]
    for row in results["cases"]:
        rates = " | ".join(f"{row['fixed'][str(number)]:,}" for number in FIXED)
        rules = " | ".join(
            f"{rule['tokens_per_s']:,} ({rule['groups']:.0f}; {rule['ratio']:.2f})"
            for rule in row["rules"].values()
        )
        lines.append(f"| {row['mix']} | {row['cache']} | {rates} | {rules} |")
    return "\n".join(lines)


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge the rule that a replica has, in every case."""
    return judge(
        {
            f"{row['mix']}, {row['cache']}": row["rules"]["adaptive"]["ratio"] / TARGET
            for row in results["cases"]
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and print them. Returns the exit code."""
    quick = f"medians of {QUICK_SEEDS} draws instead of {WHOLE_SEEDS}"
    given = make_parser("concurrency", __doc__, quick).parse_args(arguments)
    results = {"cases": run(QUICK_SEEDS if given.quick else WHOLE_SEEDS)}
    return report(given, results, table, check)


if __name__ == "__main__":
    raise SystemExit(main())
