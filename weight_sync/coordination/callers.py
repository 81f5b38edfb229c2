"""What a peer's hello makes of it at the coordinator (pure)."""

from __future__ import annotations

from weight_sync.protocol.members import Card, PublisherSeat
from weight_sync.protocol.messages import Hello


def seat_of(hello: Hello, now: float) -> PublisherSeat:
    """Return the publisher that says hello."""
    return PublisherSeat(
        hello.incarnation,
        frozenset(hello.abilities),
        hello.store_host,
        hello.store_port,
        now,
        born=hello.born,
    )


def card_of(hello: Hello) -> Card:
    """Return what a receiver says of itself."""
    return Card(
        hello.name,
        hello.incarnation,
        frozenset(hello.abilities),
        serving=hello.serving,
        staged=hello.staged,
        is_attended=hello.attended,
        is_pinned=hello.pinned,
        is_draining=hello.draining,
        born=hello.born,
        base=hello.base,
    )
