"""Programs of fsdp2 ranks: train in several ways, resume, reshard, train an empty share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from learner.backend import Placement
from learner.fsdp2.groups import join_group
from tests.learner.parts.training import open_fsdp2, train

WAYS = {
    "dp": {},
    "small_microbatches": {"max_tokens_per_microbatch": 64},
    "recomputed_and_offloaded": {"recompute": "full", "offload": True},
    "bfloat16": {"dtype": "bfloat16"},
}
SHORT_WAYS = ("dp", "small_microbatches", "recomputed_and_offloaded")


def run_fsdp2(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Do all of it in one group, training in the `ways` of the job; return how the resume went."""
    model = Path(job["model"])
    group = join_group(placement, gpus=0, seed=0)
    for name in job["ways"]:
        backend = open_fsdp2(model, placement, **WAYS[name])
        metrics = train(backend, range(3))
        (out / f"{name}.{placement.rank}.json").write_text(json.dumps(metrics))
        backend.save_hf(out / name)
        backend.close()
    result = resume(placement, model, out)
    group.stop()
    return result


def resume(placement: Placement, model: Path, out: Path) -> dict[str, Any]:
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
    backend.close()
    return result
