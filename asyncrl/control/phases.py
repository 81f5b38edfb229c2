"""Phase of a run before its first step and after its last, in words (pure).

A phase is for people who wait; nothing decides by it. It is empty while the run trains.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.control.diagnosis.waits import is_scoring, tell_dropped
from asyncrl.core.states import RunState, ServiceState
from asyncrl.core.status.service import BUFFER, LEARNER, ServiceStatus
from asyncrl.core.status.statuses import Statuses

FIRST_START = "starting the supervisor"
"""The last phase that the head tells of before the supervisor tells of its own."""
ANSWERS_WAIT = "answers wait for their rewards, tools or environments"
BEGINNING = (ServiceState.WAITING, ServiceState.STARTING, ServiceState.SILENT)
"""A process that loads its libraries may not answer for seconds."""


def phase_of(state: RunState, statuses: Statuses, *, is_saving: bool = False) -> str:
    """Return what a run in `state` is busy with, from its services' statuses.

    Args:
        is_saving: While it stops: its learner has been asked for a last checkpoint, alone, and has not ended.
    """
    if state in (RunState.STARTING, RunState.RUNNING):
        return _first_of(statuses)
    if state != RunState.STOPPING:
        return ""
    return "the learner ends its step and writes a checkpoint" if is_saving else "ending the services"


def _first_of(statuses: Statuses) -> str:
    if not statuses:
        return "starting the services"
    ranks, engines = statuses.of_kind("learner"), statuses.replicas.values()
    is_learner_up = LEARNER in ranks and ranks[LEARNER].state not in BEGINNING
    if is_learner_up and statuses.learner is not None and statuses.learner.has_trained:
        return _after_training(ranks.values(), statuses)
    loading = [engine for engine in engines if engine.state in BEGINNING]
    parts = [
        "the buffer reads its journal" if statuses.state(BUFFER) in BEGINNING else "",
        "" if is_learner_up or not ranks else "the learner loads its weights",
        f"{len(loading)} of {len(engines)} engines load and compile" if loading else "",
    ]
    if busy := ", ".join(filter(None, parts)):
        return busy
    if engines and not any(engine.state == ServiceState.READY for engine in engines):
        return "the first weights go to the replicas"
    return f"{ANSWERS_WAIT if is_scoring(statuses) else 'the first batch is sampled'}{tell_dropped(statuses)}"


def _after_training(ranks: Iterable[ServiceStatus], statuses: Statuses) -> str:
    is_done = all(rank.state == ServiceState.ENDED for rank in ranks)
    is_pending = statuses.buffer is not None and statuses.buffer.evaluations_pending > 0
    return "the last evaluation" if is_done and is_pending else ""
