"""Phase of a run before its first step and after its last, in words (pure).

A phase is for people who wait; nothing decides by it. It is empty while the run trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.control.diagnosis.bottleneck import is_scoring
from asyncrl.states import RunState, ServiceState

ANSWERS_WAIT = "answers wait for their rewards, tools or environments"
Statuses = Mapping[str, Mapping[str, Any]]

BEGINNING = (ServiceState.WAITING, ServiceState.STARTING, ServiceState.SILENT)
"""A process that loads its libraries may not answer for seconds."""


def phase_of(state: str, statuses: Statuses, *, is_saving: bool = False) -> str:
    """Return what a run in `state` is busy with, from its services' statuses.

    Args:
        is_saving: While it stops: its learner has been asked for a last checkpoint, alone, and has not ended.

    >>> phase_of("starting", {"buffer.0": {"state": "STARTING"}})
    'the buffer reads its journal'
    """
    if state in (RunState.STARTING, RunState.RUNNING):
        return _first_of(statuses)
    if state != RunState.STOPPING:
        return ""
    return "the learner ends its step and writes a checkpoint" if is_saving else "ending the services"


def _first_of(statuses: Statuses) -> str:
    if not statuses:
        return "starting the services"
    learner, engines = _of_kind("learner", statuses), _of_kind("rollout", statuses)
    is_learner_up = bool(learner) and learner[0].get("state") not in BEGINNING
    if is_learner_up and learner[0].get("step", 0) > learner[0].get("resumed_step", 0):
        return _after_training(learner, statuses)
    loading = [engine for engine in engines if engine.get("state") in BEGINNING]
    parts = [
        "the buffer reads its journal" if _is_beginning("buffer.0", statuses) else "",
        "" if is_learner_up or not learner else "the learner loads its weights",
        f"{len(loading)} of {len(engines)} engines load and compile" if loading else "",
    ]
    if busy := ", ".join(filter(None, parts)):
        return busy
    if engines and not any(engine.get("state") == ServiceState.READY for engine in engines):
        return "the first weights go to the replicas"
    return ANSWERS_WAIT if is_scoring(statuses) else "the first batch is sampled"


def _after_training(learner: list[Mapping[str, Any]], statuses: Statuses) -> str:
    is_done = all(rank.get("state") == ServiceState.ENDED for rank in learner)
    is_pending = statuses.get("buffer.0", {}).get("evaluations_pending")
    return "the last evaluation" if is_done and is_pending else ""


def _of_kind(kind: str, statuses: Statuses) -> list[Mapping[str, Any]]:
    return [status for name, status in statuses.items() if name.partition(".")[0] == kind]


def _is_beginning(name: str, statuses: Statuses) -> bool:
    return statuses.get(name, {}).get("state") in BEGINNING
