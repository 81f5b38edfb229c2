"""End of a run: every evaluation has ended, and nobody is held back from the newest version.

Owns no state. Looks at processes directly, believes the journal about evaluations, and says what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.planner.faults.checks.evaluations import EvaluationBook
from asyncrl.planner.faults.kernel.process import Process
from asyncrl.planner.faults.services.learner import LearnerProcess
from asyncrl.planner.faults.services.replica import ReplicaProcess
from asyncrl.planner.faults.sync.coordinator import CoordinatorProcess
from asyncrl.planner.faults.sync.publisher import PublisherProcess
from asyncrl.planner.faults.sync.receiver import ReceiverProcess
from weight_sync.protocol.members import MemberState


def find_unsettled(bound: Mapping[str, Process], evaluations: EvaluationBook) -> str:
    """Return what keeps the run from being over, "" if nothing does.

    Args:
        bound: The process under each service's name.
    """
    learner = bound.get("learner.0")
    if not isinstance(learner, LearnerProcess) or not learner.is_alive or learner.state != "ENDED":
        return "the learner has not ended"
    if evaluations.open or learner.last_evaluation not in {0, *evaluations.results}:
        waiting = sorted({learner.last_evaluation, *evaluations.open} - {0, *evaluations.results})
        return f"evaluations {waiting} have not ended; {_name_pinned(bound) or 'nobody is pinned'}"
    if pinned := _name_pinned(bound):
        return f"pinned are {pinned}, and no evaluation is left"
    return _name_behind(bound)


def _name_pinned(bound: Mapping[str, Process]) -> str:
    receivers = [
        name
        for name, one in bound.items()
        if isinstance(one, ReceiverProcess) and one.is_alive and one.is_pinned
    ]
    coordinator = bound.get("weight_sync.0")
    assert coordinator is None or isinstance(coordinator, CoordinatorProcess), "it has that name"
    coordination = coordinator.coordination if coordinator is not None else None
    members = [
        f"{name} at the coordinator"
        for name, member in (coordination.members.items() if coordination is not None else ())
        if name in bound and (member.is_pinned or member.state is MemberState.PINNED)
    ]
    return ", ".join(receivers + members)


def _name_behind(bound: Mapping[str, Process]) -> str:
    """Return which replica does not serve what the publisher has, or is not ready."""
    publisher = bound.get("publisher.0")
    if not isinstance(publisher, PublisherProcess) or not publisher.is_alive or publisher.state != "READY":
        return "the publisher is not up"
    for name, one in bound.items():
        if not isinstance(one, ReplicaProcess) or one.state in ("DRAINING", "ENDED"):
            continue
        if not one.is_alive or one.state != "READY":
            return f"{name} is {one.state if one.is_alive else 'dead'}"
        if one.serving < publisher.newest_number:
            return f"{name} serves version {one.serving}, the publisher has {publisher.newest_number}"
    return ""
