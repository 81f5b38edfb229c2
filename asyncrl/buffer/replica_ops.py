"""What the buffer does for rollout replicas: checks each argument, then asks the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrl.buffer.store import ExperienceStore
from asyncrl.errors import WireError
from asyncrl.rpc import Request
from asyncrl.wire import field

if TYPE_CHECKING:
    from asyncrl.buffer.service import Desk

MAX_WAIT_S = 600.0
MAX_WANT = 4096
MAX_NAME_CHARACTERS = 200
MAX_METRICS = 256


class ReplicaOps:
    """Operations of replicas. `last_seen` is when each one last spoke."""

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
        num_prompts, digest = field(request.args, "num_prompts", int), field(request.args, "digest", str)
        self._ledger.describe_data(num_prompts, digest)
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

        def attempt() -> Any:
            return self._grant(replica, version, want, evaluating)

        self._desk.park_until(request, attempt, no_grant, read_wait_s(args), ("replica", replica))

    def _grant(self, replica: str, version: int, want: int, evaluating: int | None) -> dict[str, Any] | None:
        grants = self._ledger.lease(replica, version, want, self._desk.clock.now())
        evaluation = self._ledger.evaluations.give(replica, version, evaluating)
        if not grants and evaluation is None:
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
        return {"grants": rows, "evaluate": evaluation and {"id": evaluation.id, "step": evaluation.step}}

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
        replica = self._replica(request)
        self._ledger.retire(replica)
        self._last_seen.pop(replica, None)
        self._reply(request)

    def evaluated(self, request: Request) -> None:
        args = request.args
        self._replica(request)
        number, version = field(args, "id", int), field(args, "version", int)
        metrics = field(args, "metrics", dict)
        if len(metrics) > MAX_METRICS or not all(_is_metric(name, value) for name, value in metrics.items()):
            raise WireError(f"evaluation {number}: metrics are up to {MAX_METRICS} finite numbers by name")
        result = {name: float(value) for name, value in metrics.items()}
        if not self._ledger.evaluations.finish(number, version, result):
            self._store.counters["evaluations_unasked"] += 1
        self._reply(request)

    def expire_silent(self, now: float) -> bool:
        """Take evaluations back from replicas that have been silent for a lease's time."""
        lease_s = self._ledger.settings.lease_s
        for evaluation in self._ledger.state.evaluations.values():
            if evaluation.replica and not evaluation.is_done:
                self._last_seen.setdefault(evaluation.replica, now)
        silent = [name for name, seen in self._last_seen.items() if now - seen > lease_s]
        for name in silent:
            del self._last_seen[name]
            self._ledger.evaluations.free(name)
        return bool(silent)

    def _replica(self, request: Request) -> str:
        name = field(request.args, "replica", str)
        if not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise WireError(f"a replica's name has 1 to {MAX_NAME_CHARACTERS} characters")
        self._last_seen[name] = self._desk.clock.now()
        return str(name)

    def _reply(self, request: Request, **args: Any) -> None:
        self._desk.answer(request, args)


def no_grant() -> dict[str, Any]:
    """Return the answer to a lease that grants nothing."""
    return {"grants": [], "evaluate": None}


def read_wait_s(args: dict[str, Any]) -> float:
    """Return the checked `wait_s` of a long poll, in seconds."""
    wait_s = float(field(args, "wait_s", (int, float)))
    if not 0.0 <= wait_s <= MAX_WAIT_S:
        raise WireError(f"a wait of {wait_s} s is not between 0 and {MAX_WAIT_S:g} s")
    return wait_s


def read_pairs(args: dict[str, Any], name: str = "tickets") -> list[tuple[int, int]]:
    """Return the checked (ticket, attempt) pairs of a request."""
    pairs = field(args, name, list)
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(one) is int for one in pair)):
            raise WireError(f"the field '{name}' holds pairs of a ticket and an attempt")
    return [(ticket, attempt) for ticket, attempt in pairs]


def _is_metric(name: Any, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(name, str) and len(name) <= MAX_NAME_CHARACTERS and is_number and math.isfinite(value)
