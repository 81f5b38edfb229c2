"""Programs of ranks that take over another layout's state: load it, save it, go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner.backend import Placement
from tests.learner.parts.training import open_backend, train

FIRST, SECOND = range(2), range(2, 4)


def run_resharded(placement: Placement, job: dict[str, Any], out: Path) -> list[dict[str, float]]:
    """Load the `state` of the job, save it at this layout, and train on; return the metrics."""
    backend = open_backend(Path(job["model"]), placement, seed=job["seed"], **job["changes"])
    backend.load_state(Path(job["state"]))
    assert backend.num_updates == 2 * len(FIRST)
    backend.save_state(out / job["name"] / "state")
    metrics = train(backend, SECOND)
    backend.save_hf(out / job["name"] / "weights")
    backend.close()
    return metrics
