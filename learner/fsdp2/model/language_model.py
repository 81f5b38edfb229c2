"""A Hugging Face causal language model, in float32, and the ways packed rows go through it.

Owns the choice of the way, by experiment and not by the model's name: packed tokens if the model's
attention lets itself be replaced, else padded rows; hidden states times the output embedding if that
is all its head does, else its own logits. A way is taken only if it gives what the model itself gives
for each row alone. Must never guess: a model whose tensors have other names on disk is refused.

Shapes: N packed positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from asyncrl.core.errors import ConfigError
from learner.attention.cascade import CpuCascade
from learner.attention.prefix_tree import build_tree
from learner.attention.rectangles import RectanglePieces
from learner.checkpoint.pretrained import PretrainedTensors
from learner.fsdp2.model import attention
from learner.fsdp2.model.rows import Rows, lay_out_padded, lay_out_rows
from learner.fsdp2.model.stored_weights import StoredWeights
from learner.numerics.products import bind_linear_layers

log = logging.getLogger(__name__)

PROBE_LENGTHS = (5, 3, 7)
_HEAD_SIZES = ("head_dim", "qk_head_dim", "v_head_dim", "global_head_dim")
"""Names of configurations for the size of a head, of queries and of values."""
PROBE_TOLERANCE = 1e-4
"""Of the largest logit; float32 noise is below 1e-5 of it, another mask or a forgotten cap far above."""


@dataclass(frozen=True)
class Ways:
    """Form in which rows go through a model.

    Attributes:
        is_packed: Packed tokens [1, N]; else padded rows [R, L].
        is_plain_head: The logits are hidden states times the output embedding, and nothing else.
        head_sizes: Sizes of the heads of attention, of queries and of values.
        no_tree: Why rows that share a beginning cannot go as their prefix tree; empty if they can.
    """

    is_packed: bool
    is_plain_head: bool
    head_sizes: frozenset[int]
    no_tree: str = ""


def load_model(folder: Path, *, with_output: bool = True) -> tuple[PreTrainedModel, StoredWeights]:
    """Return the model of `folder`, in evaluation mode (no dropout) and without weights, and its weights.

    Args:
        folder: A Hugging Face model folder.
        with_output: Whether the output embedding is wanted; a critic's folder has none.

    Raises:
        ConfigError: There is no such model, transformers does not know it, or its files hold other
            tensors than transformers' module has.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder / 'config.json'} does not exist", hint="model.path must be a Hugging Face model folder"
        )
    try:
        config = AutoConfig.from_pretrained(folder)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{folder}: {error}", hint="fsdp2 runs what AutoModelForCausalLM of transformers can build"
        ) from error
    model.tie_weights()
    model.eval()
    bind_linear_layers(model)
    return model, StoredWeights(model, PretrainedTensors(folder), model if with_output else model.base_model)


def find_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the blocks of the model that are gathered one at a time, first to last."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


@torch.no_grad()
def choose_ways(model: PreTrainedModel, weights: StoredWeights) -> Ways:
    """Run three short rows through the model in every way and return the fastest that is right."""
    with weights.lent(find_layers(model)):
        return _choose_ways(model)


def _choose_ways(model: PreTrainedModel) -> Ways:
    model.set_attn_implementation("eager")  # the formula: torch's own kernel leaves caps of logits out
    generator = torch.Generator().manual_seed(0)
    num_entries = model.get_input_embeddings().weight.shape[0]
    tokens_N = torch.randint(0, num_entries, (sum(PROBE_LENGTHS),), generator=generator)
    *_, last = parts = tokens_N.split(PROBE_LENGTHS)
    last[: PROBE_LENGTHS[0]] = parts[0]  # rows that share a beginning
    alone_NV = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in parts])
    alone_NH = torch.cat([_hidden(model, input_ids=part[None])[0] for part in parts])
    head = model.get_output_embeddings()
    plain_NV = alone_NH @ head.weight.T if head is not None else torch.zeros(())
    is_packed, is_plain_head = _try_packed(model, tokens_N, alone_NH), _is_close(plain_NV, alone_NV)
    no_tree = _find_problem(model, tokens_N, alone_NH) if is_packed else "the model cannot run packed rows"
    ways = Ways(is_packed, is_plain_head, _head_sizes(model), no_tree)
    if not ways.is_packed:
        log.warning("%s cannot run packed rows: they are padded to the longest", type(model).__name__)
        found_NH = run_body(model, tokens_N, _probe_rows(ways.is_packed), is_packed=False)
        if not _is_close(found_NH, alone_NH):
            raise ConfigError(
                f"{type(model).__name__} gives a row other values beside padding: is it causal?"
            )
    if not ways.is_plain_head:
        log.warning("%s has a head of its own: full logits are made", type(model).__name__)
    return ways


def run_body(model: PreTrainedModel, tokens_N: torch.Tensor, rows: Rows, *, is_packed: bool) -> torch.Tensor:
    """Return the hidden states [N, H] that enter the head."""
    return _run(_hidden, model, tokens_N, rows, is_packed)


def run_logits(
    model: PreTrainedModel, tokens_N: torch.Tensor, rows: Rows, *, is_packed: bool
) -> torch.Tensor:
    """Return the model's own logits [N, V]."""
    return _run(_logits, model, tokens_N, rows, is_packed)


def _run(
    part: Callable[..., torch.Tensor],
    model: PreTrainedModel,
    tokens_N: torch.Tensor,
    rows: Rows,
    is_packed: bool,
) -> torch.Tensor:
    if is_packed:
        positions = rows.positions_N[None]
        return part(model, input_ids=tokens_N[None], position_ids=positions, **{attention.NAME: rows})[0]
    layout = rows.attention
    assert isinstance(layout, RectanglePieces), "padded rows are one rectangle"
    padded = part(model, input_ids=layout.pad(tokens_N).view(layout.rectangles[0].num_lines, -1))
    return layout.unpad(padded.flatten(0, 1))


def _hidden(model: PreTrainedModel, **inputs: object) -> torch.Tensor:
    hidden: torch.Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


def _logits(model: PreTrainedModel, **inputs: object) -> torch.Tensor:
    logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits


def _try_packed(model: PreTrainedModel, tokens_N: torch.Tensor, wanted_NH: torch.Tensor) -> bool:
    before = model.config._attn_implementation
    attention.register()
    try:
        model.set_attn_implementation(attention.NAME)
        if _is_close(run_body(model, tokens_N, _probe_rows(True), is_packed=True), wanted_NH):
            return True
        reason = "other values"
    except (NotImplementedError, TypeError, ValueError) as error:
        reason = str(error)
    log.info("packed rows in %s: %s", type(model).__name__, reason)
    model.set_attn_implementation(before)
    return False


def _find_problem(model: PreTrainedModel, tokens_N: torch.Tensor, wanted_NH: torch.Tensor) -> str:
    """Return why the rows of the probe cannot go as their tree."""
    tree = build_tree(tokens_N, _probe_ends(), [0] * len(PROBE_LENGTHS), min_saved=1)
    tokens_M = tokens_N.new_empty(tree.num_tokens)
    tokens_M[tree.tree_from_N] = tokens_N
    rows = Rows(tree.positions_M, CpuCascade.of(tree))
    try:
        found_MH = run_body(model, tokens_M, rows, is_packed=True)
    except NotImplementedError as error:
        return str(error)
    is_right = tree.is_shared and _is_close(found_MH[tree.tree_from_N], wanted_NH)
    return "" if is_right else "it gives other values for a prefix tree"


def _probe_rows(is_packed: bool) -> Rows:
    return (lay_out_rows if is_packed else lay_out_padded)(_probe_ends(), torch.device("cpu"))


def _probe_ends() -> list[int]:
    return [0, *itertools.accumulate(PROBE_LENGTHS)]


def _head_sizes(model: PreTrainedModel) -> frozenset[int]:
    config = model.config.get_text_config()
    named = (getattr(config, name, None) for name in _HEAD_SIZES)
    return frozenset(filter(None, named)) or frozenset([config.hidden_size // config.num_attention_heads])


def _is_close(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    if ours.shape != wanted.shape:
        return False
    return bool((ours - wanted).abs().max() <= PROBE_TOLERANCE * wanted.abs().max())
