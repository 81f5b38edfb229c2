"""Files of prompts: written, and read without a whole configuration."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from asyncrl.core.config.tree import SourceSection
from rollout_service.data.prompts import Prompt, PromptSet, parse_row
from rollout_service.data.readers import read_rows
from rollout_service.data.sources import load_sources


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file or folder, in its order."""
    return [parse_row(path, row, fields) for row, fields in enumerate(read_rows(path))]


def load_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> PromptSet:
    """Return the prompts of one file or folder, see `load_sources`."""
    return load_sources([SourceSection(path=str(path))], tokenizer, max_prompt_tokens)
