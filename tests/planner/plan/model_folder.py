"""A model folder that passes every check before a start, and holds next to nothing."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from asyncrl.models.named_models import tensor_shapes
from asyncrl.models.weight_files import WEIGHTS

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
SIZES = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}


def write_model_folder(folder: Path, **config: Any) -> Path:
    """Write a Qwen3 of these values with a tokenizer of characters; without values only its kind is told."""
    folder.mkdir(exist_ok=True)
    table = {"model_type": "qwen3"} | config
    (folder / "config.json").write_text(json.dumps(table))
    shapes = dict(tensor_shapes(table, has_head=True)) | {"model.norm.weight": (4,)}
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, folder / WEIGHTS)
    words = {"<eos>": 0} | {character: index for index, character in enumerate(CHARACTERS, 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder
