"""States of a replica, and the causes for which its engine has no request (pure)."""

from __future__ import annotations

from enum import StrEnum

START = "start"


class State(StrEnum):
    """State of a replica."""

    STARTING = "STARTING"
    SYNCING = "SYNCING"
    READY = "READY"
    PINNED = "PINNED"
    DRAINING = "DRAINING"
    RETIRED = "RETIRED"


_CAUSES = {
    State.STARTING: START,
    State.SYNCING: "weights",
    State.PINNED: "evaluation",
    State.DRAINING: "drain",
    State.RETIRED: "drain",
}


def idle_cause(state: State, *, has_groups: bool, is_fenced: bool, is_standby: bool) -> str:
    """Return what a replica waits for: while READY its groups' tools, environments, rewards or pushes
    (`group`), the permission to lease (`standby`, `fenced`), or a lease.

    >>> idle_cause(State.READY, has_groups=False, is_fenced=False, is_standby=False)
    'lease'
    """
    if state in _CAUSES:
        return _CAUSES[state]
    if has_groups:
        return "group"
    if is_standby:
        return "standby"
    return "fenced" if is_fenced else "lease"
