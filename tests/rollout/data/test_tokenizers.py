"""A model folder without a tokenizer is told of by name, not by what becomes of its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2Config

from asyncrl.core.errors import ConfigError
from rollout_service.evaluation.wiring import load_tokenizer
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    Qwen2Config(vocab_size=87, hidden_size=64).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model.path: .*tokenizer") as refused:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in refused.value.message and "tokenizer.json" in refused.value.hint
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model.path: the tokenizer in .* cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_is_there_is_loaded(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    Qwen2Config(vocab_size=87, hidden_size=64).save_pretrained(tmp_path)
    assert len(load_tokenizer(str(tmp_path))) == len(build_tokenizer())
