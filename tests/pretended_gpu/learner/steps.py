"""A learner rank's whole work, on the CPU or on the pretended GPU: log-probs, updates, resume, export.

python -m tests.pretended_gpu.learner.steps MODEL OUTPUT DTYPE[:WORD]...
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncrl.control.machine.ports import held_row
from asyncrl.core.config.sections.learner import DETERMINISTIC
from weight_sync.memory.manifest import TensorSpec, align, plan
from weight_sync.memory.parts import Part, PartWriter
from weight_sync.memory.writer import WriteTimes

if TYPE_CHECKING:
    from learner.backend import Placement
    from learner.batching.batch import PackedBatch

ROOT = Path(__file__).parents[3]
MAX_TOKENS = 64
GRAD_CLIP = 0.01
"""Every gradient is larger."""
TIMEOUT_S = 300.0
WORDS: dict[str, dict[str, Any]] = {
    "te": {"kernels": "te"},
    "tree": {},
    "replay": {},
    "fsdp2": {"backend": "fsdp2"},
    "offload": {"offload": True},
    "raised": {},
    "once": {},
    "overlap": {"overlap": True},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
}
"""Changes of a learner's section. `raised`: memory runs out in the middle of the run; `once`:
the run neither goes back nor resumes; `tree`: rows of its first update share prompts; `replay`: experts were
recorded of its rows.
"""


def run(model: Path, way: str, folder: Path, gpus: int, placement: Placement | None = None) -> dict[str, Any]:
    """Return what was computed, by name.

    Args:
        way: The dtype, and after it words of `WORDS`, divided by colons.
    """
    from tests.learner.parts.training import train

    backend = open_as(model, way, gpus, placement)
    found = take_step(backend, way)
    found["exported"] = export(backend)
    if "once" not in way:
        backend.save_state(folder / "state")
        train(backend, range(3, 4))
        backend.load_state(folder / "state")
        found["rolled back"] = train(backend, range(3, 4))
        backend.close()
        backend = open_as(model, way, gpus, placement)
        backend.load_state(folder / "state")
        found["resumed"] = train(backend, range(3, 4))
        found["exported"] = export(backend)
        found["published"] = publish(backend.named_parts())
    found["device"] = str(next(root(backend).parameters()).device)
    found["is deterministic"] = torch.are_deterministic_algorithms_enabled()
    backend.close()
    return found


def take_step(backend: Any, way: str) -> dict[str, Any]:
    """Train two steps; return the log-probs, the metrics, and the waits of the second."""
    from learner.batching.batch import build_batch
    from tests.learner.parts.samples import make_groups
    from tests.learner.parts.training import open_objective, prepare_step, record_experts, train
    from tests.pretended_gpu.device.tensors import WAITS

    objective = open_objective()
    found: dict[str, Any] = {"logprobs": backend.logprobs(build_batch(make_groups(), 0, {1: 0}))}
    found["metrics"] = []
    if "tree" in way:
        shared = build_batch(make_groups(max_tokens=8, prompt_tokens=(24, 30)), 0, {1: 0})
        found["shared logprobs"] = backend.logprobs(shared)
        found["metrics"].append(backend.update(shared, sum_logprobs))
    if "replay" in way:
        routed = record_experts(build_batch(make_groups(), 0, {1: 0}), 2, 2, 8)
        found["replayed logprobs"] = backend.logprobs(routed)
        found["metrics"].append(backend.update(routed, sum_logprobs))
    found["metrics"] += train(backend, range(1))
    if "raised" in way:
        before = [weakref.ref(tensor) for tensor in tensors_of_adamw(backend)]
        run_out_of_memory(backend)
        gc.collect()
        found["left"] = (len(before), sum(one() is not None for one in before))
    WAITS.clear()
    minibatch, _ = prepare_step(backend, objective, 2)
    waits = dict(WAITS)
    WAITS.clear()
    found["microbatches"] = len(minibatch.balance_microbatches(MAX_TOKENS))
    metrics = backend.accumulate([minibatch], objective.loss, is_last=True)
    found["waits of gradients"] = dict(WAITS)
    found["added while multiplied"] = [
        name
        for name, one in root(backend).named_parameters()
        if getattr(one, "grad_added_to_main_grad", False)
    ]
    found["metrics"].append(backend.apply([minibatch], metrics, 1.0))
    WAITS.update(waits)
    found["waits of a step"] = dict(WAITS)
    found["parameters"] = len(list(root(backend).parameters()))
    return found


def sum_logprobs(logprobs_N: torch.Tensor, _: torch.Tensor, part: PackedBatch) -> tuple[torch.Tensor, Any]:
    total = (logprobs_N * part.loss_mask_N).sum() / part.totals.num_tokens
    return total, {"actor/pg_loss": total.detach()}


def run_out_of_memory(backend: Any) -> None:
    """Have the guard make room, twice, for rows that are as long as a microbatch may be."""
    from learner.guard.guard import UnstableTraining
    from learner.guard.memory import GuardedModel

    guarded, error = GuardedModel(backend), torch.OutOfMemoryError("pretended")
    guarded._make_room([MAX_TOKENS], error, True)
    assert backend.max_tokens_per_microbatch == MAX_TOKENS
    with pytest.raises(UnstableTraining, match="as long as the longest row, do not fit"):
        guarded._make_room([MAX_TOKENS], error, True)


def tensors_of_adamw(backend: Any) -> list[torch.Tensor]:
    """Return what Megatron's AdamW keeps beside the weights: copies in float32 and moments."""
    optimizer = backend._updates.optimizers[0]
    copies = [main for group in optimizer.shard_fp32_from_float16_groups for main in group]
    states = optimizer.optimizer.state.values()
    return [*copies, *(state[moment] for state in states for moment in ("exp_avg", "exp_avg_sq"))]


def export(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in backend.named_tensors()}


def open_as(model: Path, way: str, gpus: int, placement: Placement | None = None) -> Any:
    """Return the backend that `way` names."""
    from learner.fsdp2.backend import Fsdp2Backend
    from learner.megatron.backend import MegatronBackend
    from tests.learner.parts.training import open_backend

    dtype, *words = way.split(":")
    changes: dict[str, Any] = {"dtype": dtype, "gpus": gpus, "max_tokens_per_microbatch": MAX_TOKENS}
    changes["grad_clip"] = GRAD_CLIP
    for word in words:
        changes |= WORDS[word]
    make = Fsdp2Backend if changes.get("backend") == "fsdp2" else MegatronBackend
    return open_backend(model, placement, make=make, **changes)


def root(backend: Any) -> torch.nn.Module:
    """Return the module that a backend trains."""
    module: torch.nn.Module = backend._chunks[0] if hasattr(backend, "_chunks") else backend._engine._module
    return module


def publish(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the bytes of a version that these parts are, and its digests."""
    specs = [TensorSpec(part.name, "bfloat16", part.shape) for part in parts if part.row == part.column == 0]
    layout = plan(specs, 1 << 14)
    bytes_B = np.zeros(layout.total_bytes, dtype=np.uint8)
    writer = PartWriter(layout, parts)
    digests = writer.write(bytes_B, WriteTimes())
    return {"bytes": torch.from_numpy(bytes_B), "digests": digests}


def run_on_gpu(folder: Path, model: Path, asked: Iterable[str], num_ranks: int = 1) -> None:
    """Have processes with a pretended GPU each leave in `folder` what they compute with `model`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    asked = list(asked)
    with held_row("127.0.0.1", len(asked)) as port, contextlib.ExitStack() as ranks:
        command = [sys.executable, "-m", "tests.pretended_gpu.learner.steps", str(model), str(folder)]
        processes = [
            ranks.enter_context(
                subprocess.Popen(
                    [*command, f"{rank}/{num_ranks}/{port}", *asked],
                    cwd=ROOT,
                    env=environment,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            try:
                _, errors = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
            assert process.returncode == 0, errors[-6000:]


def result(folder: Path, way: str, rank: int = 0) -> dict[str, Any]:
    """Return what a rank left in `folder`."""
    found: dict[str, Any] = torch.load(folder / f"{way}.{rank}.pt")
    return found


def assert_updates_alike(
    ours: Sequence[dict[str, float]], wanted: Sequence[dict[str, float]], tolerance: float
) -> None:
    assert len(ours) == len(wanted) > 0
    for one, other in zip(ours, wanted, strict=True):
        assert one == pytest.approx(other, abs=tolerance, rel=tolerance)


def assert_weights_alike(
    ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert ours.keys() == wanted.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, wanted[name], atol=0.05 * tolerance, rtol=0.01)


def assert_is_published(found: dict[str, Any]) -> None:
    """The bytes of the version are those of the tensors that are exported, in their order."""
    published, at = found["published"]["bytes"], 0
    for name, tensor in found["exported"].items():
        wanted = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).flatten()
        assert torch.equal(published[at : at + len(wanted)], wanted), name
        at += align(len(wanted))
    assert at == len(published)


def main() -> None:
    model, output, place, *asked = sys.argv[1:]
    from learner.backend import Placement
    from learner.numerics.device import claim_device
    from tests.pretended_gpu.device import cuda
    from tests.pretended_gpu.device import transformer_engine_stand_in as stand_in
    from tests.pretended_gpu.device.tensors import PretendedGpu

    cuda.install()
    if any(":te" in one for one in asked):
        stand_in.install()
    os.environ.update(DETERMINISTIC)
    rank, num_ranks, port = map(int, place.split("/"))
    for index, one in enumerate(asked):
        placement = Placement(rank, num_ranks, f"127.0.0.1:{port + index}", timeout_s=60.0)
        claim_device(1, 0, is_deterministic=one.startswith("bfloat16"))
        for record in (cuda.VARLEN_CALLS, stand_in.MADE, stand_in.CALLS):
            record.clear()
        with PretendedGpu():
            found = run(Path(model), one, Path(output) / one, 1, placement)
        found["varlen calls"] = cuda.VARLEN_CALLS.pop("forward", 0)
        found["varlen calls of trees"] = dict(cuda.VARLEN_CALLS)
        found["te"] = {"made": stand_in.MADE, "calls": stand_in.CALLS}
        torch.save(found, Path(output) / f"{one}.{rank}.pt")


if __name__ == "__main__":
    main()
