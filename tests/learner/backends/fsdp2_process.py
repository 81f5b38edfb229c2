"""One fsdp2 rank in its own process: trains in several ways and writes what came out.

python -m tests.learner.backends.fsdp2_process RANK WORLD_SIZE PORT MODEL OUT [WAY ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from learner.backend import Placement
from learner.fsdp2.backend import Fsdp2Backend
from learner.fsdp2.groups import join_group
from tests.learner.parts.training import open_backend, train

WAYS = {
    "dp": {},
    "small_microbatches": {"max_tokens_per_microbatch": 64},
    "recomputed_and_offloaded": {"recompute": "full", "offload": True},
    "bfloat16": {"dtype": "bfloat16"},
}
SHORT_WAYS = ("dp", "small_microbatches", "recomputed_and_offloaded")


def open_fsdp2(folder: Path, placement: Placement | None = None, make=Fsdp2Backend, **changes):
    """Open a backend with the settings of `tests.learner.parts.training.open_backend`."""
    return open_backend(folder, placement, make=make, backend="fsdp2", **changes)


def main(rank: int, world_size: int, port: int, model: Path, out: Path, ways: list[str]) -> None:
    """Train in every way, then resume, reshard, and train an empty share; all in one group."""
    placement = Placement(rank, world_size, f"127.0.0.1:{port}", timeout_s=60.0)
    group = join_group(placement, seed=0)
    for name in ways:
        backend = open_fsdp2(model, placement, **WAYS[name])
        metrics = train(backend, range(3))
        (out / f"{name}.{rank}.json").write_text(json.dumps(metrics))
        backend.save_hf(out / name)
        backend.close()
    resume(placement, model, out)
    group.stop()


def resume(placement: Placement, model: Path, out: Path) -> None:
    """Resume at the same layout, then from one process's state, if the test has put one there."""
    backend = open_fsdp2(model, placement)
    train(backend, range(1))
    backend.save_state(out / "state")
    straight = train(backend, range(1, 2))
    straight_on = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    backend.load_state(out / "state")
    again = train(backend, range(1, 2))
    is_equal = all(bool((tensor == straight_on[name]).all()) for name, tensor in backend.named_tensors())
    # Three groups in two minibatches over two ranks: one share of the first minibatch is empty.
    few = train(backend, range(2, 3), num_groups=3)
    weight = 1.0 + 2 * placement.rank
    reduced = backend.reduce({"a": 1.0 + placement.rank, "a_max": float(placement.rank)}, weight)
    backend.load_state(out / "state_alone")
    result = {
        "is_equal": is_equal and straight == again,
        "straight": straight,
        "few": few,
        "reduced": reduced,
        "resharded": train(backend, range(1, 2)),
    }
    (out / f"resume.{placement.rank}.json").write_text(json.dumps(result))
    backend.close()


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
        Path(sys.argv[5]),
        sys.argv[6:] or list(WAYS),
    )
