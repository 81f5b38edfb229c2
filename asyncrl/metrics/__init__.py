"""Every metric of a run: name, unit, meaning, how it is reduced, who makes it.

`python -m asyncrl.metrics` prints `docs/metrics.md`.
"""

from asyncrl.metrics.metric import Metric
from asyncrl.metrics.registry import METRICS, extreme_of, find, unknown_names, variables_of

__all__ = ["METRICS", "Metric", "extreme_of", "find", "unknown_names", "variables_of"]
