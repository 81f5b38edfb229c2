"""Orders of the leader to every rank, one at a time (pure).

The learner has one controller for its data flow: rank 0 decides, all ranks perform. An order is a
few plain values; trajectories never travel with it, each rank fetches its own by ticket id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from asyncrl.core import wire


@dataclass(frozen=True)
class Restore:
    """Load the checkpoint of `step`; without one, start from the configured model.

    `controllers`: state of the objective's adaptive controllers, from the checkpoint.
    """

    step: int
    has_checkpoint: bool
    controllers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Adjust:
    """Train on with `lr_scale` times the configured learning rate, without the KL term if `is_kl_off`."""

    lr_scale: float
    is_kl_off: bool


@dataclass(frozen=True)
class Publish:
    """Hand the current weights over as version `number`.

    `seen_ids`: token ids of the last batch, used to choose log-prob check rows.
    `path` is the segment that every rank may write to; without one, shards are gathered to rank 0.
    `token`: the leader's fencing token, with which ranks publish stripes.
    """

    number: int
    step: int
    path: str = ""
    seen_ids: list[int] = field(default_factory=list)
    token: int = 0


@dataclass(frozen=True)
class Train:
    """Train one reserved batch, or one part of it: the last part ends the step.

    Attributes:
        step: Learner step index, from 0.
        token: The leader's fencing token, with which ranks fetch.
        tickets: Ticket ids, ascending.
        num_tokens: Tokens of each ticket, used to balance tokens over ranks.
        versions: (number, step to subtract for the lag) of every version that may have sampled these
            tokens, in pairs.
        limits: (metric, value) beyond which an update is not applied.
        is_first, is_last: Whether this is the first part of its step, and the last one.
        parts: For an order joined from parts: ticket ids of each part, in order.
    """

    step: int
    token: int
    tickets: list[int]
    num_tokens: list[int]
    versions: list[tuple[int, int]]
    limits: list[tuple[str, float]] = field(default_factory=list)
    is_first: bool = True
    is_last: bool = True
    parts: list[list[int]] = field(default_factory=list)


def join_parts(parts: Sequence[Train]) -> Train:
    """Join partial orders into one; a single part is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    pairs = (zip(part.tickets, part.num_tokens, strict=True) for part in parts)
    counts = sorted(pair for part in pairs for pair in part)
    return replace(
        parts[0],
        tickets=[ticket for ticket, _ in counts],
        num_tokens=[count for _, count in counts],
        versions=sorted({(number, step) for part in parts for number, step in part.versions}),
        is_last=True,
        parts=[part.tickets for part in parts],
    )


def split_parts(order: Train) -> list[Train]:
    """Return the orders that `join_parts` joined."""
    count_of = dict(zip(order.tickets, order.num_tokens, strict=True))
    parts = [
        replace(order, tickets=part, num_tokens=[count_of[one] for one in part], parts=[])
        for part in order.parts or [order.tickets]
    ]
    last = len(parts) - 1
    return [replace(part, is_first=at == 0, is_last=at == last) for at, part in enumerate(parts)]


@dataclass(frozen=True)
class Checkpoint:
    """Write this rank's state of `step`."""

    step: int


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step's last `Train`, as rank 0 tells the leader.

    Attributes:
        stale_tickets, oversized_tickets, refused_tickets: Groups without a trainable token; with a row longer
            than a microbatch; whose updates the guard refused.
        lag_max: Largest lag of a trained token.
        seen_ids: See `Publish`.
        controllers: See `Restore`.
    """

    stale_tickets: Sequence[int] = ()
    oversized_tickets: Sequence[int] = ()
    refused_tickets: Sequence[int] = ()
    lag_max: int = 0
    seen_ids: list[int] = field(default_factory=list)
    controllers: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_untrainable(self) -> int:
        """Groups that had no token to train."""
        return len(self.stale_tickets) + len(self.oversized_tickets)

    @property
    def dropped(self) -> list[tuple[int, str]]:
        """Groups that changed no weights, each with its reason."""
        reasons = dict.fromkeys(self.refused_tickets, "guard")
        reasons |= dict.fromkeys(self.oversized_tickets, "oversized")
        reasons |= dict.fromkeys(self.stale_tickets, "stale")
        return list(reasons.items())


@dataclass(frozen=True)
class Wait:
    """Nothing to do yet; keeps the ranks' collective from reaching its deadline."""


@dataclass(frozen=True)
class Finish:
    """Write the weights in Hugging Face form if `is_complete`, and end."""

    is_complete: bool


Order = Restore | Adjust | Publish | Train | Checkpoint | Wait | Finish
_KINDS: dict[str, type[Order]] = {
    cls.__name__: cls for cls in (Restore, Adjust, Publish, Train, Checkpoint, Wait, Finish)
}


def encode_order(order: Order) -> bytes:
    """Return `order` as bytes."""
    return wire.pack_header({"kind": type(order).__name__, "fields": asdict(order)})


def decode_order(data: bytes) -> Order:
    """Return the order in `data`."""
    header = wire.unpack_header(data)
    return _KINDS[header["kind"]](**header["fields"])
