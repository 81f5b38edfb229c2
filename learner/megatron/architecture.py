"""What a Hugging Face `config.json` says about a model, and the Megatron-core model it stands for.

Owns the list of supported architectures. It must never guess: what it does not know it refuses
with a ConfigError, because a model that is slightly wrong trains without any sign of it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from asyncrl.errors import ConfigError
from learner.megatron.convert import cut_dimension
from learner.megatron.layers import RowRotary, make_layer_spec

SUPPORTED = ("llama", "qwen2", "qwen3")
VOCABULARY_MULTIPLE = 16
"""Padding of the vocabulary: one multiple for every tensor-parallel size that divides it, so that the
padded model is the same model at each of them."""


@dataclass(frozen=True)
class Architecture:
    """The shape of a supported model. Sizes are counts; `rope` is the table of rotary parameters."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    is_tied: bool
    rope: dict[str, Any]

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@dataclass(frozen=True)
class Parallelism:
    """How the model is cut: sizes of the process groups."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False


def read_architecture(folder: Path) -> Architecture:
    """Return what `folder`/config.json describes.

    Raises:
        ConfigError: The file is missing, or the model is not one of `SUPPORTED` in its plain form.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", hint="model.path must be a Hugging Face model folder")
    table = json.loads(path.read_text())
    model_type = table.get("model_type")
    if model_type not in SUPPORTED:
        raise ConfigError(
            f"{path}: model_type '{model_type}' is not supported", hint=f"Supported: {', '.join(SUPPORTED)}"
        )
    for key, wanted in (
        ("hidden_act", "silu"),
        ("use_sliding_window", False),
        ("mlp_bias", False),
        ("attention_bias", False),
    ):
        if table.get(key, wanted) != wanted:
            raise ConfigError(
                f"{path}: {key}: {table[key]} is not supported", hint=f"Only {key}: {wanted} is"
            )
    num_heads = table["num_attention_heads"]
    return Architecture(
        model_type=model_type,
        num_layers=table["num_hidden_layers"],
        hidden_size=table["hidden_size"],
        num_heads=num_heads,
        num_key_value_heads=table.get("num_key_value_heads") or num_heads,
        head_size=table.get("head_dim") or table["hidden_size"] // num_heads,
        intermediate_size=table["intermediate_size"],
        vocab_size=table["vocab_size"],
        norm_eps=table["rms_norm_eps"],
        is_tied=table.get("tie_word_embeddings", False),
        rope=_read_rope(table, path),
    )


def check_parallelism(architecture: Architecture, parallelism: Parallelism) -> None:
    """Raise ConfigError unless the model can be cut that way by this version."""
    if parallelism.cp > 1:
        raise ConfigError(f"cp: {parallelism.cp} is not supported yet", hint="Use cp: 1")
    if parallelism.pp > 1:
        raise ConfigError(f"pp: {parallelism.pp} is not supported yet", hint="Use pp: 1")
    for what, size in (
        ("key/value heads", architecture.num_key_value_heads),
        ("entries of the padded vocabulary", architecture.padded_vocab_size),
        ("intermediate channels", architecture.intermediate_size),
    ):
        if size % parallelism.tp:
            raise ConfigError(
                f"learner.tp: {parallelism.tp} does not divide the model's {size} {what}",
                hint="Choose a tp that divides it",
            )


def make_transformer_config(
    architecture: Architecture, parallelism: Parallelism, dtype: torch.dtype
) -> TransformerConfig:
    """Return Megatron's configuration of the model."""
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_size,
        ffn_hidden_size=architecture.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.model_type == "qwen2",
        qk_layernorm=architecture.model_type == "qwen3",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        tensor_model_parallel_size=parallelism.tp,
        sequence_parallel=parallelism.sequence_parallel,
        # Gradients are summed over data-parallel ranks: the loss is already a share of the whole.
        calculate_per_token_loss=True,
    )


def make_model(architecture: Architecture, config: TransformerConfig, device: torch.device) -> GPTModel:
    """Return the model of this rank, its parameters not yet filled."""
    model = GPTModel(
        config,
        make_layer_spec(config),
        vocab_size=architecture.padded_vocab_size,
        max_sequence_length=1,  # only learned positions would read it
        position_embedding_type="rope",
        share_embeddings_and_output_weights=architecture.is_tied,
        parallel_output=True,
    )
    for name, parameter in model.named_parameters():
        dimension = cut_dimension(name)
        if dimension is not None and not hasattr(parameter, "tensor_model_parallel"):
            # Megatron marks cut weights while initialising them, which is skipped here. Without the
            # mark the gradient norm counts rank 0's part alone, and clipping goes wrong silently.
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dimension, stride=1)
    model.rotary_pos_emb = RowRotary(make_inverse_frequencies(architecture).to(device))
    return model


def make_inverse_frequencies(architecture: Architecture) -> torch.Tensor:
    """Return the rotary inverse frequencies [head_size / 2], float32, as Hugging Face computes them."""
    exponents = torch.arange(0, architecture.head_size, 2, dtype=torch.int64).float() / architecture.head_size
    inverse = 1.0 / (architecture.rope["rope_theta"] ** exponents)
    if architecture.rope["rope_type"] == "llama3":
        return _stretch_low_frequencies(inverse, architecture.rope)
    return inverse


def _read_rope(table: dict[str, Any], path: Path) -> dict[str, Any]:
    rope = dict(table.get("rope_scaling") or {}) | dict(table.get("rope_parameters") or {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ConfigError(
            f"{path}: rope_type '{rope_type}' is not supported", hint="Supported: default, llama3"
        )
    theta = rope.get("rope_theta", table.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{path}: no rope_theta", hint="It belongs in rope_parameters or at the top level")
    return rope | {"rope_type": rope_type, "rope_theta": float(theta)}


def _stretch_low_frequencies(inverse: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths are divided by `factor`, medium ones interpolated."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > context / low, inverse / factor, inverse)
    smooth = (context / wavelength - low) / (high - low)
    medium = (1 - smooth) * stretched / factor + smooth * stretched
    is_medium = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(is_medium, medium, stretched)
