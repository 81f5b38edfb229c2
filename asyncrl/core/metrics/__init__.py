"""Every metric of a run: name, unit, meaning, how it is reduced, who makes it.

`python -m asyncrl.core.metrics` prints `docs/metrics.md`.
"""

from asyncrl.core.metrics.metric import Metric
from asyncrl.core.metrics.registry import METRICS, extreme_of, find, unknown_names, variables_of

__all__ = ["METRICS", "Metric", "extreme_of", "find", "unknown_names", "variables_of"]
