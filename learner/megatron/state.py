"""Exact state of one rank on disk: its share of the optimizer, and generators, as safetensors and JSON.

Written instead of Megatron's `dist_checkpointing`, which spawns a process and needs seconds for a
model of any size. The optimizer's float32 parameters are the model: the rest of it is gathered from
the other ranks after loading. Files are per rank: a resume needs the same layout. Invariant: after
loading, training goes on bit by bit as if it had not stopped. Must never use pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")


def write_state(folder: Path, rank: int, tensors: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
    """Write the tensors and the record of `rank` into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        _tensor_file(folder, rank),
    )
    (folder / f"rank-{rank:05d}.json").write_text(json.dumps(record, sort_keys=True))


def read_record(folder: Path, rank: int, layout: dict[str, Any]) -> dict[str, Any]:
    """Return the record of `rank`, written at the same `layout`.

    Raises:
        CheckpointError: It is missing or unreadable, or was written at another layout.
    """
    path = folder / f"rank-{rank:05d}.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}", hint="The checkpoint is incomplete") from error
    if record.get("layout") != layout:
        raise CheckpointError(
            f"{folder} was written at layout {record.get('layout')}, this learner has {layout}",
            hint="Resume with the same model, tp, dp and dtype, or start anew from its Hugging Face export",
        )
    return record


def read_tensors(folder: Path, rank: int, into: dict[str, torch.Tensor]) -> None:
    """Copy the tensors of `rank` into those of the same names.

    Raises:
        CheckpointError: Names, shapes or dtypes do not match.
    """
    try:
        found = load_file(_tensor_file(folder, rank))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {error}", hint="The checkpoint is incomplete or damaged") from error
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}
    if described != {name: (tensor.shape, tensor.dtype) for name, tensor in into.items()}:
        raise CheckpointError(f"{folder}: the tensors of rank {rank} are not those of this model")
    with torch.no_grad():
        for name, tensor in found.items():
            into[name].copy_(tensor)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of everything an AdamW holds for this rank: parameters, moments, step.

    A parameter that was never stepped gets the state that AdamW would give it: each its own `step`
    tensor. (Megatron's load_state_dict makes all parameters share one, which breaks bias correction.)
    """
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state.update({moment: torch.zeros_like(parameter) for moment in _MOMENTS})
            prefix = f"optimizer.{group_index}.{index}"
            yield f"{prefix}.main", parameter
            yield f"{prefix}.step", state["step"]
            for moment in _MOMENTS:
                yield f"{prefix}.{moment}", state[moment]


def generator_tensors() -> dict[str, torch.Tensor]:
    """Return the states of torch's random generators."""
    states = {"generator.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["generator.cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: dict[str, torch.Tensor]) -> None:
    """Set torch's random generators to `states`."""
    torch.set_rng_state(states["generator.cpu"])
    if "generator.cuda" in states:
        torch.cuda.set_rng_state(states["generator.cuda"])


def _tensor_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"
