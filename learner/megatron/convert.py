"""Hugging Face checkpoints to Megatron-core parameters and back.

Owns the two name maps and the layout of fused weights. It must never hold more than one layer's
tensors besides the model. Invariant: export of an imported model is bit-identical. Names are global:
layers are counted over all pipeline stages.

A fused weight is cut for tensor parallelism part by part: rank r of fc1 holds its share of `gate`,
then its share of `up`; qkv interleaves by key/value group: q of the group, its k, its v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from asyncrl.models.architectures import Family
from learner.lora.factors import CHILD
from learner.megatron.groups import RankGroups
from learner.megatron.model import experts
from weight_sync.encoding.low_rank import A, B

_LAYER_PREFIX = "decoder.layers."
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")
_FUSED = "linear_fc1.weight"
_GATE_UP = f"mlp.{_FUSED}"
_DIRECT_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # of TransformerEngine
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",  # of TransformerEngine
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_DIRECT = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "value_head.weight": "score.weight",
}
_FUSED_NAMES = {
    "self_attention.linear_qkv.weight": "self_attn.qkv_proj.weight",
    "mlp.linear_fc1.weight": "mlp.gate_up_proj.weight",
}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_CUT_DIMENSION = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
    **dict.fromkeys((f"{part}_proj{B}" for part in ("q", "k", "v", "gate", "up")), 0),  # of adapters
    **dict.fromkeys((f"{part}_proj{A}" for part in ("o", "down")), 1),
}

ReadTensor = Callable[[str], torch.Tensor]


@torch.no_grad()
def load_parameters(
    model: torch.nn.Module, config: TransformerConfig, read: ReadTensor, group: dist.ProcessGroup
) -> None:
    """Fill `model` with this rank's part of the Hugging Face tensors that `read(name)` returns.

    Of a tensor that is mapped only that part is read.
    """
    for name, _, parameter in global_names(model):
        if name in VOCABULARY:
            start = group.rank() * len(parameter)
            part = _pad_rows(read(_DIRECT[name])[start : start + len(parameter)], len(parameter))
        else:
            part = _read_part(name, config, read, experts.tensor_group(name, group))
        assert part.shape == parameter.shape, (
            f"{name}: {tuple(part.shape)} does not fit {tuple(parameter.shape)}"
        )
        parameter.copy_(part)


def global_names(chunk: torch.nn.Module) -> Iterator[tuple[str, bool, torch.nn.Parameter]]:
    """Yield (name with the layer counted over all pipeline stages, is a copy, parameter).

    The output projection of a tied model on the last of several stages is a copy of the first's embedding.
    """
    is_tied = getattr(chunk, "share_embeddings_and_output_weights", False)
    for name, parameter in chunk.named_parameters():
        if name.startswith(_LAYER_PREFIX):
            index, _, inner = name.removeprefix(_LAYER_PREFIX).partition(".")
            layer = chunk.get_submodule(f"{_LAYER_PREFIX}{index}")
            number = vars(layer)["layer_number"]  # from 1
            yield f"{_LAYER_PREFIX}{number - 1}.{experts.global_name(inner, layer)}", False, parameter
        elif name == "output_layer.weight" and is_tied:
            yield VOCABULARY[0], True, parameter
        else:
            yield name, False, parameter


def trained_names(chunk: torch.nn.Module) -> Iterator[tuple[str, bool, torch.nn.Parameter]]:
    """Yield as `global_names` what versions and checkpoints hold: of a model with adapters those alone."""
    named = list(global_names(chunk))
    adapters = [one for one in named if f".{CHILD}." in one[0]]
    yield from adapters or named


@torch.no_grad()
def export_chunk(
    chunk: torch.nn.Module, config: TransformerConfig, vocab_size: int, group: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, full tensor) one at a time, on every rank of `group` in the same order.

    Each step is a collective over `group`, or over the ranks that share experts. With one rank a tensor may
    be a view of a live parameter: it is valid until the next update. Copies of tied weights are left out.
    """
    for name, is_copy, parameter in trained_names(chunk):
        if is_copy:
            continue
        full = _gather(name, parameter.detach(), experts.tensor_group(name, group))
        if name in VOCABULARY:
            full = full[:vocab_size]
        for one, tensor in experts.gather_experts(name, full, config):
            yield from to_hugging_face(one, tensor, config)


def export_shapes(
    chunk: torch.nn.Module, config: TransformerConfig, vocab_size: int, group: dist.ProcessGroup
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (Hugging Face name, shape) of what `export_chunk` yields; no collective."""
    for name, is_copy, parameter in trained_names(chunk):
        if is_copy:
            continue
        shape = list(parameter.shape)
        dimension = cut_dimension(name)
        if dimension is not None:
            shape[dimension] *= experts.tensor_group(name, group).size()
        if name in VOCABULARY:
            shape[0] = vocab_size
        for one in experts.names_of_place(name, config):
            for hugging_face, tensor in to_hugging_face(one, torch.empty(shape, device="meta"), config):
                yield hugging_face, tuple(tensor.shape)


class WholeTensors:
    """The Hugging Face tensors of the whole model, of which every rank has its share in `chunks`."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: TransformerConfig,
        vocab_size: int,
        groups: RankGroups,
        dtype: torch.dtype,
    ) -> None:
        self._chunks, self._config, self._vocab_size = chunks, config, vocab_size
        self._groups, self._dtype = groups, dtype

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors of the model, stage by stage. Collective over all ranks that share a copy."""
        num_stages = self._groups.pp.size()
        for chunk in self._chunks:
            for stage in range(num_stages):
                mine = export_chunk(chunk, self._config, self._vocab_size, self._groups.tp)
                yield from mine if num_stages == 1 else self._share(chunk, stage, mine)

    def _share(
        self, chunk: torch.nn.Module, stage: int, mine: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a stage's `chunk` on all stages."""
        groups = self._groups
        is_owner = groups.pp.rank() == stage
        shapes = export_shapes(chunk, self._config, self._vocab_size, groups.tp)
        table = groups.share_table_from(stage, list(shapes) if is_owner else None)
        assert isinstance(table, list)
        for name, shape in table:
            tensor = (
                next(mine)[1] if is_owner else torch.empty(shape, dtype=self._dtype, device=groups.device)
            )
            yield name, groups.share_from(stage, tensor.contiguous())


def merge(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the full parameter `name` from the parts of all ranks."""
    dimension = cut_dimension(name)
    if dimension is None or len(parts) == 1:
        return parts[0]
    if name.endswith(_FUSED):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(parts, dimension)


def fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return the rows of q, k and v, interleaved by key/value group."""
    by_group = [x.reshape(num_groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(by_group, 1).reshape(-1, *q.shape[1:])


def split_qkv(fused: torch.Tensor, config: TransformerConfig) -> tuple[torch.Tensor, ...]:
    """Return q, k and v: the inverse of `fuse_qkv`."""
    num_groups, head_size = config.num_query_groups, config.kv_channels
    assert num_groups is not None
    assert head_size is not None
    num_query_rows = config.num_attention_heads // num_groups * head_size
    by_group = fused.reshape(num_groups, num_query_rows + 2 * head_size, *fused.shape[1:])
    parts = by_group.split([num_query_rows, head_size, head_size], dim=1)
    return tuple(part.reshape(-1, *fused.shape[1:]) for part in parts)


def cut_dimension(name: str) -> int | None:
    """Return the dimension along which `name` is cut over tensor-parallel ranks; None if it is not."""
    return next((dimension for end, dimension in _CUT_DIMENSION.items() if name.endswith(end)), None)


def _pad_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(num_rows - x.shape[0], *x.shape[1:])])


def _gather(name: str, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() == 1 or cut_dimension(name) is None:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return merge(name, parts)


def _split_layer(name: str) -> tuple[str, str]:
    """Return (Hugging Face layer prefix, name within the layer)."""
    index, _, inner = name.removeprefix(_LAYER_PREFIX).partition(".")
    return f"model.layers.{index}.", inner


def _read_part(
    name: str, config: TransformerConfig, read: ReadTensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return this rank's part of the parameter `name`, which has no padding."""
    rank, size = group.rank(), group.size()
    if not name.startswith(_LAYER_PREFIX):
        return read(_DIRECT[name])
    prefix, inner = _split_layer(name)
    if inner in _QKV:
        kind = inner.rpartition(".")[2]
        if (fused := fused_name(name, config)) is not None:
            whole = _split_rows(read(fused), config)
        else:
            whole = [read(f"{prefix}self_attn.{part}_proj.{kind}") for part in "qkv"]
        q, k, v = (part.chunk(size)[rank] for part in whole)
        assert config.num_query_groups is not None
        return fuse_qkv(q, k, v, config.num_query_groups // size)
    if inner == _GATE_UP:
        if (fused := fused_name(name, config)) is not None:
            whole = list(read(fused).chunk(2))
        else:
            whole = [read(f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up")]
        return torch.cat([part.chunk(size)[rank] for part in whole])
    dimension = cut_dimension(name)
    names = experts.checkpoint_names(inner, config) or (_name_in_layer(inner),)
    whole = [read(prefix + one) for one in names]
    parts = [full if dimension is None else full.chunk(size, dimension)[rank] for full in whole]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def fused_name(name: str, config: TransformerConfig) -> str | None:
    """Return the one Hugging Face tensor of the fused parameter `name`, None where it has several."""
    prefix, inner = _split_layer(name)
    is_fused = isinstance(family := getattr(config, "family", None), Family) and family.is_fused
    return prefix + _FUSED_NAMES[inner] if is_fused and inner in _FUSED_NAMES else None


def _split_rows(fused: torch.Tensor, config: TransformerConfig) -> list[torch.Tensor]:
    """Return q, k and v of a tensor that has one above the other."""
    head_size, num_groups = config.kv_channels, config.num_query_groups
    assert head_size is not None
    assert num_groups is not None
    heads = (config.num_attention_heads, num_groups, num_groups)
    return list(fused.split([num * head_size for num in heads]))


def to_hugging_face(
    name: str, full: torch.Tensor, config: TransformerConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the Hugging Face tensors that the full parameter `name` is made of."""
    if (fused := fused_name(name, config)) is not None:
        yield fused, torch.cat([part for _, part in parts_of(name, full, config)])
    else:
        yield from parts_of(name, full, config)


def parts_of(name: str, full: torch.Tensor, config: TransformerConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield as `to_hugging_face`, a fused one by its parts, in the order of its rows."""
    if not name.startswith(_LAYER_PREFIX):
        yield _DIRECT[name], full
        return
    prefix, inner = _split_layer(name)
    if inner in _QKV:
        kind = inner.rpartition(".")[2]
        for part, tensor in zip("qkv", split_qkv(full, config), strict=True):
            yield f"{prefix}self_attn.{part}_proj.{kind}", tensor
    elif inner == _GATE_UP:
        gate, up = full.chunk(2)
        yield f"{prefix}mlp.gate_proj.weight", gate
        yield f"{prefix}mlp.up_proj.weight", up
    elif names := experts.checkpoint_names(inner, config):
        yield from zip((prefix + one for one in names), full.chunk(len(names)), strict=True)
    else:
        yield prefix + _name_in_layer(inner), full


def _name_in_layer(inner: str) -> str:
    """Return the Hugging Face name of a parameter that is one tensor there, without the layer."""
    matrix, is_adapter, factor = inner.partition(f".{CHILD}.")
    if not is_adapter:
        return _DIRECT_IN_LAYER[inner]
    return f"{'mlp' if matrix.startswith('mlp.') else 'self_attn'}.{factor}"
