"""Plan of a run: its needs, checked and counted before the start."""

from asyncrl.planner.plan.footprint.estimate import Plan, check, check_beside, check_elsewhere, choose_backend

__all__ = [
    "Plan",
    "check",
    "check_beside",
    "check_elsewhere",
    "choose_backend",
]
