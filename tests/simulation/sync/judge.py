"""Promises of weight sync, checked from outside: no counter and no state of a service is believed.

Owns the sentences of the promises that were broken. It sees what engines have read, which numbers publishers
took, which versions passed the fault point behind their verification, and what a coordinator says of members.
"""

from __future__ import annotations

from collections import defaultdict

from asyncrl.core.staleness import UNLOADED, PolicyVersion
from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.world import Process, World
from tests.simulation.sync.content import Truth, bytes_of
from weight_sync.memory.staging import view_tensor
from weight_sync.memory.staging_area import StagingArea
from weight_sync.protocol.protocol import Coordination

LOOK_S, COPIES_S = 0.5, 0.1


class Judge:
    """See the module.

    Attributes:
        num_published: Versions that publishers took.
        broken: A sentence for each promise that was broken.
    """

    def __init__(self, world: World, wires: Wires, truth: Truth) -> None:
        self.world, self.wires, self.truth = world, wires, truth
        self.broken: list[str] = []
        self.num_published = 0
        self._served: dict[Process, int] = {}
        self._loaded: defaultdict[str, set[int]] = defaultdict(set)
        self._verified: defaultdict[str, set[int]] = defaultdict(set)
        self._opened: dict[str, int] = {}  # by publisher's process, the newest token
        self._opened_at: dict[int, int] = {}  # by number, when its commit came
        world.on_point.append(self._pass_point)

    def say(self, sentence: str) -> None:
        """Note a broken promise."""
        self.world.note(f"broken: {sentence}")
        self.broken.append(f"{self.world.now:.2f} s: {sentence}")

    def _pass_point(self, process: Process, name: str, place: tuple[int | None, ...]) -> None:
        number = place[0] if place else None
        if name == "receiver.verified" and number is not None:
            self._verified[process.name].add(number)
        elif name == "publisher.commit" and number is not None:
            newest = self._opened.get(repr(process), 0)
            self._opened_at[number] = min(newest, self._opened_at.get(number, newest))

    # --- engines ----------------------------------------------------------------------------------

    def hear_load(self, process: Process, version: PolicyVersion, found: dict[str, bytes]) -> None:
        """An engine has read a version and serves it."""
        number = version.number
        self.world.note(f"loaded {process} {number}")
        if not self.truth.is_right(number, found):
            self.say(f"S4: {process} loaded other bytes as version {number}: {self.truth.name_of(found)}")
        before = self._served.get(process, UNLOADED)
        if number <= before:
            self.say(f"S4: {process} went from version {before} to {number}")
        receiver = process.name.replace("rollout", "receiver")
        if number not in self._verified[receiver]:
            self.say(f"S4: {process} loaded version {number}, which {receiver} has not verified")
        self._served[process] = max(before, number)
        self._loaded[process.name].add(number)

    def served_by(self, process: Process | None) -> int:
        """Return the version number that a replica's process has loaded last."""
        return self._served.get(process, UNLOADED) if process is not None else UNLOADED

    # --- learners ---------------------------------------------------------------------------------

    def hear_open(self, process: Process, token: int) -> None:
        """A learner has opened the publisher that it reaches."""
        publisher = self._publisher_of(process)
        self._opened[publisher] = max(token, self._opened.get(publisher, 0))

    def begin_publish(self, process: Process, token: int, number: int) -> None:
        """A learner is about to publish."""
        self.world.note(f"publishing {process} {number} with token {token}")

    def hear_publish(self, process: Process, token: int, number: int) -> None:
        """A publisher has taken a version."""
        self.num_published += 1
        if token == self.truth.token:  # else an older learner's, at a publisher that another one has followed
            self.truth.published = max(self.truth.published, number)
        newest = self._opened_at.get(number, 0)
        self.world.note(f"published {process} {number} with token {token}")
        if token < newest:
            self.say(f"S5: version {number} of token {token} was taken after token {newest} was opened")

    def _publisher_of(self, process: Process) -> str:
        """Return the publisher's process that a learner is connected to."""
        ends = [
            repr(pipe.listener.process)
            for pipe in self.wires.pipes.values()
            if pipe.line.process is process and pipe.listener.process.name == "publisher.0"
        ]
        return ends[-1] if ends else ""

    # --- receivers ------------------------------------------------------------------------------------

    def watch_copies(self, process: Process, staging: StagingArea) -> None:
        """Look often at the verified copies of a receiver: nobody writes to what may be loaded."""
        if self.world.is_over or not process.is_alive:
            return
        copies = staging._copies
        for copy in filter(None, (copies._verified, copies._committed, copies._taken)):
            found = {
                name: bytes_of(tensor)
                for name, tensor in (
                    (one.name, view_tensor(copy.bytes_B.numpy().data, one)) for one in copy.manifest.tensors
                )
            }
            if not self.truth.is_right(copy.number, found):
                how = "mapped" if copy.is_mapped else "received"
                self.say(f"S4: version {copy.number}, which {process} has {how}, was written to")
                return
        self.world.after(COPIES_S, self.watch_copies, process, staging)

    # --- coordinators -----------------------------------------------------------------------------

    def watch_coordinator(self, process: Process, coordination: Coordination) -> None:
        """Look now and then at what a coordinator says of its members."""
        if self.world.is_over or not process.is_alive:
            return
        for name, member in coordination.members.items():
            replica = name.replace("receiver", "rollout")
            if member.serving != UNLOADED and member.serving not in self._loaded[replica]:
                self.say(
                    f"S4: {process} says that {name} serves version {member.serving}, which it never did"
                )
                return
        self.world.after(LOOK_S, self.watch_coordinator, process, coordination)
