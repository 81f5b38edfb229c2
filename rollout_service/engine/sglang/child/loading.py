"""A swap inside SGLang's scheduler: loads a staged version into its model, and probes it.

Names, shapes and dtypes must be those of the checkpoint that the engine was started from: SGLang itself takes
a version without a tensor for a good one, and ends at a wrong shape. All parameters are made NaN first, so
that one that got nothing, or a part, is found. Nothing is raised into SGLang: it would end the engine.
Invariant: the label moves only after a load that returned True; the caller keeps generation paused otherwise.

Shapes: R rows of L tokens each, T = R·L tokens, H or K heads, D head size, E hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype

from asyncrl.core.errors import SyncError
from asyncrl.core.runtime.faults import is_wanted
from rollout_service.engine.checkpoint import check_version, read_tensors
from rollout_service.engine.probe_check import ProbeCheck, Row, name_of
from rollout_service.engine.sglang.messages import LOAD_REQUEST, Load, read_request
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.staging import Staged, open_tensors

if TYPE_CHECKING:  # a `Decoder` is any of SGLang's models that has what this one has
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM as Decoder

log = logging.getLogger(__name__)
_probe_check = ProbeCheck()


def load_staged(
    _original: object, updater: WeightUpdater, *_args: object, **_options: object
) -> tuple[bool, str]:
    """Stand in for `WeightUpdater.update_weights_from_disk`.

    Returns:
        Whether it is loaded; why not, or the probe's gap in JSON.
    """
    try:
        _receive(updater, read_request(Path(os.environ[LOAD_REQUEST])))
    except Exception as error:  # of any kind: see the module
        log.exception("a load failed")
        return False, f"{type(error).__name__}: {error}"
    return True, json.dumps(_probe_check.gap)


def _receive(updater: WeightUpdater, request: Load) -> None:
    manifest = Manifest.from_bytes(request.manifest)
    model, config = updater.get_model(), updater.model_config
    _check(manifest, model, config)
    tensors = list(open_tensors(Staged(manifest.version, request.path, manifest)))
    _overwrite(model, config, torch.device(updater.device), _with_faults(manifest.version.number, tensors))
    if manifest.probe is not None:
        measure = partial(measure_logprobs, model, config.vocab_size)
        _probe_check.check(measure, name_of(config.dtype), manifest.probe, manifest.version.step)


def _check(manifest: Manifest, model: Decoder, config: ModelConfig) -> None:
    """Compare with the checkpoint. A parameter of several modules is sent once, by its first name."""
    expected = read_tensors(Path(config.model_path))
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            expected.pop(name, None)  # some checkpoints hold a copy
    check_version(manifest, expected, name_of(config.dtype))


def _overwrite(
    model: Decoder, config: ModelConfig, device: torch.device, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    with torch.no_grad(), set_default_torch_dtype(config.dtype):
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        DefaultModelLoader.restore_weights_before_loading(model, device)
        DefaultModelLoader.load_weights_and_postprocess(model, tensors, device)
        empty = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    if empty:
        raise SyncError(f"the version brought nothing for the engine's parameters {empty[:5]}, or NaN")


def _with_faults(number: int, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors; a test may have the load of version `number` fail at one of them."""
    for index, tensor in enumerate(tensors):
        if is_wanted("engine.load", number, index):
            raise SyncError(f"the load of version {number} was told to fail at tensor {index}")
        yield tensor


@torch.inference_mode()
def measure_logprobs(
    model: Decoder, vocab_size: int, rows: Sequence[Row], temperature: float
) -> torch.Tensor:
    """Return the log-prob of each token after its row's first, float32 [R, L - 1].

    Computed outside of the scheduler: no request and no block of the KV cache may be touched, so attention
    over a row is plain PyTorch. Raises SyncError for a model with other attention.
    """
    tokens_RL = torch.tensor(rows, device=next(model.parameters()).device)
    positions_RL = torch.arange(tokens_RL.shape[1], device=tokens_RL.device).expand_as(tokens_RL)
    none = tokens_RL.new_empty(0)  # attention alone reads what stands for requests and their cache
    ids_T, size = tokens_RL.flatten(), len(rows)
    batch = ForwardBatch(ForwardMode.EXTEND, size, ids_T, none, none, none, ids_T.numel())
    with _plain_attention(model, tokens_RL.shape[1]):
        hidden_TE = model.model(ids_T, positions_RL.flatten(), batch)
    logits_TV = (hidden_TE @ model.lm_head.weight.T)[:, :vocab_size].float()
    logprobs_TV = (logits_TV / temperature).log_softmax(-1)
    logprobs_RLV = logprobs_TV.view(*tokens_RL.shape, -1)[:, :-1]
    found_RL: torch.Tensor = logprobs_RLV.gather(2, tokens_RL[:, 1:, None])[..., 0]
    return found_RL


@contextmanager
def _plain_attention(model: Decoder, row_tokens: int) -> Iterator[None]:
    """Within the block attention layers see rows of `row_tokens` alone, and write no KV cache.

    Raises:
        SyncError: A layer has what plain attention has not. A row is shorter than any sliding window.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, RadixAttention)]
    odd = [layer.layer_id for layer in layers if layer.logit_cap or layer.is_cross_attention]
    if odd or not layers or getattr(model.config, "final_logit_softcapping", None):
        raise SyncError(
            f"the probe cannot run the attention of layers {odd[:5]}", hint="Set weight_sync.probe_every: 0"
        )
    try:
        for layer in layers:
            layer.forward = partial(_attend, layer, row_tokens)
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own method shows again


def _attend(
    layer: RadixAttention,
    row_tokens: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_args: object,
    **_options: object,
) -> torch.Tensor:
    query_RHLD, key_RKLD, value_RKLD = (
        packed.view(-1, row_tokens, packed.numel() // packed.shape[0] // layer.head_dim, layer.head_dim)
        .transpose(1, 2)
        for packed in (query, key, value)
    )  # fmt: skip
    attended_RHLD = torch.nn.functional.scaled_dot_product_attention(
        query_RHLD, key_RKLD, value_RKLD, is_causal=True, scale=layer.scaling, enable_gqa=True
    )
    return attended_RHLD.transpose(1, 2).reshape(query.shape[0], -1)
