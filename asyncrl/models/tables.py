"""Dimensions of a model by its path alone: of its folder's `config.json`, or of the record of its hub name.

Must never load a model. Whoever needs more than is known asks the planner, which says what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from asyncrl.models.architectures import Experts
from asyncrl.models.named_models import find_table


def known_table(path: str) -> Mapping[str, object]:
    """Return the model's dimensions; an empty table if nothing is known of it."""
    try:
        table = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return find_table(path) or {}
    return table if isinstance(table, dict) else {}


def read_vocab_size(path: str) -> int | None:
    """Return how many tokens the model knows, None if that is not told."""
    table = known_table(path)
    text = table.get("text_config")
    size = table.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def read_experts(path: str) -> Experts | None:
    """Return the model's experts, None of a dense model, and if they are not told."""
    try:
        return Experts.read(known_table(path))
    except (KeyError, TypeError, ValueError):
        return None


def routed_sizes(path: str) -> tuple[int, int, int] | None:
    """Return what a token's recorded experts are of: (layers, experts chosen by each, experts in all)."""
    experts = read_experts(path)
    return None if experts is None else (len(experts.layers), experts.num_active, experts.num)
