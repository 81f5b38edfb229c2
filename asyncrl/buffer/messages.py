"""Messages between the buffer and its callers: a struct per request and answer (pure).

Replicas lease, push and report; the learner reserves, fetches and commits. Payloads of groups travel as
frames beside these (`asyncrl.core.experience`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, field

from asyncrl.buffer.ledger.events import UNSAID
from asyncrl.core.errors import WireError
from asyncrl.core.metrics.tallies import Tally
from asyncrl.core.rpc.message import MAX_NAME_CHARACTERS, AskStatus, Done, Message, Name, Operation, Wait
from asyncrl.core.status.service import BufferStatus

MAX_WANT = 4096
MAX_METRICS = 1024
MAX_NOTE_VALUES = 16
MAX_KEPT = 1024
"""Checkpoints that a learner may name."""
MAX_PREFETCHED = 4096
MAX_COUNT, MAX_TOTAL, MAX_SQUARES = 10**15, 1e150, 1e300
"""Of a tally: sums of many such, and the square of their mean, stay finite. Rewards reach 3.4e38."""

Attempts = tuple[tuple[int, int], ...]
"""(ticket, attempt) pairs."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Total = Annotated[float, Meta(ge=-MAX_TOTAL, le=MAX_TOTAL)]
MetricName = Annotated[
    str, Meta(pattern=r"\A(accuracy|reward_mean|val-(core|aux)/.+)\Z", max_length=MAX_NAME_CHARACTERS)
]
"""Of an evaluation's figures, those that somebody reads."""
Sums = tuple[Count, Total, Annotated[float, Meta(ge=0.0, le=MAX_SQUARES)], Count]
"""Count, total, squares and trials of a `Tally`."""
Metrics = Annotated[dict[MetricName, float | tuple[int, float, float, int]], Meta(max_length=MAX_METRICS)]
"""By name a number, or sums, whose bounds are checked one by one: msgspec 0.22 crashes on a union of a number
with bounds and a tuple of fixed length."""
Note = Annotated[
    dict[Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)], float], Meta(max_length=MAX_NOTE_VALUES)
]


class OfReplica(Message, frozen=True):
    """A request of the replica of this name."""

    replica: Name


class OfAttempt(OfReplica, frozen=True):
    """A request about one attempt at a ticket."""

    ticket: int
    attempt: int


class OfLearner(Message, frozen=True):
    """A request of the learner that holds this fencing token; an older one is refused."""

    token: int


class OfStep(OfLearner, frozen=True):
    """A request about one step."""

    step: int


class DescribeData(Message, frozen=True):
    """Description of the training data, sent once, before the first lease.

    Attributes:
        sources: (prompts, weight) of each source, where there are several.
    """

    num_prompts: int
    digest: Name
    sources: tuple[tuple[int, float], ...] = ()


class Lease(OfReplica, frozen=True):
    """Asks for up to `want` groups to generate with the weights of `version`.

    Attributes:
        want: 0 asks for an evaluation order only.
        evaluating: The order that the replica holds already.
        held: All attempts that it works on, after a `lease` failed: the others go back.
    """

    version: int
    want: Annotated[int, Meta(ge=0, le=MAX_WANT)]
    wait_s: Wait
    evaluating: int | None = None
    held: Attempts | None = None


class LeaseGrant(Message, frozen=True):
    """The right to generate one group until `lease_s` from now; renew it in time.

    Attributes:
        source, pass_number, index: The prompt: `index` counts over all sources, one after the other;
            `pass_number` is the traversal of this source.
        seed: Of the ticket; `orders.sample_seed(run_seed, ticket, sample)` is a sample's own.
        partial_attempt: The attempt whose partial rollout `fetch_partial` returns, 0 for none.
    """

    ticket: int
    attempt: int
    source: int
    pass_number: int = field(name="pass")
    index: int
    seed: int
    lease_s: float
    partial_attempt: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """(ticket, attempt), as `renew` and `release` take it."""
        return self.ticket, self.attempt


class EvaluationOrder(Message, frozen=True):
    """Evaluate at the served weights, which have seen at least `step` steps.

    Attributes:
        part, num_parts: Share of the held-out prompts: every `num_parts`-th, from `part` on.
    """

    id: int
    step: int
    part: int = 0
    num_parts: int = 1


class LeaseReply(Message, frozen=True):
    """Grants, possibly none, and an evaluation order, mostly None."""

    grants: tuple[LeaseGrant, ...] = ()
    evaluate: EvaluationOrder | None = None


class Renew(OfReplica, frozen=True):
    """Extends leases; also the replica's heartbeat."""

    tickets: Attempts


class Renewed(Message, frozen=True):
    """The attempts that are lost: stop working on them."""

    lost: Attempts = ()


class Push(OfAttempt, frozen=True):
    """Hands a finished group over, in the frames."""


class PushPartial(OfAttempt, frozen=True):
    """Returns a lease with the work done so far, in the frames."""


class PushTurns(OfAttempt, frozen=True):
    """Adds record `number` of the attempt's finished turns, in the frame; the lease goes on.

    Attributes:
        number: From 1, over all attempts at the ticket. versions: The lowest and highest that sampled it.
    """

    number: Annotated[int, Meta(ge=1)]
    versions: tuple[int, int]


class Settled(Message, frozen=True):
    """Result of a push (stored, duplicate, late, dropped), of a partial push (stored, released, late) or of
    turns (stored, duplicate, full, late)."""

    result: str


class FetchPartial(OfAttempt, frozen=True):
    """Asks for the work that this leased attempt may go on from."""


class FetchedPartial(Message, frozen=True):
    """Whether the frames hold work: a group, or so many records of turns."""

    found: bool
    num_records: int = 0


class Fail(OfAttempt, frozen=True):
    """Reports a group that could not be generated; it is tried again, or given up.

    Attributes:
        cause: A failure's `Reason`; empty where it is none of a reward.
    """

    reason: str
    cause: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)] = ""


class Release(OfReplica, frozen=True):
    """Returns leases unfinished, while draining."""

    tickets: Attempts


class Deregister(OfReplica, frozen=True):
    """Returns all that the replica's name holds."""


class Evaluated(OfReplica, frozen=True):
    """The result of a part at weights of `version`.

    Attributes:
        metrics: Of the form `Metrics`, which `tallies` checks: a part that is refused must be known.
    """

    id: int
    version: int
    metrics: Mapping[str, object]
    part: int = 0

    def tallies(self) -> dict[str, Tally]:
        """Return the metrics as sums; a number is one value's.

        Raises:
            WireError: They are not of that form, or a name cannot be printed.
        """
        try:
            found = msgspec.convert(self.metrics, Metrics)
            sums = [value if isinstance(value, tuple) else (1, value, 0.0, 0) for value in found.values()]
            tallies = [Tally(*msgspec.convert(one, Sums)) for one in sums]
        except msgspec.ValidationError as error:
            raise WireError(f"evaluation {self.id}: a metric is refused: {error}") from None
        if not all(name.isprintable() for name in found):
            raise WireError(f"evaluation {self.id}: the name of a metric cannot be printed")
        return dict(zip(found, tallies, strict=True))


class NextPart(Message, frozen=True):
    """Another part to answer, if any."""

    more: EvaluationOrder | None = None


class Open(Message, frozen=True):
    """Become the learner: older tokens are fenced."""

    holder: str


class CheckpointEntry(Message, frozen=True):
    """A checkpoint that the ledger knows to be committed."""

    token: int
    step: int
    digest: str


class Opening(Message, frozen=True):
    """State of the run for a learner that takes over.

    Attributes:
        checkpoints: From which it may resume, oldest first; without any, `resume(0)`.
        num_prompts: 0 while no replica has described the data.
        note: The note of the last `resume` that had one.
    """

    token: int
    checkpoints: tuple[CheckpointEntry, ...]
    steps_trained: int
    num_prompts: int
    note: Mapping[str, float]


class Resume(OfStep, frozen=True):
    """Rewinds the ledger, see `LearnerClient.resume`."""

    is_fork: bool
    note: Note
    refused: tuple[int, ...]


class RegisterVersion(OfStep, frozen=True):
    """Asks for a new version number for the weights after `step` steps."""


class VersionNumber(Message, frozen=True):
    """The new version's number."""

    number: int


class Reserve(OfStep, frozen=True):
    """Reserves the batch of `step`; with `have`, the tickets of the parts before, its next part."""

    wait_s: Wait
    have: tuple[int, ...] | None = None
    at_least: int = 1


class ReservedTicket(Message, frozen=True):
    """One group of a reserved batch."""

    ticket: int
    attempt: int
    num_tokens: int
    num_bytes: int


class Reserved(Message, frozen=True):
    """A batch, if it is ready, see `Reservation`; `versions` holds (number, step) pairs."""

    ready: bool
    tickets: tuple[ReservedTicket, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()
    whole: bool = False


class Prefetch(OfLearner, frozen=True):
    """Asks for the oldest complete groups that are in memory."""

    num_groups: Annotated[int, Meta(ge=0, le=MAX_PREFETCHED)]


class PrefetchedGroups(Message, frozen=True):
    """Attempts whose groups came, and how many of the frames each has."""

    frames_per_group: tuple[int, ...]
    groups: Attempts


class Fetch(OfLearner, frozen=True):
    """Asks for payloads of reserved tickets but those that the learner has of the right attempt."""

    tickets: tuple[int, ...]
    have: Attempts = ()


class Fetched(Message, frozen=True):
    """Number of the frames that belong to each group, and the tickets whose payloads are lost."""

    frames_per_group: tuple[int, ...]
    lost: tuple[int, ...] = ()


class Trained(OfStep, frozen=True):
    """Reports a step trained, less the dropped (ticket, reason) pairs."""

    dropped: tuple[tuple[int, Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]], ...]
    lag_max: int = UNSAID


class Checkpointed(OfStep, frozen=True):
    """Commits a checkpoint; `kept`: the steps of all that exist, this one too."""

    digest: Name
    kept: Annotated[tuple[int, ...], Meta(max_length=MAX_KEPT)]


class RequestEvaluation(OfStep, frozen=True):
    """Orders an evaluation at weights of at least `step`."""


class EvaluationId(Message, frozen=True):
    """The order's id; the results stand in the status."""

    id: int


STATUS = Operation("status", AskStatus, BufferStatus)
DESCRIBE_DATA = Operation("describe_data", DescribeData, Done)
LEASE = Operation("lease", Lease, LeaseReply)
RENEW = Operation("renew", Renew, Renewed)
PUSH = Operation("push", Push, Settled)
PUSH_PARTIAL = Operation("push_partial", PushPartial, Settled)
PUSH_TURNS = Operation("push_turns", PushTurns, Settled)
FETCH_PARTIAL = Operation("fetch_partial", FetchPartial, FetchedPartial)
FAIL = Operation("fail", Fail, Done)
RELEASE = Operation("release", Release, Done)
DEREGISTER = Operation("deregister", Deregister, Done)
EVALUATED = Operation("evaluated", Evaluated, NextPart)

OPEN = Operation("open", Open, Opening)
RESUME = Operation("resume", Resume, Done)
REGISTER_VERSION = Operation("register_version", RegisterVersion, VersionNumber)
RESERVE = Operation("reserve", Reserve, Reserved)
PREFETCH = Operation("prefetch", Prefetch, PrefetchedGroups)
FETCH = Operation("fetch", Fetch, Fetched)
TRAINED = Operation("trained", Trained, Done)
CHECKPOINTED = Operation("checkpointed", Checkpointed, Done)
REQUEST_EVALUATION = Operation("request_evaluation", RequestEvaluation, EvaluationId)
