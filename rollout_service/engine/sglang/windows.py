"""Sliding windows of attention that SGLang leaves out of a model (pure)."""

from __future__ import annotations

from collections.abc import Mapping

WITH_LAYERS = frozenset({"qwen2", "qwen3"})
WITHOUT_WINDOWS = WITH_LAYERS | {"mistral"}
"""Kinds of models whose window SGLang ignores; of some, layers from a number on have it."""
WINDOW, FIRST_LAYER, NUM_LAYERS = 4096, 28, 32
"""Values of these kinds where `config.json` does not tell."""


def find_ignored_window(table: Mapping[str, object], longest: int) -> str:
    """Return which window SGLang would leave out of rows of `longest` tokens, empty for none.

    Args:
        table: The model's `config.json`.
    """
    window = table.get("sliding_window", WINDOW)
    if (
        table.get("model_type") not in WITHOUT_WINDOWS
        or not isinstance(window, int)
        or not _has_window(table)
    ):
        return ""
    is_short = 0 < window < longest
    return f"SGLang would run it without its sliding window of {window} tokens" if is_short else ""


def _has_window(table: Mapping[str, object]) -> bool:
    if table["model_type"] not in WITH_LAYERS:
        return True
    kinds = table.get("layer_types")
    if isinstance(kinds, list):
        is_in_layers = "sliding_attention" in kinds
    else:
        first, num = table.get("max_window_layers", FIRST_LAYER), table.get("num_hidden_layers", NUM_LAYERS)
        is_in_layers = isinstance(first, int) and isinstance(num, int) and first < num
    return bool(table.get("use_sliding_window")) and is_in_layers
