"""Which models the Megatron learner can train, by what their `config.json` says (pure).

One rule for the check before anything starts and for the backend itself. Must never read a file.
Invariant: what is not known is refused, because a model that is slightly wrong trains without any sign
of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SUPPORTED = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "llama3")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PLAIN_FORM = {"hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False, "attention_bias": False}


def find_unsupported(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (problem, hint) for what of a Hugging Face `config.json` is not supported."""
    experts = next((key for key in _EXPERT_KEYS if table.get(key)), None)
    if experts is not None:
        yield (
            f"{experts}: {table[experts]}: mixture-of-experts models are not supported",
            f"Choose a dense model: {', '.join(SUPPORTED)}",
        )
    if table.get("model_type") not in SUPPORTED:
        yield f"model_type '{table.get('model_type')}' is not supported", f"Supported: {', '.join(SUPPORTED)}"
    for key, wanted in _PLAIN_FORM.items():
        if table.get(key, wanted) != wanted:
            yield f"{key}: {table[key]} is not supported", f"Only {key}: {wanted} is"
    rope_type = rope_type_of(table)
    if rope_type not in ROPE_TYPES:
        yield f"rope_type '{rope_type}' is not supported", f"Supported: {', '.join(ROPE_TYPES)}"


def read_rope(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters: newer files have all in one table, older ones a table of changes."""
    return dict(table.get("rope_scaling") or {}) | dict(table.get("rope_parameters") or {})


def rope_type_of(table: Mapping[str, Any]) -> str:
    """Return the kind of rotary embedding."""
    rope = read_rope(table)
    return str(rope.get("rope_type", rope.get("type", "default")))
