"""What the buffer does for the learner: checks each argument and the fencing token, then asks the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.buffer.client import MAX_PREFETCHED
from asyncrl.buffer.replica_ops import MAX_NAME_CHARACTERS, read_name, read_pairs, read_wait_s
from asyncrl.buffer.store import ExperienceStore
from asyncrl.errors import LedgerError, WireError
from asyncrl.rpc import Request
from asyncrl.wire import Frame, field

if TYPE_CHECKING:
    from asyncrl.buffer.service import Desk

MAX_NOTE_VALUES = 16
MAX_KEPT = 1024
"""Checkpoints that a learner may name."""


class LearnerOps:
    """Operations of the learner. All but `open` are refused to an older fencing token."""

    def __init__(self, store: ExperienceStore, desk: Desk) -> None:
        self._store = store
        self._ledger = store.ledger
        self._desk = desk
        self._last_call = (0, 0)

    def table(self) -> dict[str, Callable[[Request], None]]:
        return {
            "open": self.open,
            "resume": self.resume,
            "register_version": self.register_version,
            "reserve": self.reserve,
            "fetch": self.fetch,
            "prefetch": self.prefetch,
            "trained": self.trained,
            "checkpointed": self.checkpointed,
            "request_evaluation": self.request_evaluation,
        }

    def open(self, request: Request) -> None:
        token = self._ledger.open(field(request.args, "holder", str)[:MAX_NAME_CHARACTERS])
        checkpoints = [
            {"token": one.token, "step": one.step, "digest": one.digest} for one in self._ledger.checkpoints()
        ]
        state = self._ledger.state
        self._reply(
            request,
            token=token,
            checkpoints=checkpoints,
            steps_trained=state.steps_trained,
            num_prompts=state.num_prompts,
            note=state.note,
        )

    def resume(self, request: Request) -> None:
        args = request.args
        token, step, is_fork = (
            self._token_in_turn(request),
            field(args, "step", int),
            field(args, "is_fork", bool),
        )
        note, refused = _read_note(args), _read_ids(args, "refused", self._most_groups)
        self._store.resume(token, step, is_fork=is_fork, note=note, refused=refused)
        self._reply(request)

    def register_version(self, request: Request) -> None:
        number = self._ledger.register_version(self._token_in_turn(request), field(request.args, "step", int))
        self._reply(request, number=number)

    def reserve(self, request: Request) -> None:
        """Reserve the batch, or with `have` the next part of it."""
        args = request.args
        token, step = self._token(request), field(args, "step", int)
        have = _read_ids(args, "have", self._most_groups) if args.get("have") is not None else None
        at_least = field(args, "at_least", int) if "at_least" in args else 1

        def attempt() -> dict[str, Any] | None:
            return self._reserve(token, step, have, at_least)

        self._desk.park_until(request, attempt, _not_ready, read_wait_s(request.args), ("learner", ""))

    def _reserve(
        self, token: int, step: int, have: Sequence[int] | None, at_least: int
    ) -> dict[str, Any] | None:
        now = self._desk.clock.now()
        if have is None:
            tickets = self._ledger.reserve(token, step, now)
        else:
            tickets = self._ledger.reserve_part(token, step, now, have, at_least)
        if tickets is None:
            return None
        is_whole = self._ledger.is_whole(step, [*(have or ()), *(ticket.id for ticket in tickets)])
        rows = [
            {
                "ticket": ticket.id,
                "attempt": ticket.attempt,
                "num_tokens": ticket.num_tokens,
                "num_bytes": ticket.num_bytes,
            }
            for ticket in tickets
        ]
        versions = self._ledger.counted_versions(tickets)
        return {"ready": True, "tickets": rows, "versions": versions, "whole": is_whole}

    def prefetch(self, request: Request) -> None:
        """Send the oldest complete groups that are in memory; the ledger does not change."""
        self._token(request)
        num_groups = field(request.args, "num_groups", int)
        if not 0 <= num_groups <= MAX_PREFETCHED:
            raise WireError(f"a learner prefetches {num_groups} groups, allowed are 0 to {MAX_PREFETCHED}")
        found = self._store.peek(min(num_groups, self._most_groups))
        pairs = [[number, attempt] for number, attempt, _ in found]
        self._send_payloads(request, [frames for _, _, frames in found], groups=pairs)

    def fetch(self, request: Request) -> None:
        """Send payloads of reserved tickets; none for those that the learner has of the right attempt."""
        self._token(request)
        numbers = _read_ids(request.args, "tickets", self._most_groups)
        have = dict(read_pairs(request.args, "have")) if "have" in request.args else {}
        is_known = {number for number in numbers if self._store.is_reserved(number, have.get(number, 0))}
        payloads, lost = self._store.fetch([number for number in numbers if number not in is_known])
        found = iter(payloads)
        frames = [] if lost else [[] if number in is_known else next(found) for number in numbers]
        self._send_payloads(request, frames, lost=lost)

    def _send_payloads(self, request: Request, payloads: Sequence[Sequence[Frame]], **args: Any) -> None:
        counts = [len(payload) for payload in payloads]
        frames = [frame for payload in payloads for frame in payload]
        self._desk.answer(request, {"frames_per_group": counts, **args}, frames)

    def trained(self, request: Request) -> None:
        token, step = self._token_in_turn(request), field(request.args, "step", int)
        lag_max = field(request.args, "lag_max", int)
        self._ledger.trained(token, step, _read_drops(request.args), lag_max)
        self._reply(request)

    def checkpointed(self, request: Request) -> None:
        args = request.args
        token, step, digest = (
            self._token_in_turn(request),
            field(args, "step", int),
            read_name(args, "digest"),
        )
        self._ledger.checkpointed(token, step, digest, _read_ids(args, "kept", MAX_KEPT))
        self._reply(request)

    def request_evaluation(self, request: Request) -> None:
        token, step = self._token_in_turn(request), field(request.args, "step", int)
        number = self._ledger.request_evaluation(token, step)
        self._reply(request, id=number)

    @property
    def _most_groups(self) -> int:
        """Groups of the largest step: no honest request names more, one from before a resume neither."""
        return max(self._ledger.settings.groups_per_step, *self._ledger.state.replay_sizes.values(), 0)

    def _token(self, request: Request) -> int:
        token = int(field(request.args, "token", int))
        self._ledger.check_token(token)
        return token

    def _token_in_turn(self, request: Request) -> int:
        """Return the token of a call that may not come behind a later one of the same learner.

        A connection that broke may give up a call late, when it was made again and its learner went on: a
        `resume` would then leave the lineage whose weights are published, and nobody could lease any more.

        Raises:
            LedgerError: It came late.
        """
        token = self._token(request)
        if (token, request.id) < self._last_call:
            raise LedgerError(f"'{request.op}' came behind a later call of its learner")
        self._last_call = (token, request.id)
        return token

    def _reply(self, request: Request, **args: Any) -> None:
        self._desk.answer(request, args)


def _not_ready() -> dict[str, Any]:
    return {"ready": False, "tickets": [], "versions": []}


def _read_ids(args: dict[str, Any], name: str, most: int) -> list[int]:
    """Return the checked ids of a request: whole numbers, each once, `most` of them at most."""
    values = field(args, name, list)
    if len(values) > most:
        raise WireError(f"the field '{name}' holds {len(values)} numbers, allowed are {most}")
    if not all(type(value) is int for value in values) or len(set(values)) < len(values):
        raise WireError(f"the field '{name}' holds whole numbers, each once")
    return list(values)


def _read_note(args: dict[str, Any]) -> dict[str, float]:
    note = field(args, "note", dict)
    if len(note) > MAX_NOTE_VALUES or not all(
        isinstance(name, str) and len(name) <= MAX_NAME_CHARACTERS and type(value) in (int, float)
        for name, value in note.items()
    ):
        raise WireError("the field 'note' holds a few numbers by name")
    return {name: float(value) for name, value in note.items()}


def _read_drops(args: dict[str, Any]) -> list[tuple[int, str]]:
    rows = field(args, "dropped", list)
    for row in rows:
        is_pair = isinstance(row, list) and len(row) == 2 and type(row[0]) is int
        if not (is_pair and isinstance(row[1], str) and len(row[1]) <= MAX_NAME_CHARACTERS):
            raise WireError("the field 'dropped' holds pairs of a ticket and a reason")
    return [(ticket, reason) for ticket, reason in rows]
