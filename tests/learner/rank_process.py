"""One learner rank in its own process: trains under several layouts and writes what came out.

python -m tests.learner.rank_process RANK WORLD_SIZE FIRST_PORT MODEL OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from learner.backend import Placement
from tests.learner.training import open_backend, train

LAYOUTS = {
    "tp": {"tp": 2},
    "tp_sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "dp": {"dp": 2},
    "dp_small_microbatches": {"dp": 2, "max_tokens_per_microbatch": 64},
}


def main(rank: int, world_size: int, ports: list[int], model: Path, out: Path) -> None:
    """Run every layout, then a resume and an empty share at DP."""
    for port, (name, changes) in zip(ports, LAYOUTS.items(), strict=False):
        backend = open_backend(
            model, Placement(rank, world_size, f"127.0.0.1:{port}", timeout_s=60.0), **changes
        )
        metrics = train(backend, range(3))
        (out / f"{name}.{rank}.json").write_text(json.dumps(metrics))
        backend.save_hf(out / name)
        backend.close()
    resume(Placement(rank, world_size, f"127.0.0.1:{ports[-1]}", timeout_s=60.0), model, out)


def resume(placement: Placement, model: Path, out: Path) -> None:
    backend = open_backend(model, placement, dp=2)
    train(backend, range(1))
    backend.save_state(out / "state")
    straight = train(backend, range(1, 2))
    straight_on = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    backend.load_state(out / "state")
    again = train(backend, range(1, 2))
    is_equal = all(bool((tensor == straight_on[name]).all()) for name, tensor in backend.named_tensors())
    # Three groups in two minibatches over two ranks: one share of the first minibatch is empty.
    few = train(backend, range(2, 3), num_groups=3)
    reduced = backend.reduce(
        {"a": 1.0 + placement.rank, "a_max": float(placement.rank)}, weight=1.0 + 2 * placement.rank
    )
    result = {"is_equal": is_equal and straight == again, "few": few, "reduced": reduced}
    (out / f"resume.{placement.rank}.json").write_text(json.dumps(result))
    backend.close()


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        [int(port) for port in sys.argv[3].split(",")],
        Path(sys.argv[4]),
        Path(sys.argv[5]),
    )
