"""Ranks that share the experts of a mixture: they train, and say what they publish and hold."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from learner.backend import Placement
from learner.batching.batch import PackedBatch, build_batch
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import open_backend, open_fsdp2, record_experts, train

GRAD_CLIP = 0.02


def run_experts(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train three steps; then compare all ranks' parts with the export, and compute log-probs.

    With `records`, what `record_experts` takes, on random routes.
    """
    record = functools.partial(record_experts, **job["records"]) if "records" in job else _keep
    opener = open_fsdp2 if job["name"] == "fsdp2" else open_backend
    backend = opener(Path(job["model"]), placement, grad_clip=GRAD_CLIP, **job["changes"])
    metrics = train(backend, range(3), record=record)
    assert all(one["actor/grad_norm"] > 2 * GRAD_CLIP for one in metrics), "nothing is clipped"
    wrong = find_wrong_parts(backend)
    backend.save_hf(out / job["name"])
    batch = record(build_batch(make_groups(seed=9), 0, {1: 0}))
    logprobs_N, entropy_N = backend.logprobs(batch)
    # The others have no row, and take part: tokens of the first go to their experts.
    mine = batch if backend.dp_rank == 0 else batch.select_groups(())
    lone_N = backend.logprobs(mine)[0]
    torch.testing.assert_close(lone_N, logprobs_N[: len(lone_N)], rtol=0, atol=1e-5)
    assert len(lone_N) == mine.num_tokens
    backend.close()
    return {
        "metrics": metrics,
        "logprobs": logprobs_N.tolist(),
        "entropy": entropy_N.tolist(),
        "wrong_parts": wrong,
    }


def _keep(batch: PackedBatch) -> PackedBatch:
    return batch


def find_wrong_parts(backend: Any) -> list[str]:
    """Name the tensors whose elements all ranks' parts do not cover once each, with the exported values."""
    whole = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    mine = [(part.name, part.row, part.column, part.values_RC.clone()) for part in backend.named_parts()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    times = {name: torch.zeros(len(tensor), tensor[0].numel()) for name, tensor in whole.items()}
    values = {name: torch.full_like(count, torch.nan) for name, count in times.items()}
    for name, row, column, part_RC in (part for parts in gathered for part in parts):
        part_RC = part_RC.reshape(len(part_RC), -1)
        place = slice(row, row + part_RC.shape[0]), slice(column, column + part_RC.shape[1])
        times[name][place] += 1
        values[name][place] = part_RC
    return [
        name
        for name, tensor in whole.items()
        if not ((times[name] == 1).all() and values[name].equal(tensor.reshape(values[name].shape)))
    ]
