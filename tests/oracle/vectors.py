"""Reads a vector set: PREFIX.json with the cases, PREFIX.npz with their arrays."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

NOT_OURS = ("get_response_mask", "reduce_metrics", "process_validation_metrics")
"""Of verl's set, without a counterpart: the engine says where an answer ends, each metric how it is reduced,
and an evaluation counts all answers, of which verl draws some (docs/from-verl.md)."""


@dataclass(frozen=True)
class Case:
    """One call of a function: its name, what went in, what came out."""

    name: str
    function: str
    given: dict[str, Any]
    wanted: dict[str, Any]


def read_cases(prefix: Path) -> list[Case]:
    """Return all cases but those of `NOT_OURS`, arrays as tensors. Raises OSError, ValueError."""
    table = json.loads(prefix.with_name(prefix.name + ".json").read_text())["cases"]
    with np.load(prefix.with_name(prefix.name + ".npz"), allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}

    def resolve(value: Any) -> Any:
        if isinstance(value, dict) and "array" in value:
            return torch.from_numpy(arrays[value["array"]].copy())
        if isinstance(value, dict):
            return {key: resolve(part) for key, part in value.items()}
        return value

    return [
        Case(name, case["fn"], resolve(case["in"]), resolve(case["out"]))
        for name, case in table.items()
        if case["fn"] not in NOT_OURS
    ]
