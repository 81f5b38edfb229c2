"""Sizes, by hub id, of the models of shipped configurations, for use before they are fetched (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.core.config.models.architectures import ModelSize

HUB_SIZES: Mapping[str, ModelSize] = {
    "Qwen/Qwen3-0.6B": ModelSize(
        num_layers=28,
        hidden_size=1024,
        num_heads=16,
        num_key_value_heads=8,
        head_size=128,
        intermediate_size=3072,
        vocab_size=151_936,
    ),
    "Qwen/Qwen3-8B": ModelSize(
        num_layers=36,
        hidden_size=4096,
        num_heads=32,
        num_key_value_heads=8,
        head_size=128,
        intermediate_size=12_288,
        vocab_size=151_936,
    ),
}
