"""The fault matrix as a table: who is struck, when, how, and who must be named.

A phase is a point that one process passes on the way of version 2: the victim itself where it passes one,
else the receiver or the engine of replica 0, which strikes the victim from there.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.weight_sync.cluster import model
from weight_sync.memory.manifest import TensorSpec, plan

BUCKET_BYTES = 4096
_SPECS = [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in model(2)]
LAST = plan(_SPECS, BUCKET_BYTES).num_buckets - 1
FIRST, MIDDLE = 0, (LAST + 1) // 2
assert FIRST < MIDDLE < LAST

WITNESSED: dict[str, tuple[str, str]] = {
    "offer": ("receiver.0", "receiver.offer@2"),
    "first bucket": ("receiver.0", f"receiver.bucket@2.{FIRST}"),
    "middle": ("receiver.0", f"receiver.bucket@2.{MIDDLE}"),
    "last bucket": ("receiver.0", f"receiver.bucket@2.{LAST}"),
    "verify": ("receiver.0", "receiver.verified@2"),
    "swap": ("engine.0", "engine.swapping@2"),
    "commit": ("receiver.0", "receiver.commit@2"),
}
"""Phase → (who passes a point there, the point)."""

OWN: dict[tuple[str, str], str] = {
    ("coordinator", "offer"): "coordinator.offer@2",
    ("coordinator", "verify"): "coordinator.verified@2",
    ("coordinator", "commit"): "coordinator.commit@2",
    ("publisher", "offer"): "publisher.commit@2",
    ("publisher", "first bucket"): f"publisher.bucket@2.{FIRST}",
    ("publisher", "middle"): f"publisher.bucket@2.{MIDDLE}",
    ("publisher", "last bucket"): f"publisher.bucket@2.{LAST}",
    ("publisher", "verify"): "publisher.sent@2",
    ("receiver.0", "swap"): "receiver.hand_over@2",
    ("engine.0", "swap"): "engine.half@2",
    ("engine.0", "commit"): "engine.loaded@2",
    ("learner", "offer"): "learner.published@2",
}
"""(Victim, phase) → the victim's own point, where it passes one."""


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        victims: Struck together.
        phase: Of version 2's way.
        kind: `kill` or `stop`.
        num_replicas: In the run.
        blamed: Starts of what the coordinator must say, and nothing else; none where nobody waits for
            the victim, or where it is the coordinator.
    """

    victims: tuple[str, ...]
    phase: str
    kind: str
    num_replicas: int
    blamed: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} {' '.join(self.victims)} at {self.phase}"

    @property
    def is_needed(self) -> bool:
        """Whether the replicas cannot get version 2 without the victim."""
        if self.victims == ("coordinator",):
            return self.phase == "offer"  # a transfer that is under way needs it no more
        return self.victims == ("publisher",) and self.phase not in ("verify", "swap", "commit")

    @property
    def trigger(self) -> tuple[str, str]:
        """Who strikes, and at which point."""
        own = OWN.get((self.victims[0], self.phase))
        return (self.victims[0], own) if own else WITNESSED[self.phase]


VICTIMS: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = [
    (("coordinator",), 2, ()),
    (("publisher",), 2, ("publisher: ",)),
    (("receiver.0",), 2, ("receiver.0: ",)),
    (("receiver.0", "receiver.1"), 4, ("receiver.0: ", "receiver.1: ")),
    (("engine.0",), 2, ("receiver.0: swap not done in time",)),
    (("learner",), 2, ()),
]

MATRIX = [
    Case(victims, phase, kind, num_replicas, blamed)
    for victims, num_replicas, blamed in VICTIMS
    for phase in WITNESSED
    for kind in ("kill", "stop")
]

LEARNER_POINTS = (
    "learner.asking@2",
    "learner.tensor@2.0",
    "learner.tensor@2.2",
    "learner.tensor@2.4",
    "handoff.copied@2",
)
"""Where a learner can be struck while it hands over version 2."""
