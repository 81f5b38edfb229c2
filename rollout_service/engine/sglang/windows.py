"""Models whose sliding window of attention SGLang leaves out. Imports no SGLang: `plan` asks."""

from __future__ import annotations

from collections.abc import Mapping

WITHOUT_WINDOWS = frozenset({"mistral", "qwen2", "qwen3"})
"""Kinds of models whose sliding window SGLang ignores."""


def find_ignored_window(table: Mapping[str, object], longest: int) -> str:
    """Return which sliding window SGLang would leave out of rows of `longest` tokens, or nothing.

    Args:
        table: The model's `config.json`.
    """
    if table.get("model_type") not in WITHOUT_WINDOWS:
        return ""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**table)
    window, kinds = config.sliding_window, getattr(config, "layer_types", None)
    is_used = window and window < longest and (not kinds or "sliding_attention" in kinds)
    return f"SGLang would run it without its sliding window of {window} tokens" if is_used else ""
