"""Operations of the buffer for the learner: each checks the fencing token, then asks the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.buffer import messages as wire
from asyncrl.buffer.pending_requests import RequestHandler
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import LedgerError, WireError
from asyncrl.core.rpc import Request
from asyncrl.core.rpc.message import MAX_NAME_CHARACTERS, Answer, Done
from asyncrl.core.rpc.operations import Operations
from asyncrl.core.wire import Frame


class LearnerOps:
    """Operations of the learner. All but `open` are refused to an older fencing token."""

    def __init__(self, store: ExperienceStore, handler: RequestHandler) -> None:
        self._store = store
        self._ledger = store.ledger
        self._handler = handler
        self._last_call = (0, 0)

    def add_to(self, operations: Operations) -> None:
        """Let these be handled."""
        operations.add(wire.OPEN, self.open)
        operations.add(wire.RESUME, self.resume)
        operations.add(wire.REGISTER_VERSION, self.register_version)
        operations.add(wire.RESERVE, self.reserve)
        operations.add(wire.FETCH, self.fetch)
        operations.add(wire.PREFETCH, self.prefetch)
        operations.add(wire.TRAINED, self.trained)
        operations.add(wire.CHECKPOINTED, self.checkpointed)
        operations.add(wire.REQUEST_EVALUATION, self.request_evaluation)

    def open(self, request: Request, asked: wire.Open) -> wire.Opening:
        token = self._ledger.open(asked.holder[:MAX_NAME_CHARACTERS])
        checkpoints = tuple(
            wire.CheckpointEntry(one.token, one.step, one.digest) for one in self._ledger.checkpoints()
        )
        state = self._ledger.state
        return wire.Opening(token, checkpoints, state.steps_trained, state.num_prompts, state.note)

    def resume(self, request: Request, asked: wire.Resume) -> Done:
        self._check_turn(request, asked)
        refused = self._check_ids("refused", asked.refused)
        self._store.resume(
            asked.token, asked.step, is_fork=asked.is_fork, note=asked.note, refused=list(refused)
        )
        return Done()

    def register_version(self, request: Request, asked: wire.RegisterVersion) -> wire.VersionNumber:
        self._check_turn(request, asked)
        return wire.VersionNumber(self._ledger.register_version(asked.token, asked.step))

    def reserve(self, request: Request, asked: wire.Reserve) -> None:
        """Reserve the batch, or with `have` the next part of it."""
        self._ledger.check_token(asked.token)
        if asked.have is not None:
            self._check_ids("have", asked.have)

        def attempt() -> wire.Reserved | None:
            return self._reserve(asked)

        self._handler.park_until(request, attempt, _not_ready, asked.wait_s, ("learner", ""))

    def _reserve(self, asked: wire.Reserve) -> wire.Reserved | None:
        now = self._handler.clock.now()
        found = self._ledger.reserve_next(asked.token, asked.step, now, asked.have, asked.at_least)
        if found is None:
            return None
        tickets = tuple(
            wire.ReservedTicket(one.id, one.attempt, one.num_tokens, one.num_bytes) for one in found.tickets
        )
        return wire.Reserved(
            ready=True, tickets=tickets, versions=tuple(found.versions), whole=found.is_whole
        )

    def prefetch(self, request: Request, asked: wire.Prefetch) -> Answer[wire.PrefetchedGroups]:
        """Send the oldest complete groups that are in memory; the ledger does not change."""
        self._ledger.check_token(asked.token)
        found = self._store.peek(min(asked.num_groups, self._most_groups))
        attempts = tuple((number, attempt) for number, attempt, _ in found)
        counts, frames = _flatten([frames for _, _, frames in found])
        return Answer(wire.PrefetchedGroups(counts, attempts), frames)

    def fetch(self, request: Request, asked: wire.Fetch) -> Answer[wire.Fetched]:
        """Send payloads of reserved tickets; none for those that the learner has of the right attempt."""
        self._ledger.check_token(asked.token)
        numbers, have = self._check_ids("tickets", asked.tickets), dict(asked.have)
        is_known = {number for number in numbers if self._store.is_reserved(number, have.get(number, 0))}
        payloads, lost = self._store.fetch([number for number in numbers if number not in is_known])
        found = iter(payloads)
        counts, frames = _flatten(
            [] if lost else [[] if number in is_known else next(found) for number in numbers]
        )
        return Answer(wire.Fetched(counts, tuple(lost)), frames)

    def trained(self, request: Request, asked: wire.Trained) -> Done:
        self._check_turn(request, asked)
        self._ledger.trained(asked.token, asked.step, list(asked.dropped), asked.lag_max)
        return Done()

    def checkpointed(self, request: Request, asked: wire.Checkpointed) -> Done:
        self._check_turn(request, asked)
        _check_unique("kept", asked.kept)
        self._ledger.checkpointed(asked.token, asked.step, asked.digest, list(asked.kept))
        return Done()

    def request_evaluation(self, request: Request, asked: wire.RequestEvaluation) -> wire.EvaluationId:
        self._check_turn(request, asked)
        return wire.EvaluationId(self._ledger.request_evaluation(asked.token, asked.step))

    @property
    def _most_groups(self) -> int:
        """Groups of the largest step: no honest request names more, one from before a resume neither."""
        return max(self._ledger.settings.groups_per_step, *self._ledger.state.replay_sizes.values(), 0)

    def _check_ids(self, name: str, values: Sequence[int]) -> Sequence[int]:
        """Return ids of a request: each once, as many as a step has at most."""
        if len(values) > self._most_groups:
            raise WireError(
                f"the field '{name}' holds {len(values)} numbers, allowed are {self._most_groups}"
            )
        return _check_unique(name, values)

    def _check_turn(self, request: Request, asked: wire.OfLearner) -> None:
        """Check the token of a call that may not come behind a later one of the same learner.

        A connection that broke may give up a call late, when it was made again and its learner went on: a
        `resume` would then leave the lineage whose weights are published, and nobody could lease any more.

        Raises:
            LedgerError: It came late, or the token is an older one.
        """
        self._ledger.check_token(asked.token)
        if (asked.token, request.id) < self._last_call:
            raise LedgerError(f"'{request.op}' came behind a later call of its learner")
        self._last_call = (asked.token, request.id)


def _not_ready() -> wire.Reserved:
    return wire.Reserved(ready=False)


def _flatten(payloads: Sequence[Sequence[Frame]]) -> tuple[tuple[int, ...], list[Frame]]:
    """Return how many frames each payload has, and all of them."""
    counts = tuple(len(payload) for payload in payloads)
    return counts, [frame for payload in payloads for frame in payload]


def _check_unique(name: str, values: Sequence[int]) -> Sequence[int]:
    if len(set(values)) < len(values):
        raise WireError(f"the field '{name}' holds whole numbers, each once")
    return values
