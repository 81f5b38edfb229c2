"""Plan of a run: its needs, checked and counted before the start."""

from asyncrl.control.plan.footprint.estimate import (
    Plan,
    check,
    check_beside,
    check_elsewhere,
    check_replicas,
    choose_backend,
)
from asyncrl.control.plan.machine import count_gpus

__all__ = [
    "Plan",
    "check",
    "check_beside",
    "check_elsewhere",
    "check_replicas",
    "choose_backend",
    "count_gpus",
]
