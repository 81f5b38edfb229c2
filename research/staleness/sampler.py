"""Sampling from a small Qwen3 in plain torch, for studies that need an exact lag in one process.

Owns a copy of the weights under their Hugging Face names, fused where that saves calls; it never
sees the learner's tensors again. Float32, temperature 1, KV cache, left-padded prompts. Invariant: the
log-prob it records is that of the full distribution the token was drawn from.

Shapes: B sequences, T positions (prompt and response), P prompt, H hidden, K heads of keys, Q queries
per key head, D head size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

HIDDEN = -1e30
"""Added to scores of keys that are not seen; finite, so that a query that sees nothing gives no NaN."""


@dataclass(frozen=True)
class Shape:
    """Fields of a model's `config.json` that the sampler reads."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    rope_theta: float

    @staticmethod
    def read(folder: Path) -> Shape:
        """Return the shape of the Qwen3 model in `folder`."""
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == "qwen3", "the sampler knows Qwen3 only"
        return Shape(
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            epsilon=config["rms_norm_eps"],
            rope_theta=config["rope_parameters"]["rope_theta"],
        )


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, transposed for `x @ weight`."""

    norm_H: torch.Tensor
    qkv: torch.Tensor
    q_norm_D: torch.Tensor
    k_norm_D: torch.Tensor
    output: torch.Tensor
    mlp_norm_H: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """A copy of the policy at one version."""

    embedding_VH: torch.Tensor
    layers: tuple[Layer, ...]
    norm_H: torch.Tensor
    head_HV: torch.Tensor

    @staticmethod
    def copy(tensors: Iterable[tuple[str, torch.Tensor]], shape: Shape) -> Weights:
        """Copy `tensors`, named as Hugging Face names them."""
        named = {name: tensor.detach() for name, tensor in tensors}

        def fuse(layer: int, *parts: str) -> torch.Tensor:
            return torch.cat([named[f"model.layers.{layer}.{part}.weight"] for part in parts]).T.contiguous()

        def clone(name: str) -> torch.Tensor:
            return named[f"{name}.weight"].clone()

        layers = tuple(
            Layer(
                norm_H=clone(f"model.layers.{index}.input_layernorm"),
                qkv=fuse(index, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                q_norm_D=clone(f"model.layers.{index}.self_attn.q_norm"),
                k_norm_D=clone(f"model.layers.{index}.self_attn.k_norm"),
                output=fuse(index, "self_attn.o_proj"),
                mlp_norm_H=clone(f"model.layers.{index}.post_attention_layernorm"),
                gate_up=fuse(index, "mlp.gate_proj", "mlp.up_proj"),
                down=fuse(index, "mlp.down_proj"),
            )
            for index in range(shape.num_layers)
        )
        return Weights(
            clone("model.embed_tokens"), layers, clone("model.norm"), clone("lm_head").T.contiguous()
        )


@dataclass(frozen=True)
class Samples:
    """Responses of B sequences, each `num_tokens` long with its end of sequence."""

    tokens_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    num_tokens: tuple[int, ...]
    is_finished: tuple[bool, ...]


class Sampler:
    """Samples at temperature 1 with a generator of its own."""

    def __init__(self, shape: Shape, *, eos: int, max_tokens: int, seed: int) -> None:
        self._shape, self._eos, self._max_tokens = shape, eos, max_tokens
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def sample(self, weights: Weights, prompts: Sequence[Sequence[int]], copies: int) -> Samples:
        """Return `copies` responses to each prompt, those of one prompt together."""
        tokens_BP, padding_B = _pad_left(prompts)
        run = _Run(self._shape, weights, padding_B, tokens_BP.shape[1] + self._max_tokens)
        logits_BV = run.advance(tokens_BP).repeat_interleave(copies, 0)
        run.repeat(copies)
        num_sequences = len(prompts) * copies
        is_live_B = torch.ones(num_sequences, dtype=torch.bool)
        tokens, logprobs, live = [], [], []
        for _ in range(self._max_tokens):
            logp_BV = logits_BV.log_softmax(-1)
            token_B1 = torch.multinomial(logp_BV.exp(), 1, generator=self._generator)
            tokens.append(token_B1[:, 0])
            logprobs.append(logp_BV.gather(1, token_B1)[:, 0])
            live.append(is_live_B)
            is_live_B = is_live_B & (token_B1[:, 0] != self._eos)
            if len(tokens) == self._max_tokens or not is_live_B.any():
                break
            logits_BV = run.advance(token_B1)
        num_tokens_B = torch.stack(live, 1).sum(1)
        return Samples(
            torch.stack(tokens, 1),
            torch.stack(logprobs, 1),
            tuple(num_tokens_B.tolist()),
            tuple((~is_live_B).tolist()),
        )


class _Run:
    """The KV cache of one batch and how far it is filled."""

    def __init__(self, shape: Shape, weights: Weights, padding_B: torch.Tensor, num_positions: int) -> None:
        self._shape, self._weights, self._padding_B = shape, weights, padding_B
        size = (shape.num_layers, len(padding_B), shape.num_kv_heads, num_positions, shape.head_dim)
        self._keys, self._values, self._filled = torch.zeros(size), torch.zeros(size), 0

    def repeat(self, copies: int) -> None:
        """Make `copies` sequences of each."""
        self._keys, self._values = (x.repeat_interleave(copies, 1) for x in (self._keys, self._values))
        self._padding_B = self._padding_B.repeat_interleave(copies, 0)

    def advance(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Append tokens and return the logits [B, V] behind the last one."""
        weights, first, last = self._weights, self._filled, self._filled + tokens_BT.shape[1]
        self._filled = last
        columns_T = torch.arange(first, last)
        angles = _rope_angles(columns_T - self._padding_B[:, None], self._shape)
        keys_T = torch.arange(last)
        is_seen = (keys_T <= columns_T[:, None]) & (keys_T >= self._padding_B[:, None, None])
        bias = torch.where(is_seen, 0.0, HIDDEN)[:, None, None]
        x_BTH = F.embedding(tokens_BT, weights.embedding_VH)
        for index, layer in enumerate(weights.layers):
            x_BTH = x_BTH + self._attend(index, layer, self._norm(x_BTH, layer.norm_H), angles, bias)
            gate, up = (self._norm(x_BTH, layer.mlp_norm_H) @ layer.gate_up).chunk(2, -1)
            x_BTH = x_BTH + (F.silu(gate) * up) @ layer.down
        return self._norm(x_BTH[:, -1], weights.norm_H) @ weights.head_HV

    def _attend(
        self,
        index: int,
        layer: Layer,
        x_BTH: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor,
    ) -> torch.Tensor:
        shape, (batch, length, _) = self._shape, x_BTH.shape
        heads = (x_BTH @ layer.qkv).view(batch, length, -1, shape.head_dim).transpose(1, 2)
        q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), 1)
        first, last = self._filled - length, self._filled
        self._keys[index, :, :, first:last] = _rotate(self._norm(k, layer.k_norm_D), angles)
        self._values[index, :, :, first:last] = v
        keys, values = (cache[index, :, :, None, :last] for cache in (self._keys, self._values))
        q = _rotate(self._norm(q, layer.q_norm_D), angles)
        q = q.unflatten(1, (shape.num_kv_heads, -1))  # [B, K, Q, T, D]
        scores = q @ keys.transpose(-1, -2) / shape.head_dim**0.5 + bias
        mixed = (scores.softmax(-1) @ values).flatten(1, 2).transpose(1, 2)
        attended: torch.Tensor = mixed.reshape(batch, length, -1) @ layer.output
        return attended

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._shape.epsilon)


def _pad_left(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    rows = [[0] * count + list(prompt) for count, prompt in zip(padding, prompts, strict=True)]
    return torch.tensor(rows), torch.tensor(padding)


def _rope_angles(positions_BT: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    half = positions_BT[:, None, :, None].clamp(min=0) * shape.rope_theta**-exponents
    angles = torch.cat([half, half], -1)  # [B, 1, T, D]
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = angles
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
