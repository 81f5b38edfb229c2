"""What a run will take, and whether it can: checked and counted before anything starts."""

from asyncrl.control.plan.estimate import (
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
