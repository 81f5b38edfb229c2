"""Peer side of the protocol: rules by which a peer accepts orders (pure).

Owns the newest coordinator's token that the peer has seen, the stages of its rounds, and its replica's pin.
Holds no bytes: the receiver and the publisher do what is decided here.
Invariants: orders of an older coordinator are not obeyed; a round begins once and ends once, however
often and however late its orders come; no pin outlives the process that asked for it.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

MAX_REMEMBERED = 256


class EpochCheck(StrEnum):
    """Verdict on a coordinator's fencing token, against the highest one seen."""

    SAME = "SAME"
    NEWER = "NEWER"
    OLDER = "OLDER"


class CoordinatorEpoch:
    """The coordinator that a peer obeys: that with the highest fencing token that it has seen."""

    def __init__(self) -> None:
        self.token = 0

    def hear(self, token: int) -> EpochCheck:
        """Judge the sender's token; a newer coordinator is obeyed from now on."""
        if token < self.token:
            return EpochCheck.OLDER
        is_newer = token > self.token > 0
        self.token = max(self.token, token)
        return EpochCheck.NEWER if is_newer else EpochCheck.SAME


class Pin:
    """Whether a replica is to stay at its version, which one process of it has asked for.

    Each method says whether that changed. A pin ends with its process, which the next one's first poll shows,
    also where the receiver is new and never heard what the dead one served.

    >>> pin = Pin()
    >>> pin.set("a", True), pin.meet("a"), pin.is_held, pin.meet("b"), pin.is_held
    (True, False, True, True, False)
    """

    def __init__(self) -> None:
        self.is_held = False
        self._holder = ""

    def set(self, incarnation: str, is_held: bool) -> bool:
        """Process `incarnation` of the replica pins or unpins."""
        self._holder = incarnation
        return self._change(is_held)

    def meet(self, incarnation: str) -> bool:
        """Process `incarnation` of the replica polls: a pin of another one is over."""
        return incarnation != self._holder and self._change(False)

    def end(self) -> bool:
        """The engine was started anew."""
        return self._change(False)

    def _change(self, is_held: bool) -> bool:
        has_changed, self.is_held = is_held != self.is_held, is_held
        return has_changed


class Stage(StrEnum):
    """Progress of a round with one peer. OFFERED has room for it, MOVING moves bytes."""

    OFFERED = "OFFERED"
    MOVING = "MOVING"
    ENDED = "ENDED"
    ABORTED = "ABORTED"


_OPEN = (Stage.OFFERED, Stage.MOVING)


class RoundTracker:
    """The rounds of one peer. Each method says whether, or from where, the round has moved on."""

    def __init__(self) -> None:
        self._stages: dict[int, Stage] = {}
        self._over: deque[int] = deque()

    def stage_of(self, round_id: int) -> Stage | None:
        """Return where the round stands, None if it is unknown."""
        return self._stages.get(round_id)

    def offer(self, round_id: int) -> bool:
        """Take up an offer; False if it was taken up, or is over, already."""
        if round_id in self._stages:
            return False
        self._stages[round_id] = Stage.OFFERED
        return True

    def begin(self, round_id: int, needs_offer: bool = True) -> bool:
        """Begin the transfer; False if that is done already, or if the round is over or was never offered."""
        stage = self._stages.get(round_id, None if needs_offer else Stage.OFFERED)
        if stage is not Stage.OFFERED:
            return False
        self._stages[round_id] = Stage.MOVING
        return True

    def abort(self, round_id: int) -> Stage | None:
        """Give the round up; return where it stood, None if there is nothing to give up.

        An unknown round is remembered all the same: its offer, should it come late, is not taken up.
        """
        stage = self._stages.get(round_id)
        if stage in (Stage.ENDED, Stage.ABORTED):
            return None
        self._close(round_id, Stage.ABORTED)
        return stage

    def end(self, round_id: int) -> bool:
        """The transfer has ended by itself; False if it was aborted before."""
        if self._stages.get(round_id) is not Stage.MOVING:
            return False
        self._close(round_id, Stage.ENDED)
        return True

    @property
    def open_rounds(self) -> list[int]:
        """The rounds that are not over."""
        return [round_id for round_id, stage in self._stages.items() if stage in _OPEN]

    def _close(self, round_id: int, stage: Stage) -> None:
        self._stages[round_id] = stage
        self._over.append(round_id)
        if len(self._over) > MAX_REMEMBERED:
            self._stages.pop(self._over.popleft(), None)
