"""The learner of each preset for GPUs, shrunk to a rank and a model of two layers, on the pretended GPU.

python -m tests.pretended_gpu.learner.preset_learners MODEL OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from asyncrl.core.config.load import load
from asyncrl.core.config.tree import LearnerSection
from configs import overlays, shipped

PRESETS = ("one_gpu", "two_gpus", "eight_gpus", "two_nodes")
RANKS = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "cpus": 1.0}
SHRUNK = RANKS | {"groups_per_step": 6, "minibatches": 2, "max_tokens_per_microbatch": 64, "steps": 1}
"""What sizes of machines and rows set; `lr` is raised so that two updates show."""


def learners() -> dict[str, tuple[LearnerSection, str]]:
    """Return the shrunk section and the dtype of each preset, with its data and with DAPO's.

    Those that are equal once they are shrunk are one, under all their names.
    """
    files = {name: [shipped()[name]] for name in PRESETS}
    files |= {f"{name} dapo_17k": [shipped()[name], overlays()["dapo_17k"]] for name in PRESETS}
    found: dict[str, tuple[LearnerSection, str]] = {}
    for name, paths in files.items():
        made = shrink(paths)
        same = next((other for other, one in found.items() if one == made), "")
        found.pop(same, None)
        found[f"{same}, {name}" if same else name] = made
    return found


def shrink(files: list[Path]) -> tuple[LearnerSection, str]:
    """Return the learner's section at a size that a test can run, all else as it is."""
    config = load(files, []).config
    values = config.learner.model_dump() | SHRUNK | {"lr": 1e-3, "warmup_steps": 0}
    return LearnerSection.model_validate(values), config.model.dtype


def run(model: Path, section: LearnerSection, dtype: str) -> dict[str, Any]:
    """Return log-probs, the metrics of a step's updates, and the weights after them."""
    from learner.backend import Placement
    from learner.batching.batch import build_batch
    from learner.megatron.backend import MegatronBackend
    from tests.learner.parts.samples import make_groups
    from tests.learner.parts.training import train

    backend = MegatronBackend(model, section, Placement(), dtype=dtype)
    found: dict[str, Any] = {"logprobs": backend.logprobs(build_batch(make_groups(), 0, {1: 0}))}
    found["metrics"] = train(backend, range(1))
    found["exported"] = {name: tensor.detach().cpu().clone() for name, tensor in backend.named_tensors()}
    found["device"] = str(next(backend._chunks[0].parameters()).device)
    backend.close()
    return found


def main() -> None:
    model, output = map(Path, sys.argv[1:])
    from tests.pretended_gpu.device import cuda
    from tests.pretended_gpu.device.tensors import PretendedGpu

    cuda.install()
    for index, (section, dtype) in enumerate(learners().values()):
        cuda.MEMORY_SHARES.clear()
        cuda.VARLEN_CALLS.clear()
        with PretendedGpu():
            found = run(model, section, dtype)
        found |= {"shares": list(cuda.MEMORY_SHARES), "varlen calls": cuda.VARLEN_CALLS.total()}
        torch.save(found, output / f"{index}.pt")


if __name__ == "__main__":
    main()
