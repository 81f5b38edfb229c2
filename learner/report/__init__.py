"""Report of a learner step: metrics under verl's names, times, the profiler's window."""

from learner.report.consistency import check_update, describe_engine_gap
from learner.report.description import (
    describe_baselines,
    describe_batch,
    describe_probabilities,
    describe_rewards,
    describe_targets,
)
from learner.report.efficiency import Efficiency, make_efficiency
from learner.report.profiler import ProfilerWindow
from learner.report.reduction import merge_updates, reduce_over_ranks
from learner.report.waits import Stopwatch, Waits, describe_time, measure_memory

__all__ = [
    "Efficiency",
    "ProfilerWindow",
    "Stopwatch",
    "Waits",
    "check_update",
    "describe_baselines",
    "describe_batch",
    "describe_engine_gap",
    "describe_probabilities",
    "describe_rewards",
    "describe_targets",
    "describe_time",
    "make_efficiency",
    "measure_memory",
    "merge_updates",
    "reduce_over_ranks",
]
