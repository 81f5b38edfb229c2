"""Placement of groups on replicas, simulated: hits in the KV caches and time of generation, by rule.

    python -m benchmarks.rollout.placement --check

The real ledger grants the leases; engines and caches are models of a GPU's (figures below), not measured. A
trace is a synthetic run (sources whose prompts begin alike, lengths, replicas that join and leave), or has
the sources, turns and lengths of a run that was recorded (`recorded`). Caches are cleared with each version;
a full one drops what was not used for longest. Rules: `oldest first`, a call takes all that it has room for;
`round robin` and `least loaded`, a group at a time in turn, or to the emptiest; `sticky`, each source has a
home replica, and who has nothing left at home takes the oldest (which rebalances); `placed`, the ledger's own
(`asyncrl.buffer.rules.placement`). In all of these a session stays where it began; `turns anywhere` is
`least loaded` with each turn on any replica, as a router in front of engines would have it. Targets of
`placed` beside `oldest first`: `TARGETS`.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import Grant, LedgerSettings, Ticket
from asyncrl.buffer.rules.replica import count_free_groups, count_max_groups
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.rollout.recorded import Turns, recorded

GROUP_SIZE, MAX_SEQUENCES = 8, 128
PROMPTS_PER_SOURCE = 1000
STEP_S, PER_REQUEST_S, PREFILL_TOKENS_PER_S = 0.010, 0.00005, 20_000.0
"""A decode step and what each request adds to it, and the rate of prompts: a 7B model on one GPU, about."""
MAX_TOKENS = 8192


@dataclass(frozen=True)
class Trace:
    """One run.

    Attributes:
        shared_tokens: That all prompts of a source begin with; `own_tokens` are a prompt's alone.
        median_tokens, sigma: Of a response's log-normal length, of all turns together.
        turns: Of a session; between two, an observation of `own_tokens`.
        replicas: At the start, and from each third of the steps on.
        cache_tokens: Of a replica's KV cache. slice_s: Of the model's time.
        is_recorded: Sources, prompts, turns and lengths are those of `recorded`.
    """

    sources: int = 8
    shared_tokens: int = 4000
    own_tokens: int = 200
    median_tokens: int = 500
    sigma: float = 0.8
    turns: int = 1
    replicas: tuple[int, int, int] = (8, 8, 8)
    groups_per_step: int = 64
    max_lag: int = 1
    cache_tokens: int = 400_000
    slice_s: float = 0.05
    is_recorded: bool = False


TRACES: Mapping[str, Trace] = {
    "shared system prompts": Trace(),
    "long tool schemas, short answers": Trace(shared_tokens=16_000, median_tokens=100),
    "more sources than caches hold": Trace(sources=32, replicas=(2, 2, 2), cache_tokens=100_000),
    "sessions of 12 turns": Trace(turns=12, own_tokens=400, median_tokens=1200),
    "skewed lengths": Trace(sigma=1.6),
    "replicas join and leave": Trace(replicas=(4, 8, 6)),
    "synchronous": Trace(max_lag=0),
    "nothing shared": Trace(sources=1, shared_tokens=0),
    "one replica": Trace(replicas=(1, 1, 1), groups_per_step=16),
    "recorded": Trace(replicas=(2, 2, 2), groups_per_step=16, slice_s=0.005, is_recorded=True),
}
SHARING = ("shared system prompts", "long tool schemas, short answers")
TARGETS = {"sharing": 1.1, "others": 0.97}
"""Least speed-up: of traces where placement has something to win, and of the others."""
RULES = ("oldest first", "round robin", "least loaded", "turns anywhere", "sticky", "placed")


class StickyLedger(Ledger):
    """A ledger that gives a replica the sources whose home it is, among the oldest tickets."""

    homes: Mapping[str, int]

    def _choose(
        self, replica: str, version: int, oldest: Ticket, position: int, served_step: int, now: float
    ) -> tuple[Ticket, int]:
        found = super()._choose(replica, version, oldest, position, served_step, now)  # issues ahead
        if not found[0].is_new:
            return found
        near = sorted(self.state.issued_heap)[:16]
        home, num_homes = self.homes.get(replica, 0), max(1, len(self.homes))
        mine = (place for place, one in enumerate(near) if self.state.tickets[one].source % num_homes == home)
        older = next(mine, 0)
        return self.state.tickets[near[older]], self.state.next_positions(older)[1]


@dataclass(eq=False)
class Session:
    """A sample: what is left of its turns, and the tokens before them, of which `num_new` are in no cache."""

    grant: Grant
    turns: Turns
    num_history: float
    num_new: float
    left: float = 0.0
    has_begun: bool = False


@dataclass
class Replica:
    """A model of an engine: prompts stall it, running requests decode at one rate."""

    name: str
    running: list[Session] = field(default_factory=list)
    waiting: deque[Session] = field(default_factory=deque)
    cache: OrderedDict[Hashable, float] = field(default_factory=OrderedDict)
    used: Counter[Hashable] = field(default_factory=Counter)
    held: dict[int, int] = field(default_factory=dict)
    stall_s: float = 0.0

    @property
    def num_unfinished(self) -> int:
        return sum(self.held.values())

    def use(self, key: Hashable, num_tokens: float, cache_tokens: int) -> bool:
        """Hold a beginning in the cache until `release`; return whether it was there.

        What nobody holds goes, the longest unused first, where there is no room.
        """
        has_hit = self.cache.pop(key, None) is not None
        self.cache[key] = num_tokens
        self.used[key] += 1
        num_over = sum(self.cache.values()) - cache_tokens
        for other in [one for one in self.cache if not self.used[one]] if num_over > 0 else ():
            num_over -= self.cache.pop(other)
            if num_over <= 0:
                break
        return has_hit

    def release(self, key: Hashable) -> None:
        """Let a beginning be dropped when there is no room for it."""
        self.used[key] -= 1
        if not self.used[key]:
            del self.used[key]

    def clear(self) -> None:
        """Forget what nobody holds: it is of an older version."""
        self.cache = OrderedDict((key, size) for key, size in self.cache.items() if self.used[key])

    def advance(self, slice_s: float) -> list[Session]:
        """Let a slice of time pass; return the sessions whose turn has ended."""
        while self.waiting and len(self.running) < MAX_SEQUENCES:
            self.running.append(self.waiting.popleft())
        stalled = min(slice_s, self.stall_s)
        self.stall_s -= stalled
        tokens = (slice_s - stalled) / (STEP_S + PER_REQUEST_S * len(self.running))
        for one in self.running:
            one.left -= tokens
        ended = [one for one in self.running if one.left <= 0]
        self.running = [one for one in self.running if one.left > 0]
        return ended


class Run:
    """One rule on one trace: the ledger, its replicas and a learner that trains at once."""

    def __init__(self, trace: Trace, rule: str, seed: int) -> None:
        self._trace, self._rule = trace, rule
        self._dice = random.Random(seed)
        settings = LedgerSettings(seed, trace.groups_per_step, trace.max_lag, 1, 1 << 40, 1, 1e9, 3)
        kind = StickyLedger if rule == "sticky" else Ledger
        self._ledger = kind(replace(settings, shares_prefixes=rule in ("sticky", "placed")))
        num_sources = len(recorded()) if trace.is_recorded else trace.sources
        sources = [(PROMPTS_PER_SOURCE, 1.0)] * num_sources
        self._ledger.describe_data(PROMPTS_PER_SOURCE * num_sources, "simulated", sources)
        self._token = self._ledger.open("learner")
        self._version = self._ledger.register_version(self._token, 0)
        self._replicas: dict[str, Replica] = {}
        self._lost: list[str] = []
        self.now = 0.0
        self.num_prompt_tokens = self.num_cached_tokens = 0.0

    def generate(self, num_steps: int) -> None:
        """Run until so many steps are trained."""
        for step in range(num_steps):
            self._scale(self._trace.replicas[3 * step // num_steps])
            while self._ledger.reserve(self._token, step, self.now) is None:
                self._advance()
            self._ledger.trained(self._token, step, [])
            self._version = self._ledger.register_version(self._token, step + 1)
            self._ledger.checkpointed(self._token, step + 1, "simulated", [step + 1])
            self._ledger.drain_events()
            for replica in self._replicas.values():
                replica.clear()

    def _advance(self) -> None:
        self._lease()
        for replica in list(self._replicas.values()):
            for session in replica.advance(self._trace.slice_s):
                self._end_turn(replica, session)
        self.now += self._trace.slice_s

    def _scale(self, wanted: int) -> None:
        names = [f"r{number}" for number in range(wanted)]
        for gone in self._replicas.keys() - set(names):
            del self._replicas[gone]
            self._ledger.deregister(gone)
        self._replicas = {name: self._replicas.get(name) or Replica(name) for name in names}
        if isinstance(self._ledger, StickyLedger):
            self._ledger.homes = {name: number for number, name in enumerate(names)}

    def _lease(self) -> None:
        """Let all that have room ask, in turn, until nobody is given anything."""
        asking = list(self._replicas.values())
        self._dice.shuffle(asking)
        while asking:
            if self._rule in ("least loaded", "turns anywhere"):
                asking.sort(key=lambda one: one.num_unfinished)
            replica = asking.pop(0)
            most = count_max_groups(MAX_SEQUENCES, GROUP_SIZE)
            want = count_free_groups(most * GROUP_SIZE, GROUP_SIZE, replica.num_unfinished)
            if self._rule in ("round robin", "least loaded", "turns anywhere"):
                want = min(want, 1)
            grants = self._ledger.lease(replica.name, self._version, want, self.now)
            for grant in grants:
                self._begin(replica, grant)
            if grants:
                asking.append(replica)

    def _begin(self, replica: Replica, grant: Grant) -> None:
        replica.held[grant.ticket] = GROUP_SIZE
        for own_tokens, turns in self._sessions(grant):
            self._prefill(replica, Session(grant, turns, own_tokens, own_tokens))

    def _sessions(self, grant: Grant) -> Iterator[tuple[float, Turns]]:
        """Yield a group's sessions: tokens of the prompt that are its own, and the turns."""
        trace, dice = self._trace, random.Random(grant.seed)
        if trace.is_recorded:
            source = recorded()[grant.source]
            for turns in source.groups[grant.index % len(source.groups)]:
                yield source.own_tokens, [*turns]
            return
        for _ in range(GROUP_SIZE):
            total = min(MAX_TOKENS, trace.median_tokens * math.exp(trace.sigma * dice.gauss(0.0, 1.0)))
            yield trace.own_tokens, [(total / trace.turns, trace.own_tokens)] * trace.turns

    def _shared_tokens(self, source: int) -> int:
        return recorded()[source].shared_tokens if self._trace.is_recorded else self._trace.shared_tokens

    def _prefill(self, replica: Replica, session: Session) -> None:
        """Compute what of a turn's prompt is not in the cache: another source, another place, new words.

        The first sample of a group computes the prompt for the others.
        """
        grant, size = session.grant, self._trace.cache_tokens
        is_first = replica.held.get(grant.ticket) == GROUP_SIZE and not any(
            one.grant is grant for one in (*replica.running, *replica.waiting)
        )
        num_shared = self._shared_tokens(grant.source)
        shared = 0 if replica.use(grant.source, num_shared, size) else num_shared
        own: float = session.num_history
        if replica.use(session, session.num_history, size):
            own = session.num_new
        elif not session.has_begun and not is_first:
            own = 0
        replica.stall_s += (shared + own) / PREFILL_TOKENS_PER_S
        self.num_prompt_tokens += num_shared + session.num_history
        self.num_cached_tokens += num_shared - shared + session.num_history - own
        session.has_begun, session.left = True, session.turns[0][0]
        replica.waiting.append(session)

    def _end_turn(self, replica: Replica, session: Session) -> None:
        ticket = session.grant.ticket
        num_said, session.num_new = session.turns.pop(0)
        session.num_history += num_said + session.num_new
        if session.turns:
            others = list(self._replicas.values())
            self._prefill(self._dice.choice(others) if self._rule == "turns anywhere" else replica, session)
        replica.release(session.grant.source)
        replica.release(session)
        if session.turns:
            return
        home = next((one for one in self._replicas.values() if ticket in one.held), None)
        if home is None:
            return  # its replica has left
        home.held[ticket] -= 1
        if not home.held[ticket]:
            del home.held[ticket]
            if self._ledger.holds_lease(home.name, ticket, session.grant.attempt):
                self._ledger.store(ticket, 1, 1, (self._version, self._version))


def run(num_steps: int, num_seeds: int) -> list[dict[str, Any]]:
    """Return a row per trace: by rule, the hit share and the seconds per step, medians over seeds."""
    rows = []
    for name, trace in TRACES.items():
        found = {rule: _measure(trace, rule, num_steps, num_seeds) for rule in RULES}
        base = found["oldest first"]["step_s"]
        rules = {rule: {**one, "speed_up": round(base / one["step_s"], 3)} for rule, one in found.items()}
        rows.append({"trace": name, "rules": rules})
    return rows


def _measure(trace: Trace, rule: str, num_steps: int, num_seeds: int) -> dict[str, float]:
    hits, seconds = [], []
    for seed in range(num_seeds):
        one = Run(trace, rule, seed)
        one.generate(num_steps)
        hits.append(one.num_cached_tokens / one.num_prompt_tokens)
        seconds.append(one.now / num_steps)
    return {"hit_share": round(median(hits), 4), "step_s": round(median(seconds), 3)}


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    title = "seconds of generation per step (prompt tokens found in a cache), by rule; a model, not measured"
    lines = [title, "", f"| trace | {' | '.join(RULES)} |", "|---|" + "---|" * len(RULES)]
    for row in results["cases"]:
        digits = 1 if row["rules"]["placed"]["step_s"] >= 1 else 3
        cells = [f"{one['step_s']:.{digits}f} ({one['hit_share']:.1%})" for one in row["rules"].values()]
        lines.append(f"| {row['trace']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge the ledger's rule by its speed-up over `oldest first` in every trace."""
    return judge(
        {
            f"placed, {row['trace']}": row["rules"]["placed"]["speed_up"]
            / TARGETS["sharing" if row["trace"] in SHARING else "others"]
            for row in results["cases"]
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Run all traces and print them. Returns the exit code."""
    given = make_parser("placement", __doc__, "one seed and fewer steps").parse_args(arguments)
    results = {"cases": run(3, 1) if given.quick else run(9, 3)}
    return report(given, results, table, check)


if __name__ == "__main__":
    raise SystemExit(main())
