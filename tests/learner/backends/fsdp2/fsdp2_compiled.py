"""Two updates with `torch.compile` and two without, in a process that has not imported Megatron.

python -m tests.learner.backends.fsdp2.fsdp2_compiled MODEL OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from asyncrl.core.config.tree import LearnerSection
from learner.backend import Placement
from learner.batching.batch import PackedBatch, build_batch
from learner.fsdp2.backend import Fsdp2Backend
from tests.learner.parts.samples import make_groups


def likelihood(logprobs_N: torch.Tensor, entropy_N: torch.Tensor, microbatch: PackedBatch):
    loss = -(logprobs_N * microbatch.loss_mask_N).sum() / microbatch.totals.num_tokens
    return loss, {"actor/loss": loss}


def main(model: Path, out: Path) -> None:
    """Write the metrics of each, and how many graphs were compiled."""
    results = {}
    for name, is_compiled in (("plain", False), ("compiled", True)):
        section = LearnerSection(backend="fsdp2", lr=1e-3, compile=is_compiled)
        backend = Fsdp2Backend(model, section, Placement(), dtype="float32")
        batches = [build_batch(make_groups(seed=seed), 0, {1: 0}) for seed in range(2)]
        results[name] = [backend.update(batch, likelihood) for batch in batches]
        backend.close()
    results["num_graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    (out / "compiled.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
