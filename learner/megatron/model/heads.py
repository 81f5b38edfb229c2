"""The models of a rank and what they put on top of the layers: log-probs of labels, or one value per token.

Owns the two heads. Both are called as modules, never through their weight alone: the hooks of
`overlap_param_gather` that fetch a weight run only then. Invariant: the outputs [C, N] are in float32,
of all N positions that this context-parallel rank holds, on every tensor-parallel rank.

Shapes: N positions, H hidden size, V vocabulary entries of this rank, C columns.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from learner.megatron.convert import cut_dimension
from learner.megatron.model.architecture import Architecture, make_inverse_frequencies
from learner.megatron.model.layers import RowRotary, make_layer_spec
from learner.megatron.model.packing import PackedRows
from learner.numerics.fused_logprob import fused_logprobs

Model = TypeVar("Model", bound=GPTModel)


class LogprobHead(torch.nn.Module):
    """Output projection, softmax and label in one; gives log-prob and entropy (C = 2), or squares too (3)."""

    def __init__(
        self, weight: torch.nn.Parameter | None, vocab_size: int, temperature: float, is_scattered: bool
    ) -> None:
        super().__init__()
        self.weight = weight
        self._vocab_size, self._temperature = vocab_size, temperature
        self._is_scattered = is_scattered

    def forward(
        self, hidden: torch.Tensor, tied_weight: torch.Tensor | None, rows: PackedRows
    ) -> torch.Tensor:
        """Take hidden states [N or this rank's share, 1, H]; return [C, N], or [C, E] of shared rows."""
        group = parallel_state.get_tensor_model_parallel_group()
        if self._is_scattered:  # backward is a reduce-scatter: it sums over the group
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True
            )
        weight_VH = self.weight if tied_weight is None else tied_weight
        assert weight_VH is not None
        assert rows.labels_N is not None
        columns = fused_logprobs(
            hidden.squeeze(1) if rows.shared is None else rows.shared.take(hidden.squeeze(1)),
            weight_VH,
            rows.labels_N,
            vocab_size=self._vocab_size,
            temperature=self._temperature,
            group=group if group.size() > 1 else None,
            reduce_hidden_grad=not self._is_scattered,
            has_squares=rows.has_squares,
        )
        return torch.stack(columns)


class ValueHead(torch.nn.Module):
    """A linear layer to one value per token, C = 1. Starts at zero: so does every value."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._is_scattered = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take hidden states [N or this rank's share, 1, H]; return [1, N]."""
        values_N1 = functional.linear(hidden.squeeze(1).float(), self.weight.float())
        if self._is_scattered:  # every rank goes on with all values alike: backward takes its own share
            values_N1 = tensor_parallel.gather_from_sequence_parallel_region(
                values_N1, tensor_parallel_output_grad=False
            )
        return values_N1.T


class PolicyModel(GPTModel):
    """Gives hidden states on all stages but the last, and there the columns of `LogprobHead` [C, N]."""

    def _is_in_embd_group(self) -> bool:
        """Asked while building a tied model, to send the embedding to the last stage: both stages load it."""
        return False

    def _postprocess(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedRows, **_: object
    ) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        output: torch.Tensor = self.output_layer(hidden_states, tied, packed_seq_params)
        return output


class ValueModel(GPTModel):
    """Gives hidden states on all stages but the last, and there values [1, N]."""

    def _postprocess(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedRows, **_: object
    ) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        values: torch.Tensor = self.value_head(hidden_states)
        shared = packed_seq_params.shared
        return values if shared is None else shared.take(values.T).T


def make_policy(
    architecture: Architecture,
    config: TransformerConfig,
    stage: int | None,
    device: torch.device,
    temperature: float,
) -> PolicyModel:
    """Return this rank's part of a policy at virtual stage `stage`, not yet filled."""
    model = PolicyModel(**_model_options(architecture, config, stage, is_tied=architecture.is_tied))
    if model.post_process:
        weight = model.output_layer.weight
        model.output_layer = LogprobHead(
            weight, architecture.vocab_size, temperature, bool(config.sequence_parallel)
        )
    return _finish(model, architecture, device)


def make_value_model(
    architecture: Architecture, config: TransformerConfig, stage: int | None, device: torch.device
) -> ValueModel:
    """Return this rank's part of a value model at virtual stage `stage`, not yet filled."""
    model = ValueModel(**_model_options(architecture, config, stage, is_tied=False))
    if model.post_process:
        del model.output_layer
        model.value_head = ValueHead(config)
    return _finish(model, architecture, device)


def _model_options(
    architecture: Architecture, config: TransformerConfig, stage: int | None, *, is_tied: bool
) -> dict[str, object]:
    return {
        "config": config,
        "transformer_layer_spec": make_layer_spec(config, stage),
        "vocab_size": architecture.padded_vocab_size,
        "max_sequence_length": 1,  # only learned positions would read it
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": is_tied,
        "parallel_output": True,
        "vp_stage": stage,
    }


def _finish(model: Model, architecture: Architecture, device: torch.device) -> Model:
    for name, parameter in model.named_parameters():
        dimension = cut_dimension(name)
        if dimension is not None and not hasattr(parameter, "tensor_model_parallel"):
            # Megatron marks cut weights while initialising them, which is skipped here. Without the
            # mark the gradient norm counts rank 0's part alone, and clipping goes wrong silently.
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dimension, stride=1)
    model.rotary_pos_emb = RowRotary(
        make_inverse_frequencies(architecture).to(device), model.config.params_dtype
    )
    if model.pre_process and architecture.family.scales_embedding:
        scale = torch.tensor(architecture.hidden_size**0.5, dtype=model.config.params_dtype)
        model.embedding.register_forward_hook(lambda _module, _inputs, output: output * scale.item())
    model.to(device)  # in place
    return model
