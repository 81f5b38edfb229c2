"""What the buffer does for rollout replicas: checks each argument, then asks the ledger."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrl.buffer.store import ExperienceStore
from asyncrl.errors import WireError
from asyncrl.metrics.tallies import Tally
from asyncrl.rpc import Request
from asyncrl.wire import field

if TYPE_CHECKING:
    from asyncrl.buffer.service import Desk

MAX_WAIT_S = 600.0
MAX_WANT = 4096
MAX_NAME_CHARACTERS = 200
MAX_METRICS = 1024
METRIC = re.compile(r"(accuracy|reward_mean|val-(core|aux)/.+)")
"""Figures of an evaluation that somebody reads."""
MAX_COUNT, MAX_TOTAL, MAX_SQUARES = 10**15, 1e150, 1e300
"""Of a tally: sums of many such, and the square of their mean, stay finite. Rewards reach 3.4e38."""


class ReplicaOps:
    """Operations of replicas. `_last_seen` is when those that evaluate last spoke, the most silent first."""

    def __init__(self, store: ExperienceStore, desk: Desk) -> None:
        self._store = store
        self._ledger = store.ledger
        self._desk = desk
        self._last_seen: dict[str, float] = {}

    def table(self) -> dict[str, Callable[[Request], None]]:
        return {
            "describe_data": self.describe_data,
            "lease": self.lease,
            "renew": self.renew,
            "push": self.push,
            "carry": self.carry,
            "fetch_carry": self.fetch_carry,
            "fail": self.fail,
            "release": self.release,
            "retire": self.retire,
            "evaluated": self.evaluated,
        }

    def describe_data(self, request: Request) -> None:
        num_prompts, digest = field(request.args, "num_prompts", int), read_name(request.args, "digest")
        self._ledger.describe_data(num_prompts, digest, _read_sources(request.args))
        self._reply(request)

    def lease(self, request: Request) -> None:
        args, replica = request.args, self._replica(request)
        version, want = field(args, "version", int), field(args, "want", int)
        if not 0 <= want <= MAX_WANT:
            raise WireError(f"a replica wants {want} leases, allowed are 0 to {MAX_WANT}")
        evaluating = args.get("evaluating")
        if evaluating is not None:
            evaluating = field(args, "evaluating", int)
        if request.patience_s <= 0.0:  # it lay in the socket while the journal was away
            self._store.counters["leases_given_up"] += 1
            self._reply(request, **no_grant())
            return
        if "held" in args:
            num_lost = self._ledger.keep_only(replica, set(read_pairs(args, "held")))
            self._store.counters["grants_lost"] += num_lost

        def attempt() -> Any:
            return self._grant(replica, version, want, evaluating)

        # Who serves the same version is granted the same, or nothing.
        lane = ("lease", version, want > 0)
        self._desk.park_until(request, attempt, no_grant, read_wait_s(args), ("replica", replica), lane)

    def _grant(self, replica: str, version: int, want: int, evaluating: int | None) -> dict[str, Any] | None:
        # An evaluation is no lease: the learner has ordered it, and a pause lets what was begun end.
        wanted = 0 if self._desk.is_paused else want
        grants = self._ledger.lease(replica, version, wanted, self._desk.clock.now())
        order = self._ledger.evaluations.give(replica, version, evaluating)
        if not grants and order is None:
            return None
        lease_s = self._ledger.settings.lease_s
        rows = [
            {
                "ticket": grant.ticket,
                "attempt": grant.attempt,
                "source": grant.source,
                "pass": grant.pass_number,
                "index": grant.index,
                "seed": grant.seed,
                "lease_s": lease_s,
                "carry_attempt": grant.carry_attempt,
            }
            for grant in grants
        ]
        return {"grants": rows, "evaluate": order and order._asdict()}

    def take_back(self, request: Request, args: dict[str, Any]) -> None:
        """Take back what `lease` granted in `args`: nobody waits for the answer any more."""
        held = [(row["ticket"], row["attempt"]) for row in args["grants"]]
        self._ledger.release(self._replica(request), held)
        self._store.counters["leases_given_up"] += 1

    def renew(self, request: Request) -> None:
        held = read_pairs(request.args)
        lost = self._ledger.renew(self._replica(request), held, self._desk.clock.now())
        self._reply(request, lost=lost)

    def push(self, request: Request) -> None:
        ticket, attempt = field(request.args, "ticket", int), field(request.args, "attempt", int)
        result = self._store.push(self._replica(request), ticket, attempt, request.frames)
        self._reply(request, result=result)

    def carry(self, request: Request) -> None:
        ticket, attempt = field(request.args, "ticket", int), field(request.args, "attempt", int)
        result = self._store.carry(self._replica(request), ticket, attempt, request.frames)
        self._reply(request, result=result)

    def fetch_carry(self, request: Request) -> None:
        ticket, attempt = field(request.args, "ticket", int), field(request.args, "attempt", int)
        frames = self._store.fetch_carry(self._replica(request), ticket, attempt)
        self._desk.answer(request, {"found": frames is not None}, frames or [])

    def fail(self, request: Request) -> None:
        args = request.args
        ticket, attempt, reason = (
            field(args, "ticket", int),
            field(args, "attempt", int),
            field(args, "reason", str),
        )
        self._store.fail(self._replica(request), ticket, attempt, reason)
        self._reply(request)

    def release(self, request: Request) -> None:
        self._ledger.release(self._replica(request), read_pairs(request.args))
        self._reply(request)

    def retire(self, request: Request) -> None:
        self.retire_absent(self._replica(request))
        self._reply(request)

    def retire_absent(self, replica: str) -> None:
        """Take back what a replica holds, or held before it died; grant it nothing that it waits for."""
        self._desk.end_waits(("replica", replica))
        self._ledger.retire(replica)
        self._last_seen.pop(replica, None)

    def evaluated(self, request: Request) -> None:
        args, orders = request.args, self._ledger.evaluations
        replica = self._replica(request)
        number, version = field(args, "id", int), field(args, "version", int)
        part = field({"part": 0, **args}, "part", int)
        try:
            tallies = _read_tallies(number, field(args, "metrics", dict))
        except WireError:
            self._store.counters["evaluations_refused"] += 1
            orders.refuse(number, replica, version, part)
            raise
        if not orders.finish(number, version, tallies, part):
            self._store.counters["evaluations_unasked"] += 1
        more = orders.give_more(number, replica, version)
        self._reply(request, more=more and more._asdict())

    def expire_silent(self, now: float) -> bool:
        """Take evaluations back from replicas that have been silent for a lease's time."""
        lease_s = self._ledger.settings.lease_s
        for evaluation in self._ledger.state.evaluations.values():
            for replica in evaluation.holders.values():
                self._last_seen.setdefault(replica, now)
        has_silent = False
        while self._last_seen and now - (oldest := next(iter(self._last_seen.items())))[1] > lease_s:
            del self._last_seen[oldest[0]]
            self._ledger.evaluations.free(oldest[0])
            has_silent = True
        return has_silent

    def _replica(self, request: Request) -> str:
        name = read_name(request.args, "replica")
        if self._last_seen.pop(name, None) is not None:
            self._last_seen[name] = self._desk.clock.now()
        return name

    def _reply(self, request: Request, **args: Any) -> None:
        self._desk.answer(request, args)


def no_grant() -> dict[str, Any]:
    """Return the answer to a lease that grants nothing."""
    return {"grants": [], "evaluate": None}


def read_name(args: dict[str, Any], name: str) -> str:
    """Return a text that is kept, or comes back in errors: a name, or a digest."""
    text = str(field(args, name, str))
    if not 0 < len(text) <= MAX_NAME_CHARACTERS:
        raise WireError(
            f"the field '{name}' has {len(text)} characters, allowed are 1 to {MAX_NAME_CHARACTERS}"
        )
    return text


def read_wait_s(args: dict[str, Any]) -> float:
    """Return the checked `wait_s` of a long poll, in seconds."""
    wait_s = float(field(args, "wait_s", (int, float)))
    if not 0.0 <= wait_s <= MAX_WAIT_S:
        raise WireError(f"a wait of {wait_s} s is not between 0 and {MAX_WAIT_S:g} s")
    return wait_s


def _read_sources(args: dict[str, Any]) -> list[tuple[int, float]]:
    """Return the checked (prompts, weight) pairs of `describe_data`, none where there is one source."""
    sources = field({"sources": [], **args}, "sources", list)
    for one in sources:
        is_pair = isinstance(one, list) and len(one) == 2
        if not (is_pair and type(one[0]) is int and type(one[1]) in (int, float)):
            raise WireError("the field 'sources' holds pairs of a number of prompts and a weight")
    return [(count, float(weight)) for count, weight in sources]


def read_pairs(args: dict[str, Any], name: str = "tickets") -> list[tuple[int, int]]:
    """Return the checked (ticket, attempt) pairs of a request."""
    pairs = field(args, name, list)
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(one) is int for one in pair)):
            raise WireError(f"the field '{name}' holds pairs of a ticket and an attempt")
    return [(ticket, attempt) for ticket, attempt in pairs]


def _is_metric(name: Any) -> bool:
    is_text = isinstance(name, str) and len(name) <= MAX_NAME_CHARACTERS and name.isprintable()
    return is_text and METRIC.fullmatch(name) is not None


def _read_tallies(number: int, metrics: dict[Any, Any]) -> dict[str, Tally]:
    """Return the checked result of a part: by name a finite number, or [count, total, squares, trials]."""
    if len(metrics) > MAX_METRICS:
        raise WireError(f"evaluation {number}: more than {MAX_METRICS} metrics")
    tallies = {}
    for name, value in metrics.items():
        sums = value if isinstance(value, list) else [1, value, 0.0, 0]
        if not _is_metric(name) or len(sums) != 4 or not all(type(one) in (int, float) for one in sums):
            raise WireError(
                f"evaluation {number}: metrics are finite numbers, or four sums each, by name: "
                "accuracy, reward_mean, val-core/..., val-aux/..."
            )
        count, total, squares, trials = sums
        if not (type(count) is int and type(trials) is int and min(count, trials, squares) >= 0):
            raise WireError(f"evaluation {number}: counts and squares are never below 0")
        is_small = max(count, trials) <= MAX_COUNT and squares <= MAX_SQUARES
        if not (is_small and abs(total) <= MAX_TOTAL):  # not so for no number either
            raise WireError(f"evaluation {number}: the sums of '{name}' are not finite, or too large")
        tallies[name] = Tally(count, float(total), float(squares), trials)
    return tallies
