"""`rollout.engine: scripted`: what it can do, and how a replica gets one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.core.config.tree import Config
from rollout_service.engine.protocol import Engine, EngineVariant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS_PER_S = 200.0


class ScriptedVariant(EngineVariant):
    """The scripted engine."""

    def build(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
        from rollout_service.engine.scripted.engine import ScriptedEngine

        return ScriptedEngine(tokenizer.eos_token_id, TOKENS_PER_S, follows_steps=True)


VARIANT = ScriptedVariant(
    "the scripted engine", loads_model=False, tokens_per_s=TOKENS_PER_S, merges_adapters=True
)
