"""States of a run and its services, and reasons of rewards: one spelling of each, wherever shown (pure)."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """State of a run as a whole. SILENT: its supervisor does not answer. ENDED: it left no word of how."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SILENT = "silent"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    ENDED = "ended"


class ServiceState(StrEnum):
    """State of one service.

    WAITING: for a node with room for it. SYNCING: without usable weights. READY: it works. SUSPECT: it
    missed a deadline. PINNED: stays at one version for an evaluation. FENCED: replaced by a service with a
    newer fencing token. FINISHING: writes its last checkpoint. ENDED: by itself. FAILED: with an error that
    it names. DEAD: it has no process. SILENT: its process does not answer.
    """

    WAITING = "WAITING"
    STARTING = "STARTING"
    SYNCING = "SYNCING"
    READY = "READY"
    SUSPECT = "SUSPECT"
    PINNED = "PINNED"
    FENCED = "FENCED"
    DRAINING = "DRAINING"
    RETIRED = "RETIRED"
    FINISHING = "FINISHING"
    ENDED = "ENDED"
    FAILED = "FAILED"
    DEAD = "DEAD"
    SILENT = "SILENT"


class Reason(StrEnum):
    """Reason of a reward of 0 or less, or of none.

    The model's fault: WRONG; NO_ANSWER, the response holds none; TRUNCATED, a limit cut it off. A failure:
    INFRASTRUCTURE, a server, sandbox or process could not be used; TIMEOUT; ENVIRONMENT or REWARD, that code
    raised or returned nonsense; BUDGET, a judge's calls are used up; NOT_RETRYABLE, a call may have been
    made, and must not be made twice: there is no other attempt.
    """

    WRONG = "wrong_answer"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"
    INFRASTRUCTURE = "infrastructure"
    TIMEOUT = "timeout"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    BUDGET = "budget"
    NOT_RETRYABLE = "not_retryable"


FAILURES = tuple(Reason)[3:]
"""Reasons with which an answer has no reward: its group fails, whatever number was given."""
RUN_ENDS = (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)
"""Of a run: nothing of it runs any more."""
SERVICE_FAULTS = (ServiceState.FAILED, ServiceState.DEAD, ServiceState.RETIRED)
"""Of a service: it has no process now. A replica whose restarts are spent is RETIRED for minutes."""
SERVICE_ENDS = (ServiceState.ENDED, *SERVICE_FAULTS)
"""Of a service: it does nothing any more."""
