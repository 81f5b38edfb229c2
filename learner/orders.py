"""What the leader tells every rank to do, one order at a time (pure).

The learner has one controller for its data flow: rank 0 decides, all ranks perform. An order is a
few plain values; trajectories never travel with it, each rank fetches its own by ticket id.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl import wire


@dataclass(frozen=True)
class Restore:
    """Load the checkpoint of `step`; without one, the model is as it was configured.

    `controllers` is what the objective kept in it.
    """

    step: int
    has_checkpoint: bool
    controllers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Adjust:
    """Train on with `lr_scale` times the configured learning rate, without the KL term if `is_kl_off`."""

    lr_scale: float
    is_kl_off: bool


@dataclass(frozen=True)
class Publish:
    """Hand the current weights over as version `number`, with the log-probs of a probe if `has_probe`.

    `path` is the segment that every rank may write to; without one, shards are gathered to rank 0.
    """

    number: int
    step: int
    has_probe: bool = False
    path: str = ""


@dataclass(frozen=True)
class Train:
    """Train one reserved batch.

    Attributes:
        step: Learner step index, from 0.
        token: The leader's fencing token, with which ranks fetch.
        tickets: Ticket ids, ascending.
        num_tokens: Tokens of each ticket, to balance by.
        versions: (number, step to subtract for the lag) of every version that may have sampled these
            tokens, in pairs.
        limits: (metric, value) beyond which an update is not applied.
    """

    step: int
    token: int
    tickets: list[int]
    num_tokens: list[int]
    versions: list[tuple[int, int]]
    limits: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """Write this rank's state of `step`."""

    step: int


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
    fields: dict[str, Any] = wire.unpack_header(data)
    return _KINDS[fields["kind"]](**fields["fields"])
