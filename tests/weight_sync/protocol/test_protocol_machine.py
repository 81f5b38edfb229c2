"""Both sides of the protocol as a hypothesis state machine: peers and coordinators that die, stop, return,
are replaced while they live, answer late, twice, wrongly or not at all."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncrl.core.staleness import UNLOADED
from tests.weight_sync.protocol.world import TIMING
from tests.weight_sync.sides import Boss, ModelPublisher, ModelReceiver, Peer, Thread
from weight_sync.memory import segments
from weight_sync.protocol.lanes.stripes import Stripe
from weight_sync.protocol.members import MemberState
from weight_sync.protocol.peer import Stage
from weight_sync.protocol.protocol import PUBLISHER, Coordination
from weight_sync.protocol.rounds import Order
from weight_sync.sync_records import BlameRecord

NAMES = st.sampled_from(["a", "b", "c"])
EVERYONE = ("a", "b", "c", PUBLISHER)
FURTHER = (Stripe(1, 2).publisher,)
"""Publishers that do not speak for the learner's ranks."""
PARALLELISM, STEP_S = 2, 0.25
NUM_LONG_EXAMPLES = 3000
"""About 140,000 transitions, in two minutes. One bug of the coordinator took 1,400 examples to be found."""


class ProtocolMachine(RuleBasedStateMachine):
    """`tainted` are the peers that were disturbed or not prompt; only they may be blamed."""

    num_stripes = 1

    def __init__(self) -> None:
        super().__init__()
        self.prefix = f"asyncrl-{uuid.uuid4().hex[:8]}-"
        self.now, self.serial, self.number = 100.0, 0, 0
        self.bosses: list[Boss] = []
        self.inherited: dict[str, int] = {}
        self.receivers: dict[str, ModelReceiver] = {}
        self.publishers: dict[str, ModelPublisher] = {}
        self.stripes = {
            s.publisher: s for s in (Stripe(i, self.num_stripes) for i in range(self.num_stripes))
        }
        self.everyone = ("a", "b", "c", *self.stripes)
        self.tainted: set[str] = set()
        self.is_in_turn, self.num_bases = False, 0
        self.groups: dict[int, tuple[str, ...]] = {}
        self.last_states: dict[tuple[int, str, str], MemberState] = {}
        self.start_coordinator(keep=False)
        for name in self.stripes:
            self.start(name)

    # --- time, messages, bytes --------------------------------------------------------------------

    @property
    def boss(self) -> Boss:
        """The newest coordinator."""
        return self.bosses[-1]

    @property
    def peers(self) -> list[Peer]:
        return [*self.receivers.values(), *self.publishers.values()]

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def collect(self) -> None:
        """Hand orders to the peers that are connected, and check what must hold for each.

        In a turn that takes several messages nothing goes out before its end.
        """
        if self.is_in_turn:
            for boss in self.bosses:
                self.check_states(boss.coordination)
            return
        for boss in self.bosses:
            orders = boss.coordination.take_orders()
            self.check_orders(boss.coordination, orders)
            self.check_states(boss.coordination)
            for order in orders:
                boss.put(order)
            blames = [r for r in boss.coordination.take_records() if isinstance(r, BlameRecord)]
            innocent = [r for r in blames if boss is self.boss and r.culprit not in self.tainted]
            assert not innocent, innocent
        for peer in self.peers:
            peer.fetch_orders()

    def check_states(self, coordination: Coordination) -> None:
        """Nobody goes from DEAD to READY but through SYNCING: looked at after every event."""
        for member in coordination.members.values():
            key = (coordination.token, member.name, member.incarnation)
            if self.last_states.get(key) is MemberState.DEAD:
                assert member.state not in (MemberState.READY, MemberState.PINNED), member
            self.last_states[key] = member.state

    def check_orders(self, coordination: Coordination, orders: list[Order]) -> None:
        """An offer is of the newest version and to those that may get one; a group is named once."""
        groups: dict[int, list[str]] = defaultdict(list)
        for order in orders:
            member = coordination.members.get(order.to)
            if order.kind == "offer":
                assert member is not None and coordination.current is not None
                assert not member.is_pinned and member.state is not MemberState.DRAINING
                assert order.fields["number"] == coordination.current.number
            elif order.kind == "transfer" and member is not None:
                groups[order.fields["membership"]].append(f"{order.to}#{member.incarnation}")
                self.check_base(order, member.incarnation, coordination)
        for membership, names in groups.items():
            assert self.groups.setdefault(membership, tuple(names)) == tuple(names)

    def check_base(self, transfer: Order, incarnation: str, coordination: Coordination) -> None:
        """Differences are to what the member holds, unless it has said something else that is on its way.

        A coordinator that another one has replaced, unaware, knows what the member held before.
        """
        receiver = self.receivers.get(transfer.to)
        if receiver is None or receiver.boss is None or receiver.boss.coordination is not coordination:
            return
        if receiver.incarnation == incarnation and not receiver.reports:
            assert transfer.fields["base"] in (UNLOADED, receiver.base_of(transfer)), transfer
            self.num_bases += bool(transfer.fields["base"])

    def may_move(self, thread: Thread) -> bool:
        """A broadcast moves once all of its group take part in it and nobody was stopped."""
        publisher = self.publishers.get(thread.stripe.publisher)
        if publisher is None or publisher.is_stopped or thread.round not in publisher.sending:
            return False
        names = [name for name, part in self.parts_of(thread.round).items() if part != "LEFT_OUT"]
        are_in = all(self.stage_of(name, thread.round) in (Stage.MOVING, Stage.ENDED) for name in names)
        return bool(names) and are_in and not self.is_anyone_stopped(names)

    def stage_of(self, name: str, round_id: int) -> Stage | None:
        receiver = self.receivers.get(name)
        return receiver.rounds.stage_of(round_id) if receiver else None

    def is_anyone_stopped(self, names: list[str]) -> bool:
        return any(self.receivers[name].is_stopped for name in names)

    def parts_of(self, round_id: int) -> dict[str, str]:
        for boss in self.bosses:
            for round_ in boss.coordination.rounds:
                if round_.id == round_id:
                    return {name: round_.parts[name].value for name in round_.receivers}
        return {}

    def is_group_broken(self, thread: Thread) -> bool:
        """Whether its group has lost someone, so that the thread may notice and fail."""
        publisher = self.publishers.get(thread.stripe.publisher)
        if publisher is None or publisher.rounds.stage_of(thread.round) is Stage.ABORTED:
            return True
        names = self.parts_of(thread.round)
        return not names or any(self.stage_of(name, thread.round) in (None, Stage.ABORTED) for name in names)

    def be_prompt(self, names: Collection[str]) -> None:
        """The peers in `names` do all that they can do at once."""
        self.end_turn()
        peers = [peer for peer in self.peers if peer.name in names]
        is_busy = True
        while is_busy:
            is_busy = False
            for peer in peers:
                is_busy = (not peer.is_stopped and self.do_one(peer)) or is_busy
                self.collect()

    def do_one(self, peer: Peer) -> bool:
        """Let the peer do one thing that it can do at once; False if there is none."""
        if peer.orders:
            peer.take_order(keep=len(peer.old_orders) < 50)
        elif peer.reports:
            peer.send_report(self.now)
        elif isinstance(peer, ModelReceiver):
            return self.do_receiver(peer)
        else:
            assert isinstance(peer, ModelPublisher)
            return self.do_publisher(peer)
        return True

    def do_receiver(self, receiver: ModelReceiver) -> bool:
        thread = next((t for t in receiver.threads.values() if t.is_done or self.may_move(t)), None)
        if thread is not None and thread.is_done:
            receiver.end(thread)
        elif thread is not None:
            thread.move()
        elif receiver.loading is not None:
            receiver.load(is_ok=True)
        else:
            was_attended = receiver.is_attended
            receiver.ask()
            return receiver.loading is not None or not was_attended
        return True

    def do_publisher(self, publisher: ModelPublisher) -> bool:
        for round_id in list(publisher.sending):
            parts = self.parts_of(round_id)
            threads = [self.receivers[name].threads.get(round_id) for name in parts if name in self.receivers]
            if parts and not any(threads) and set(parts.values()) == {"VERIFIED"}:
                publisher.end(round_id, is_ok=True)
                return True
        return False

    @initialize()
    def begin_with_a_version_that_all_serve(self):
        for name in ("a", "b", "c"):
            self.start_receiver(name)
        self.publish()
        self.let_pass(1.0, self.everyone)

    @rule(places=st.lists(st.integers(0, 11), min_size=1, max_size=40))
    def work(self, places):
        """Peers do one thing after another, in any order; whatever comes next finds them in the middle."""
        for place in places:
            self.work_on(self.everyone[place % len(self.everyone)])

    def work_on(self, name: str) -> None:
        for peer in self.peers:
            if peer.name == name and not peer.is_stopped:
                self.do_one(peer)
                self.collect()

    def taint_the_late(self) -> None:
        for peer in self.peers:
            is_late = bool(peer.orders or peer.reports or peer.is_stopped or peer.boss is not self.boss)
            if isinstance(peer, ModelReceiver):
                is_busy = peer.loading is not None or peer.staging.committed_number
                is_late = (
                    is_late
                    or any(self.may_move(t) or t.is_done for t in peer.threads.values())
                    or bool(is_busy)
                )
            elif isinstance(peer, ModelPublisher) and not peer.is_stopped:
                is_late = self.do_publisher(peer) or is_late
            if is_late:
                self.tainted.add(peer.name)

    @rule(
        seconds=st.sampled_from([0.25, 1.0, 4.0, 12.0, 40.0]),
        lazy=st.sets(st.integers(0, 11), max_size=2),
    )
    def pass_time(self, seconds, lazy):
        self.let_pass(seconds, set(self.everyone) - {self.everyone[i % len(self.everyone)] for i in lazy})

    def let_pass(self, seconds: float, names: Collection[str]) -> None:
        """Time passes in small steps; `names` do what they are told at once, the others only poll."""
        for _ in range(int(seconds / STEP_S)):
            self.be_prompt(names)
            self.taint_the_late()
            self.now += STEP_S
            for peer in self.peers:
                if not peer.is_stopped:
                    peer.poll(self.now)
            for boss in self.bosses:
                boss.coordination.tick(self.now)
            self.collect()
            self.check_rounds()

    def check_rounds(self) -> None:
        """Nobody waits longer than the deadline."""
        for boss in self.bosses:
            for round_ in boss.coordination.rounds:
                assert self.now - round_.started <= TIMING.deadline_s, round_
            for member in boss.coordination.members.values():
                assert member.swapping is None or self.now < member.swap_until, member

    # --- what happens to processes ----------------------------------------------------------------

    @rule(keep=st.booleans())
    def start_coordinator(self, keep):
        """A new coordinator; the one before is dead, or it was stopped and lives on unaware."""
        self.bosses = self.bosses[-1:] if keep else []
        token = 1 + self.next_serial()
        fences = self.bosses[-1].coordination.fences if self.bosses else {}
        self.inherited = dict(fences)
        coordination = Coordination(TIMING, PARALLELISM, token, True, fences, uses_direct=True)
        self.bosses.append(Boss(coordination))
        for peer in self.peers:
            peer.boss = peer.boss if peer.boss in self.bosses else None

    @rule(name=NAMES)
    def start_receiver(self, name):
        """A new process under the name; the one before is dead."""
        self.end_receiver(name)
        started_ms = self.next_serial()
        receiver = self.receivers[name] = ModelReceiver(name, f"{name}{started_ms}", started_ms, self.prefix)
        self.tainted.discard(name)
        receiver.say_hello(self.boss, self.now)
        self.collect()

    @rule(name=NAMES)
    def end_receiver(self, name):
        if name in self.receivers:
            self.receivers.pop(name).staging.close()
        self.tainted.add(name)

    @rule(place=st.integers(0, 5), keeps=st.booleans())
    def start_publisher(self, place, keeps):
        """A new process; it has the version of the one before, unless the host lost that too."""
        name = list(self.stripes)[place % self.num_stripes]
        before = self.publishers.get(name)
        self.start(name, before.number if keeps and before is not None else UNLOADED)

    def start(self, name: str, number: int = UNLOADED) -> None:
        if name in self.publishers:
            self.tainted.add(name)
        publisher = ModelPublisher(f"p{self.next_serial()}", self.serial, self.stripes[name], number)
        self.publishers[name] = publisher
        publisher.say_hello(self.boss, self.now)
        self.collect()

    @rule(place=st.integers(0, 5))
    def end_publisher(self, place):
        name = list(self.stripes)[place % self.num_stripes]
        self.publishers.pop(name, None)
        self.tainted.add(name)

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), is_stopped=st.booleans())
    def stop_or_thaw(self, data, is_stopped):
        peer = data.draw(st.sampled_from(self.peers))
        peer.is_stopped = is_stopped

    @precondition(lambda self: any(peer.name not in FURTHER for peer in self.peers))
    @rule(data=st.data(), count=st.sampled_from([0, 1, 2, 2, 2]))
    def change_seats(self, data, count):
        """Processes that go directly come, go, or are other ones; a transfer of theirs may fail for it."""
        peer = data.draw(st.sampled_from([one for one in self.peers if one.name not in FURTHER]))
        if not peer.is_stopped:
            self.tainted.add(peer.name)
            peer.change_seats(count)

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), is_newest=st.booleans())
    def say_hello(self, data, is_newest):
        """A peer loses its connection and finds a coordinator, perhaps one that was replaced."""
        peer = data.draw(st.sampled_from(self.peers))
        if not peer.is_stopped:
            peer.say_hello(self.boss if is_newest else self.bosses[0], self.now)
            self.tainted |= {peer.name} if peer.boss is not self.boss else set()
            self.collect()

    @precondition(lambda self: not self.is_in_turn)
    @rule()
    def begin_turn(self):
        """The coordinators find all that comes from here on in one turn of their servers."""
        self.is_in_turn = True

    @precondition(lambda self: self.is_in_turn)
    @rule()
    def take_turn(self):
        self.end_turn()

    def end_turn(self) -> None:
        self.is_in_turn = False
        self.collect()

    # --- single messages, late and twice ----------------------------------------------------------

    @precondition(lambda self: any(peer.orders for peer in self.peers))
    @rule(data=st.data())
    def take_one_order(self, data):
        peer = data.draw(st.sampled_from([peer for peer in self.peers if peer.orders]))
        if not peer.is_stopped:
            peer.take_order(keep=True)
            self.collect()

    @precondition(lambda self: any(peer.old_orders for peer in self.peers))
    @rule(data=st.data())
    def take_an_old_order_again(self, data):
        peer = data.draw(st.sampled_from([peer for peer in self.peers if peer.old_orders]))
        token, order = data.draw(st.sampled_from(peer.old_orders))
        if order.kind in ("offer", "transfer", "abort"):
            peer.hear_order(token, order)
            self.collect()

    @precondition(lambda self: any(peer.reports for peer in self.peers))
    @rule(data=st.data(), is_twice=st.booleans())
    def send_one_report(self, data, is_twice):
        peer = data.draw(st.sampled_from([peer for peer in self.peers if peer.reports]))
        if is_twice:
            peer.reports.insert(1, peer.reports[0])
            self.tainted.add(peer.name)  # a load that failed counts twice
        if not peer.is_stopped:
            peer.send_report(self.now)
            self.collect()

    @precondition(lambda self: any(receiver.threads for receiver in self.receivers.values()))
    @rule(data=st.data(), what=st.sampled_from(["move", "corrupt", "cut"]))
    def disturb_a_transfer(self, data, what):
        receiver = data.draw(st.sampled_from([r for r in self.receivers.values() if r.threads]))
        thread = data.draw(st.sampled_from(list(receiver.threads.values())))
        if receiver.is_stopped:
            return
        if what == "cut" or self.is_group_broken(thread):
            self.tainted |= {receiver.name} if not self.is_group_broken(thread) else set()
            receiver.end(thread, "transport")
        elif not thread.is_done and self.may_move(thread):
            self.tainted |= {receiver.name} if what == "corrupt" else set()
            thread.move(is_corrupt=what == "corrupt")

    # --- the learner and the replicas -------------------------------------------------------------

    @precondition(lambda self: self.publishers)
    @rule()
    def publish(self):
        """The learner publishes; a publisher that is not there does not get the version."""
        self.number += 1
        for publisher in self.publishers.values():
            publisher.publish(self.number)

    @precondition(lambda self: self.publishers)
    @rule()
    def publish_and_stop_in_the_middle_of_the_transfer(self):
        self.publish()
        for name in 10 * self.everyone:
            if not any(thread.num_buckets for r in self.receivers.values() for thread in r.threads.values()):
                self.work_on(name)

    @precondition(lambda self: self.receivers)
    @rule(
        data=st.data(),
        what=st.sampled_from(["ask", "load", "fail", "restart", "pin", "unpin", "drain", "retire"]),
    )
    def act_as_replica(self, data, what):
        receiver = data.draw(st.sampled_from(list(self.receivers.values())))
        if receiver.is_stopped:
            return
        if what in ("load", "fail"):
            if receiver.loading is not None:
                self.tainted |= {receiver.name} if what == "fail" else set()
                receiver.load(is_ok=what == "load")
        elif what == "ask":
            receiver.ask()
        elif what == "restart":
            receiver.restart_replica()
        elif what != "retire" or receiver.is_draining:
            receiver.tell(what)

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def no_more_swap_than_allowed(self):
        for boss in self.bosses:
            members = boss.coordination.members.values()
            assert sum(member.swapping is not None for member in members) <= PARALLELISM

    @invariant()
    def a_ready_member_serves_something_and_is_not_fenced(self):
        for boss in self.bosses:
            for member in boss.coordination.members.values():
                if member.state in (MemberState.READY, MemberState.PINNED):
                    assert member.serving and not member.is_fenced

    @invariant()
    def a_member_holds_two_copies_at_most_and_is_in_one_round(self):
        for boss in self.bosses:
            for member in boss.coordination.members.values():
                assert sum(n is not None for n in (member.staging, member.staged, member.swapping)) <= 2
                rounds = [
                    r
                    for r in boss.coordination.rounds
                    if member.name in r.parts and not r.has_left(member.name)
                ]
                assert len({r.stripe for r in rounds}) == len(rounds), rounds
                assert len({r.version for r in rounds}) <= 1, rounds
        for receiver in self.receivers.values():
            assert len(receiver.rounds.open_rounds) <= self.num_stripes

    @invariant()
    def a_group_is_used_by_one_round_at_a_time(self):
        for boss in self.bosses:
            used = [round_.membership for round_ in boss.coordination.rounds if round_.membership]
            assert len(used) == len(set(used)), boss.coordination.rounds

    @invariant()
    def a_fence_outlives_the_coordinator_that_set_it(self):
        for name, number in list(self.inherited.items()):
            member = self.boss.coordination.members.get(name)
            if member is not None and member.serving >= number:
                del self.inherited[name]
            else:
                assert member is None or member.is_fenced, member

    def teardown(self) -> None:
        """From now on everyone behaves: then every member that may follow ends at the newest version."""
        try:
            self.behave()
        finally:
            for receiver in self.receivers.values():
                receiver.staging.close()
            segments.unlink_all(self.prefix)

    def behave(self) -> None:
        self.end_turn()
        for name in self.stripes:
            if name not in self.publishers:
                self.start(name)
        for peer in self.peers:
            peer.is_stopped = False
            peer.old_orders.clear()
            if peer.boss is not self.boss:
                peer.say_hello(self.boss, self.now)
                self.collect()
        following = [r for r in self.receivers.values() if not r.is_draining]
        for receiver in following:
            receiver.tell("unpin")
            for thread in list(receiver.threads.values()):
                if thread.round not in receiver.incoming:
                    receiver.end(thread, "transport")
        self.publish()
        for _ in range(12):
            self.let_pass(4.0, self.everyone)
        for receiver in following:
            member = self.boss.coordination.members[receiver.name]
            assert member.state is MemberState.READY and not member.is_fenced, member
            assert receiver.serving == member.serving == self.number, (receiver.serving, member)


class StripedMachine(ProtocolMachine):
    """Two publishers, each with a stripe of every version."""

    num_stripes = 2


SHORT = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
ProtocolMachine.TestCase.settings = settings(SHORT)
StripedMachine.TestCase.settings = settings(SHORT, max_examples=20)
TestProtocolMachine = ProtocolMachine.TestCase
TestStripedMachine = StripedMachine.TestCase


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [ProtocolMachine, StripedMachine])
def test_the_protocol_keeps_its_promises_over_many_rounds(machine: type[ProtocolMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=NUM_LONG_EXAMPLES if machine is ProtocolMachine else NUM_LONG_EXAMPLES // 2,
            stateful_step_count=60,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
