"""The root modules that are sharded: a language model with its log-probs, or with a value head.

Everything that reads the output embedding happens inside the root's `forward`, where its parameters
are whole; outside they are shards.

Shapes: N packed positions (going in: those of the tree, and its labels, where rows share prompts), H hidden
size, V vocabulary.
"""

from __future__ import annotations

import functools

import torch
from transformers import PreTrainedModel

from asyncrl.core.config.tree import LoraSection
from asyncrl.core.errors import ConfigError
from learner.fsdp2.model.language_model import Ways, run_body, run_logits
from learner.fsdp2.model.rows import Rows
from learner.lora.factors import CHILD, Factors, Switch
from learner.numerics.fused_logprob import fused_logprobs
from learner.numerics.products import linear


class PolicyModule(torch.nn.Module):
    """tokens -> (log-prob of each label, entropy), and on request the sum of squared probabilities."""

    def __init__(
        self, model: PreTrainedModel, ways: Ways, temperature: float, lora: LoraSection | None = None
    ) -> None:
        super().__init__()
        self.model, self.ways, self.temperature, self.switch = model, ways, temperature, Switch()
        if lora is not None and lora.rank:
            add_adapters(model, lora, self.switch)

    def named_hf_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return (Hugging Face name, parameter): tied ones once, the same order on every rank."""
        return [(name.replace(f".{CHILD}.", "."), one) for name, one in self.model.named_parameters()]

    def forward(
        self, tokens_N: torch.Tensor, labels_N: torch.Tensor, rows: Rows, *, has_squares: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Return ([N], [N]) in float32, with `has_squares` a third [N]."""
        if not self.ways.is_plain_head:
            logits_NV = _take(run_logits(self.model, tokens_N, rows, is_packed=self.ways.is_packed), rows)
            columns = dense_logprobs(logits_NV, labels_N, self.temperature, has_squares=has_squares)
            return _spread(columns, rows)
        hidden_NH = _take(run_body(self.model, tokens_N, rows, is_packed=self.ways.is_packed), rows)
        weight_VH = self.model.get_output_embeddings().weight
        columns = fused_logprobs(
            hidden_NH,
            weight_VH,
            labels_N,
            vocab_size=weight_VH.shape[0],
            temperature=self.temperature,
            group=None,
            has_squares=has_squares,
        )
        return _spread(columns, rows)


class ValueModule(torch.nn.Module):
    """tokens -> (value of the state before each label,): the body of a language model and one output."""

    def __init__(self, model: PreTrainedModel, ways: Ways, weight_1H: torch.Tensor) -> None:
        super().__init__()
        self.model, self.ways = model.base_model, ways
        self.score = torch.nn.Linear(weight_1H.shape[1], 1, bias=False)
        self.score.weight.data.copy_(weight_1H)
        is_whole = self.model is model  # a model without a base of its own
        self._prefix = "" if is_whole else f"{model.base_model_prefix}."

    def named_hf_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return (Hugging Face name, parameter), the head last, the same order on every rank."""
        body = [(f"{self._prefix}{name}", parameter) for name, parameter in self.model.named_parameters()]
        return [*body, ("score.weight", self.score.weight)]

    def forward(self, tokens_N: torch.Tensor, labels_N: torch.Tensor, rows: Rows) -> tuple[torch.Tensor]:
        """Return ([N],) in float32; the labels are not read."""
        hidden_NH = _take(run_body(self.model, tokens_N, rows, is_packed=self.ways.is_packed), rows)
        # A copy: FSDP2 warns about outputs that are views.
        return (_spread((self.score(hidden_NH)[:, 0].float().clone(),), rows)[0],)


def _take(hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return what the head reads: of shared rows the hidden state of each label."""
    return hidden if rows.shared is None else rows.shared.take(hidden)


def _spread(columns: tuple[torch.Tensor, ...], rows: Rows) -> tuple[torch.Tensor, ...]:
    """Return the head's outputs by packed position."""
    return columns if rows.shared is None else tuple(map(rows.shared.spread, columns))


def add_adapters(model: torch.nn.Module, lora: LoraSection, switch: Switch) -> None:
    """Freeze `model` and hang an adapter, without values, on each linear layer of a target.

    Raises:
        ConfigError: A target is the name of no linear layer.
    """
    layers = [
        (name.rpartition(".")[2], layer)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    if missing := sorted(set(lora.targets) - {name for name, _ in layers}):
        raise ConfigError(
            f"model.lora.targets: {type(model).__name__} has no linear layer called {', '.join(missing)}",
            hint=f"It has {', '.join(sorted({name for name, _ in layers}))}",
        )
    model.requires_grad_(False)
    for name, layer in layers:
        if name in lora.targets:
            layer.add_module(CHILD, Factors(lora.rank, layer.in_features, layer.out_features, layer.weight))
            layer.forward = functools.partial(_forward_adapted, layer, lora.scale, switch)  # type: ignore[method-assign]


def _forward_adapted(layer: torch.nn.Linear, scale: float, switch: Switch, x: torch.Tensor) -> torch.Tensor:
    output = linear(x, layer.weight, layer.bias)
    if not switch.is_on:
        return output
    low: torch.Tensor = layer.get_submodule(CHILD)(x)
    return output + low * scale


def dense_logprobs(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, temperature: float, *, has_squares: bool = False
) -> tuple[torch.Tensor, ...]:
    """As `fused_logprobs`, from logits that are all there."""
    table_NV = (logits_NV.float() / temperature).log_softmax(-1)
    entropy_N = -(table_NV.exp() * table_NV).sum(-1)
    logprobs_N = table_NV.gather(-1, labels_N[:, None])[:, 0].clone()  # FSDP2 warns about views
    if not has_squares:
        return logprobs_N, entropy_N
    return logprobs_N, entropy_N, (2 * table_NV.detach()).exp().sum(-1)
