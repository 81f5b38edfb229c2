"""Mutants of weight sync."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncrl.core.rpc.client import AsyncClient, Client
from tests.simulation.mutation import Mutant, Patch, always
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.coordination.order_queue import OrderQueue
from weight_sync.coordinator_session import CoordinatorSession
from weight_sync.memory import segments
from weight_sync.memory.pool import SegmentPool, Slot
from weight_sync.memory.staging_area import StagingArea
from weight_sync.protocol.copies.sharing import CopySharing
from weight_sync.protocol.members import Member
from weight_sync.protocol.peer import CoordinatorEpoch, EpochCheck, Pin, RoundTracker
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import Round
from weight_sync.publisher import PublisherService
from weight_sync.publisher_client import PublisherClient
from weight_sync.receiving.assembly import Assemblies, Assembly
from weight_sync.receiving.inbound_rounds import InboundRounds
from weight_sync.receiving.replica_session import ReplicaSession


def _open_any(self: SegmentPool, token: int) -> None:
    self.token = max(self.token, token)


def _keep_line(self: Client) -> bool:
    self._line.look()
    return self._line.is_up


def _keep_async_line(self: AsyncClient) -> bool:
    self._line.look()
    return self._line.is_up


def _forget_orders(self: OrderQueue, seq: int) -> None:
    self.orders.clear()


def _free_any_slot(self: SegmentPool) -> Slot | None:
    return min(self._slots, key=lambda slot: slot.number, default=None)


def _same_name(self: StagingArea, prefix: str, incarnation: str, keeps_base: bool = False) -> None:
    _STAGING_INIT(self, prefix, "0", keeps_base)


def _send_once(self: CoordinatorSession) -> None:
    while (report := self._reports.get()) is not None and not self._stop.is_set():
        self._try_report(report)


def _deliver_any(self: CoordinatorSession, session: int) -> bool:
    return True


def _never_lift(self: Member) -> None:
    pass


def _choose_first(self: CopySharing, members: Iterable[Member], rounds: Iterable[Round]) -> list[Member]:
    """Send to the first member of each node alone, whatever becomes of it."""
    first: dict[str, str] = {}
    for member in self._state.members.values():
        first.setdefault(member.node, member.name)
    return [member for member in members if first[member.node] == member.name]


def _unverified(self: Any, manifest: Any) -> Any:
    return always(None)


def _stay_loaded(self: Any, request: Any, asked: Any) -> Any:
    """Believe that a load was made, however it ended."""
    return _LOADED(self, request, type(asked)(**{**_fields(asked), "ok": True}))


def _fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


_STAGING_INIT, _LOADED = StagingArea.__init__, ReplicaSession._take_loaded

MUTANTS = (
    Mutant(
        "digests",
        "a bucket's digest is checked before a version counts as verified",
        "garbled",
        (Patch(InboundRounds, "_verifier", _unverified),),
    ),
    Mutant(
        "publisher_token",
        "an older learner's publish is refused",
        "kill_learner",
        (Patch(SegmentPool, "open", _open_any),),
    ),
    Mutant(
        "coordinator_token",
        "peers and coordinators heed the newest coordinator's token (both guards)",
        "zombie",
        (
            Patch(CoordinatorEpoch, "hear", always(EpochCheck.SAME)),
            Patch(CoordinatorService, "_check_token", always(None)),
        ),
    ),
    Mutant(
        "abandoned",
        "a copy that a thread may still write to is not given away",
        "silent",
        (
            Patch(Assemblies, "abandon", Assemblies.leave),
            Patch(Assemblies, "end_abandoned", always(None)),
        ),
    ),
    Mutant(
        "stripes",
        "a version counts as verified once all its stripes are",
        "striped",
        (Patch(Assembly, "is_complete", property(always(True))),),
    ),
    Mutant(
        "client_line",
        "a client that lost its connection makes another one",
        "broken_lines",
        (Patch(Client, "_has_connection", _keep_line),),
    ),
    Mutant(
        "async_client_line",
        "a client of an event loop that lost its connection makes another one",
        "broken_lines",
        (Patch(AsyncClient, "_has_connection", _keep_async_line),),
    ),
    Mutant(
        "orders_kept",
        "an order is kept until its peer acknowledges it",
        "broken_lines",
        (Patch(OrderQueue, "acknowledge", _forget_orders),),
    ),
    Mutant(
        "current_kept",
        "the current version is never given away, and a bucket's digest is checked (both guards)",
        "late_joiner",
        (Patch(SegmentPool, "_free_slot", _free_any_slot), Patch(InboundRounds, "_verifier", _unverified)),
    ),
    Mutant(
        "legacy",
        "a publisher goes on where its forerunner stopped, or the learner publishes again (both guards)",
        "kill_publisher",
        (Patch(SegmentPool, "_take_over", always(None)), Patch(PublisherClient, "has_lost", always(False))),
    ),
    Mutant(
        "names_of_copies",
        "no name of a copy occurs twice",
        "zombie",
        (Patch(StagingArea, "__init__", _same_name),),
    ),
    Mutant(
        "ghosts",
        "who was followed by another replica is not heard, and what it reads not written (all guards)",
        "zombie",
        (
            Patch(ReplicaSession, "_is_superseded", always(False)),
            Patch(StagingArea, "quarantine", always(None)),
            Patch(segments, "is_read", always(False)),
        ),
    ),
    Mutant(
        "deadlines",
        "rounds have deadlines",
        "silent",
        (Patch(Coordination, "tick", always(None)),),
    ),
    Mutant(
        "reports_made_good",
        "a report that was lost is made good by a hello",
        "partition",
        (Patch(CoordinatorSession, "_send_reports", _send_once),),
    ),
    Mutant(
        "hello_after_restart",
        "a peer that a coordinator does not know says hello",
        "kill_coordinator",
        (Patch(CoordinatorSession, "_say_hello", _deliver_any),),
    ),
    Mutant(
        "new_connection",
        "a peer whose coordinator is silent connects anew",
        "lost",
        (Patch(CoordinatorSession, "_connect_anew", lambda self, client: client),),
    ),
    Mutant(
        "pins_end",
        "a pin ends with the replica that asked for it",
        "pinned",
        (Patch(Pin, "meet", always(False)), Patch(Pin, "end", always(False))),
    ),
    Mutant(
        "failed_loads",
        "a version whose load failed is loaded again",
        "refusing",
        (Patch(ReplicaSession, "_take_loaded", _stay_loaded),),
    ),
    Mutant(
        "rounds_once",
        "a round that is over is not begun again",
        "general",
        (Patch(RoundTracker, "end", always(True)),),
    ),
    Mutant(
        "serving_told",
        "a receiver tells that its replica was started anew",
        "kill_replica",
        (Patch(ReplicaSession, "_note_serving", always(None)),),
    ),
    Mutant(
        "aborts_end",
        "a transfer that was aborted gives its copy back",
        "general",
        (Patch(PublisherService, "_abort", always(None)), Patch(InboundRounds, "abort", always(None))),
    ),
    Mutant(
        "mapped_kept",
        "a segment that a process of the node has mapped is not written to",
        "shared",
        (Patch(segments, "is_read", always(False)),),
    ),
    Mutant(
        "another_takes_over",
        "nobody waits for a copy of a member that receives it no more",
        "shared",
        (Patch(CopySharing, "choose_receivers", _choose_first),),
    ),
    Mutant(
        "sent_if_not_mapped",
        "who cannot map a version gets its bytes",
        "shared",
        (Patch(CopySharing, "_may_map", always(True)),),
    ),
    Mutant(
        "fences_end", "a fence is lifted by catching up", "silent", (Patch(Member, "catch_up", _never_lift),)
    ),
)
