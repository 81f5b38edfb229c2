"""A learner rank's whole work, on the CPU or on the pretended GPU: log-probs, updates, resume, export.

python -m tests.pretended_gpu.learner_steps MODEL OUTPUT DTYPE[:KERNELS]...
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.core.config.sections.learner import DETERMINISTIC
from weight_sync.memory.manifest import TensorSpec, align, plan
from weight_sync.memory.parts import Part, PartWriter
from weight_sync.memory.writer import WriteTimes

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 64


def run(model: Path, dtype: str, folder: Path, gpus: int, kernels: str = "auto") -> dict[str, Any]:
    """Return what was computed, by name."""
    from learner.batching.batch import build_batch
    from tests.learner.parts.samples import make_groups
    from tests.learner.parts.training import open_backend, open_objective, prepare_step, train
    from tests.pretended_gpu.device.tensors import WAITS

    options = {"dtype": dtype, "gpus": gpus, "kernels": kernels, "max_tokens_per_microbatch": MAX_TOKENS}
    backend = open_backend(model, **options)
    objective = open_objective()
    found: dict[str, Any] = {"logprobs": backend.logprobs(build_batch(make_groups(), 0, {1: 0}))}
    found["metrics"] = train(backend, range(1))
    WAITS.clear()
    minibatch, _ = prepare_step(backend, objective, 2)
    before = dict(WAITS)
    WAITS.clear()
    found["microbatches"] = len(minibatch.balance_microbatches(MAX_TOKENS))
    metrics = backend.accumulate([minibatch], objective.loss, is_last=True)
    found["waits of gradients"] = dict(WAITS)
    found["added while multiplied"] = [
        name for name, one in backend._chunks[0].named_parameters() if one.grad_added_to_main_grad
    ]
    backend.apply([minibatch], metrics, 1.0)
    WAITS.update(before)
    found["waits of a step"] = dict(WAITS)
    backend.save_state(folder / "state")
    train(backend, range(3, 4))
    backend.load_state(folder / "state")
    found["rolled back"] = train(backend, range(3, 4))
    backend.close()
    backend = open_backend(model, **options)
    backend.load_state(folder / "state")
    found["resumed"] = train(backend, range(3, 4))
    found["exported"] = {name: tensor.detach().cpu().clone() for name, tensor in backend.named_tensors()}
    found["published"] = publish(backend.named_parts())
    found["device"] = str(next(backend._chunks[0].parameters()).device)
    found["is deterministic"] = torch.are_deterministic_algorithms_enabled()
    backend.close()
    return found


def publish(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the bytes of a version that these parts are, and its digests."""
    specs = [TensorSpec(part.name, "bfloat16", part.shape) for part in parts if part.row == part.column == 0]
    layout = plan(specs, 1 << 14)
    bytes_B = np.zeros(layout.total_bytes, dtype=np.uint8)
    writer = PartWriter(layout, parts)
    digests = writer.write(bytes_B, WriteTimes())
    return {"bytes": torch.from_numpy(bytes_B), "digests": digests}


def run_on_gpu(folder: Path, model: Path, asked: Iterable[str]) -> None:
    """Have a process with a pretended GPU leave in `folder` what it computes with `model`."""
    command = [sys.executable, "-m", "tests.pretended_gpu.learner_steps", str(model), str(folder), *asked]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200.0, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]


def assert_is_published(found: dict[str, Any]) -> None:
    """The bytes of the version are those of the tensors that are exported, in their order."""
    published, at = found["published"]["bytes"], 0
    for name, tensor in found["exported"].items():
        wanted = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).flatten()
        assert torch.equal(published[at : at + len(wanted)], wanted), name
        at += align(len(wanted))
    assert at == len(published)


def main() -> None:
    model, output, *asked = sys.argv[1:]
    from learner.numerics.device import claim_device
    from tests.pretended_gpu.device import cuda
    from tests.pretended_gpu.device import transformer_engine_stand_in as stand_in
    from tests.pretended_gpu.device.tensors import PretendedGpu

    cuda.install()
    if any(":te" in one for one in asked):
        stand_in.install()
    os.environ.update(DETERMINISTIC)
    for one in asked:
        dtype, _, kernels = one.partition(":")
        claim_device(1, 0, is_deterministic=dtype == "bfloat16")
        for record in (cuda.VARLEN_CALLS, stand_in.MADE, stand_in.CALLS):
            record.clear()
        with PretendedGpu():
            found = run(Path(model), dtype, Path(output) / one, 1, kernels or "auto")
        found["varlen calls"] = cuda.VARLEN_CALLS.total()
        found["te"] = {"made": stand_in.MADE, "calls": stand_in.CALLS}
        torch.save(found, Path(output) / f"{one}.pt")


if __name__ == "__main__":
    main()
