"""The parts of the simulated world: what a network, a disk and a process do under faults."""

from __future__ import annotations

import random

import pytest

from asyncrl.buffer.ledger.events import Opened, VersionRegistered
from asyncrl.core.errors import ConnectionLost, DeadlineExceeded
from asyncrl.core.rpc import Request
from asyncrl.planner.faults.ambush import Ambush
from asyncrl.planner.faults.kernel.process import Connection, Process
from asyncrl.planner.faults.kernel.tasks import Lock
from asyncrl.planner.faults.network import FaultyNetwork, Window
from asyncrl.planner.faults.scenario import AMBUSH, Strike
from asyncrl.planner.faults.services.journal import Disk, SimulatedJournal
from asyncrl.planner.world import Message, World

ASK = Message("ask", {}, 1)


class Board:
    """Two processes that know each other."""

    def __init__(self) -> None:
        self.network = FaultyNetwork(0)
        self.world = World(0, self.network)
        self.number = 0
        self.ends: list[str] = []

    def address(self, service: str) -> str | None:
        return next((name for name in self.world.actors if name.startswith(f"{service}/")), None)

    def is_up(self, pid: str) -> bool:
        return pid in self.world.actors

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def note(self, text: str, detail: str = "") -> None:
        pass

    def pass_point(self, process: Process, point: str) -> None:
        pass

    def bury(self, process: Process) -> None:
        self.world.kill(process.name)
        for actor in self.world.actors.values():
            if isinstance(actor, Process):
                actor.lose(process.name)


class Echo(Process):
    """Answers with what it was asked."""

    def handle(self, request: Request) -> None:
        request.reply(**request.args)


class Asker(Process):
    """Asks until its deadline, and writes down how that ended."""

    def begin(self) -> None:
        self.spawn(self._ask())

    async def _ask(self) -> None:
        assert isinstance(self.board, Board)
        try:
            reply = await Connection(self, "echo").call("say", (), 5.0, word="hello")
            self.board.ends.append(reply.args["word"])
        except ConnectionLost:
            self.board.ends.append("lost")
        except DeadlineExceeded:
            self.board.ends.append("late")


def board(*, has_echo: bool = True) -> Board:
    found = Board()
    if has_echo:
        found.world.start(Echo(found, "echo"))
    found.world.start(Asker(found, "asker"))
    return found


def run(found: Board, until_s: float) -> list[str]:
    found.world.run(lambda: False, until_s)
    return found.ends


def test_a_call_is_answered_or_ends_by_its_deadline_or_with_its_connection():
    assert run(board(), 1.0) == ["hello"]
    assert run(board(has_echo=False), 4.0) == []
    assert run(board(has_echo=False), 6.0) == ["late"]
    died = board()
    died.bury(died.world.actors[died.address("echo") or ""])
    assert run(died, 1.0) == ["lost"]


def test_a_stopped_process_does_what_came_meanwhile_once_it_is_thawed():
    found = board()
    echo = found.world.actors[found.address("echo") or ""]
    assert isinstance(echo, Process)
    echo.stop()
    assert run(found, 3.0) == []
    echo.thaw()
    assert run(found, 4.0) == ["hello"]


def test_a_task_that_is_cancelled_ends_where_it_stands_and_frees_what_it_holds():
    found = board(has_echo=False)
    asker = found.world.actors[found.address("asker") or ""]
    assert isinstance(asker, Process)
    lock, told = Lock(), []

    async def hold() -> None:
        async with lock:
            await asker.sleep(1.0)
            told.append("held to its end")

    async def follow() -> None:
        async with lock:
            told.append("followed")

    holding = hold()
    asker.spawn(holding)
    asker.spawn(follow())
    asker.cancel(holding)
    asker.cancel(holding)
    run(found, 3.0)
    assert told == ["followed"]


def test_nothing_happens_in_a_process_that_is_dead():
    found = board()
    found.bury(found.world.actors[found.address("asker") or ""])
    assert run(found, 10.0) == []


@pytest.mark.parametrize(
    ("kind", "num_copies"), [("delay", 1), ("reorder", 1), ("duplicate", 2), ("lose", 0)]
)
def test_a_window_befalls_the_messages_in_it_and_no_others(kind, num_copies):
    network = FaultyNetwork(1)
    network.add(Window(kind, 1.0, 2.0, share=1.0))
    for now in (0.5, 2.0):
        assert [delay_s < 0.02 for delay_s in network.deliver("a/1", "b/2", ASK, now)] == [True]
    assert len(network.deliver("a/1", "b/2", ASK, 1.5)) == num_copies


def test_a_parting_holds_messages_back_or_loses_them_in_both_directions_and_for_these_two():
    network = FaultyNetwork(2)
    network.add(Window("part", 0.0, 4.0, 1.0, ("a", "b")))
    found = [network.deliver(*ends, ASK, 1.0) for ends in (("a/1", "b/1"), ("b/1", "a/1")) for _ in range(20)]
    assert {len(delays_s) for delays_s in found} == {0, 1}
    assert all(delays_s[0] >= 3.0 for delays_s in found if delays_s)
    assert network.deliver("a/1", "c/1", ASK, 1.0)[0] < 0.02
    assert not network.can_reach("b/9", "a/9", 1.0)
    assert network.can_reach("b/9", "a/9", 4.0)


def test_a_garbled_bucket_differs_in_one_bit():
    network = FaultyNetwork(3)
    network.add(Window("garble", 0.0, 1.0, share=1.0))
    assert network.garble(b"\0\0", 2.0) == b"\0\0"
    assert sum(network.garble(b"\0\0", 0.5)) == 1


def test_a_power_cut_leaves_what_was_synced_and_a_killed_process_everything():
    disk = Disk()
    journal = SimulatedJournal(disk, is_always_synced=False, events_per_snapshot=100)
    journal.append(1, 1, [b"old"])
    journal.commit([Opened(1, "a")], 0.0)
    journal.tick(0.0)
    journal.append(2, 1, [b"new"])
    journal.commit([VersionRegistered(1, 0)], 0.5)
    again = SimulatedJournal(disk, is_always_synced=False, events_per_snapshot=100)
    assert list(again.recover().events) == [Opened(1, "a"), VersionRegistered(1, 0)]
    assert again.read(2, 1) == [b"new"]
    kept = set()
    for seed in range(20):
        copy = Disk(list(disk.turns), [], dict(disk.payloads), disk.num_synced, set(disk.synced))
        copy.cut_power(random.Random(seed))
        assert (1, 1) in copy.payloads
        kept.add((len(copy.turns), (2, 1) in copy.payloads))
    assert kept == {(1, False), (1, True), (2, False), (2, True)}


def test_a_journal_that_is_away_makes_nothing_durable_until_it_is_back():
    disk = Disk(is_away=True)
    journal = SimulatedJournal(disk, is_always_synced=True, events_per_snapshot=100)
    assert not journal.commit([Opened(1, "a")], 0.0)
    assert disk.turns == []
    disk.is_away = False
    assert journal.commit([], 1.0)
    assert len(disk.turns) == 1


@pytest.mark.parametrize(
    ("target", "dead"),
    [
        ("rollout", ["rollout.3"]),
        ("receiver", ["receiver.3"]),
        ("pair", ["receiver.3", "rollout.3"]),
        ("ghost", ["ghost of rollout.3"]),
        ("buffer.0", ["buffer.0"]),
    ],
)
def test_an_ambush_kills_at_its_moment_and_only_once(target, dead):
    world, killed = World(0), []
    ambush = Ambush(world, 0, killed.append, lambda name, _: killed.append(f"ghost of {name}"))
    replica = Process(Board(), "rollout.3")
    ambush.lay(Strike(0.0, AMBUSH, target, 5.0, 2))
    ambush.pass_point(replica, "ordered")
    world.run(lambda: False, 1.0)
    assert killed == []
    for _ in range(4):
        ambush.pass_point(replica, "ordered")
    world.run(lambda: False, 4.0)
    assert [one for one in killed if target != "ghost" or one != "receiver.3"] == dead


def test_an_ambush_that_nobody_walks_into_in_time_is_over():
    world, killed = World(0), []
    ambush = Ambush(world, 0, killed.append, lambda name, _: killed.append(name))
    ambush.lay(Strike(0.0, AMBUSH, "rollout", 5.0, 1))
    world.after(5.0, ambush.pass_point, Process(Board(), "rollout.0"), "pinned")
    world.run(lambda: False, 9.0)
    assert killed == []
