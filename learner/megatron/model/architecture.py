"""Architecture of a model from its Hugging Face `config.json`, and the Megatron-core configuration for it.

Owns the list of supported architectures. It must never guess: an unknown architecture is refused with a
ConfigError, because a model that is slightly wrong trains without any sign of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.errors import ConfigError
from asyncrl.models.architectures import (
    FAMILIES,
    Family,
    ModelSize,
    find_unsupported,
    is_tied,
    read_rope,
    rope_type_of,
)
from asyncrl.models.divisibility import find_uneven_cuts, pad_vocabulary
from learner.megatron.model.experts import FamilyConfig, describe_experts

_RECOMPUTE: dict[str, dict[str, object]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
"""Selective recomputes attention alone: Megatron's other modules need Transformer Engine."""


@dataclass(frozen=True)
class Stretch:
    """Llama 3.1's change of the rotary frequencies, under the names of `config.json`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True)
class Rope:
    """Rotary parameters."""

    theta: float
    stretch: Stretch | None = None


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelSize):
    """The shape of a supported model. Sizes are counts."""

    family: Family
    norm_eps: float
    is_tied: bool
    rope: Rope

    @property
    def padded_vocab_size(self) -> int:
        return pad_vocabulary(self.vocab_size)


@dataclass(frozen=True)
class Parallelism:
    """Partition of the model: sizes of the process groups, and the parts recomputed to save memory."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    overlap: bool = False
    recompute: str = "none"
    ep: int = 1
    etp: int = 1

    @property
    def num_copies(self) -> int:
        """Ranks that hold parts of one copy of the model and train the same rows."""
        return self.tp * self.pp * self.cp

    @classmethod
    def of(cls, config: LearnerSection) -> Parallelism:
        return cls(
            tp=config.tp,
            pp=config.pp,
            vpp=config.vpp,
            cp=config.cp,
            sequence_parallel=config.sequence_parallel and config.tp > 1,
            overlap=config.overlap,
            recompute=config.recompute,
            ep=config.ep,
            etp=config.expert_tp,
        )


def read_architecture(folder: Path) -> Architecture:
    """Return what `folder`/config.json describes.

    Raises:
        ConfigError: The file is missing, or the model is not a supported one in its plain form.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", hint="model.path must be a Hugging Face model folder")
    table = json.loads(path.read_text())
    for problem, hint in find_unsupported(table):
        raise ConfigError(f"{path}: {problem}", hint=hint)
    return Architecture(
        **vars(ModelSize.read(table)),
        family=FAMILIES[table["model_type"]],
        norm_eps=table["rms_norm_eps"],
        is_tied=is_tied(table),
        rope=_read_rope(table, path),
    )


def check_parallelism(architecture: Architecture, parallelism: Parallelism) -> None:
    """Raise ConfigError unless the model can be cut that way."""
    uneven = find_uneven_cuts(
        tp=parallelism.tp,
        pp=parallelism.pp,
        vpp=parallelism.vpp,
        num_layers=architecture.num_layers,
        num_key_value_heads=architecture.num_key_value_heads,
        intermediate_size=architecture.intermediate_size,
        vocab_size=architecture.vocab_size,
    )
    for problem, hint in uneven:
        raise ConfigError(problem, hint=hint)


def make_transformer_config(
    architecture: Architecture,
    parallelism: Parallelism,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Literal["local", "transformer_engine"] = "local",
) -> TransformerConfig:
    """Return Megatron's configuration of the model, whose layers are by `kernels`."""
    return FamilyConfig(
        transformer_impl=kernels,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_size,
        ffn_hidden_size=architecture.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        layernorm_zero_centered_gamma=architecture.family.has_centred_norms,
        gated_linear_unit=True,
        activation_func=functional.silu,  # `GatedMlp` reads the family's
        add_bias_linear=False,
        add_qkv_bias=architecture.family.has_qkv_bias,
        qk_layernorm=architecture.family.has_qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        use_te_activation_func=True,  # a module of the layer specification: `GatedMlp`
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=True,  # by `linear.bind_products`
        apply_rope_fusion=False,
        tensor_model_parallel_size=parallelism.tp,
        sequence_parallel=parallelism.sequence_parallel,
        context_parallel_size=parallelism.cp,
        pipeline_model_parallel_size=parallelism.pp,
        virtual_pipeline_model_parallel_size=parallelism.vpp if parallelism.vpp > 1 else None,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, without experts too
        # Interleaved stages that do not overlap are silently wrong at pp: 2; `Schedule` asserts it.
        overlap_p2p_comm=parallelism.vpp > 1,
        batch_p2p_comm=parallelism.vpp == 1,
        **_RECOMPUTE[parallelism.recompute],
        **describe_experts(architecture.experts, parallelism.ep, parallelism.etp),
        family=architecture.family,
        # Gradients are summed over data-parallel ranks: the loss is already a share of the whole.
        calculate_per_token_loss=True,
    )


def make_inverse_frequencies(architecture: Architecture) -> torch.Tensor:
    """Return the rotary inverse frequencies [head_size / 2], float32, as Hugging Face computes them."""
    exponents = torch.arange(0, architecture.head_size, 2, dtype=torch.int64).float() / architecture.head_size
    inverse = 1.0 / (architecture.rope.theta**exponents)
    stretch = architecture.rope.stretch
    return inverse if stretch is None else _stretch_low_frequencies(inverse, stretch)


def _read_rope(table: Mapping[str, object], path: Path) -> Rope:
    rope = read_rope(table)
    theta = rope.get("rope_theta", table.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{path}: no rope_theta", hint="It belongs in rope_parameters or at the top level")
    try:
        stretch = msgspec.convert(rope, Stretch) if rope_type_of(table) == "llama3" else None
        return Rope(msgspec.convert(theta, float), stretch)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: the rotary parameters: {error}") from error


def _stretch_low_frequencies(inverse: torch.Tensor, rope: Stretch) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths are divided by `factor`, medium ones interpolated."""
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > context / low, inverse / factor, inverse)
    smooth = (context / wavelength - low) / (high - low)
    medium = (1 - smooth) * stretched / factor + smooth * stretched
    is_medium = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(is_medium, medium, stretched)
