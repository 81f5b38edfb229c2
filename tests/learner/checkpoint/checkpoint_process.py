"""One learner rank in its own process: loads state that another layout wrote, saves it, goes on.

python -m tests.learner.checkpoint.checkpoint_process RANK WORLD_SIZE PORTS LAYOUTS MODEL STATE OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from learner.backend import Placement
from tests.learner.parts.training import open_backend, train

FIRST, SECOND = range(2), range(2, 4)


def main(placements: list[Placement], changes: dict, model: Path, state: Path, out: Path) -> None:
    """Load `state`, save it at this layout, train on; then resume at the same layout, and train again."""
    results = []
    for seed, folder, placement in zip((3, 9), (state, out / "state"), placements, strict=True):
        backend = open_backend(model, placement, seed=seed, **changes)
        backend.load_state(folder)
        assert backend.num_updates == 2 * len(FIRST)
        if folder == state:
            backend.save_state(out / "state")
        metrics = train(backend, SECOND)
        backend.save_hf(out / f"weights-{seed}")
        backend.close()
        results.append(metrics)
    (out / f"metrics.{placements[0].rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    rank, world_size, ports, layouts, model, state, out = sys.argv[1:]
    places = [
        Placement(int(rank), int(world_size), f"127.0.0.1:{port}", timeout_s=120.0)
        for port in ports.split(",")
    ]
    for index, (name, changes) in enumerate(json.loads(layouts).items()):
        (Path(out) / name).mkdir(exist_ok=True)
        main(places[2 * index : 2 * index + 2], changes, Path(model), Path(state), Path(out) / name)
