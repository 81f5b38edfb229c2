"""Dimensions of well-known models by their hub names, and the tensors that dimensions make (pure).

Each record holds what the model's own `config.json` says of its shape; a test holds the weights that
`count_weights` counts of it against those of the published files. Invariant: a name that is not in the table
has no dimensions here; no other name is taken for it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping

from asyncrl.models.architectures import (
    FAMILIES,
    ExpertNames,
    Family,
    ModelSize,
    find_unsupported,
    is_tied,
)

Table = Mapping[str, object]
VARIANTS = ("-Base", "-Instruct")
"""Endings of names of the same dimensions, which know another number of positions."""
POSITIONS = "max_position_embeddings"
_COLUMNS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings", POSITIONS),
)
_ROWS: Mapping[str, tuple[str, tuple[int | bool, ...]]] = {
    "Qwen/Qwen3-0.6B": ("qwen3", (28, 1024, 16, 8, 128, 3072, 151936, True, 40960)),
    "Qwen/Qwen3-1.7B": ("qwen3", (28, 2048, 16, 8, 128, 6144, 151936, True, 40960)),
    "Qwen/Qwen3-4B": ("qwen3", (36, 2560, 32, 8, 128, 9728, 151936, True, 40960)),
    "Qwen/Qwen3-8B": ("qwen3", (36, 4096, 32, 8, 128, 12288, 151936, False, 40960)),
    "Qwen/Qwen3-14B": ("qwen3", (40, 5120, 40, 8, 128, 17408, 151936, False, 40960)),
    "Qwen/Qwen3-32B": ("qwen3", (64, 5120, 64, 8, 128, 25600, 151936, False, 40960)),
    "Qwen/Qwen2.5-0.5B": ("qwen2", (24, 896, 14, 2, 64, 4864, 151936, True, 32768)),
    "Qwen/Qwen2.5-1.5B": ("qwen2", (28, 1536, 12, 2, 128, 8960, 151936, True, 131072)),
    "Qwen/Qwen2.5-3B": ("qwen2", (36, 2048, 16, 2, 128, 11008, 151936, True, 32768)),
    "Qwen/Qwen2.5-7B": ("qwen2", (28, 3584, 28, 4, 128, 18944, 152064, False, 131072)),
    "meta-llama/Llama-3.2-1B": ("llama", (16, 2048, 32, 8, 64, 8192, 128256, True, 131072)),
    "meta-llama/Llama-3.2-3B": ("llama", (28, 3072, 24, 8, 128, 8192, 128256, True, 131072)),
    "meta-llama/Llama-3.1-8B": ("llama", (32, 4096, 32, 8, 128, 14336, 128256, False, 131072)),
}
NAMED_MODELS: Mapping[str, Table] = {
    name: {"model_type": kind, **dict(zip(_COLUMNS, row, strict=True))} for name, (kind, row) in _ROWS.items()
}
"""Records like a `config.json`, by hub name."""


def find_table(path: str) -> Table | None:
    """Return the dimensions of the model that `path` names, `owner/name` or `owner/name@revision`, if known.

    >>> find_table("Qwen/Qwen3-8B@main")["hidden_size"], find_table("Qwen/Qwen3-9B")
    (4096, None)
    """
    name = path.partition("@")[0]
    if name in NAMED_MODELS:
        return NAMED_MODELS[name]
    for ending in VARIANTS:
        plain = name.removesuffix(ending)
        if plain != name and plain in NAMED_MODELS:
            return {key: value for key, value in NAMED_MODELS[plain].items() if key != POSITIONS}
    return None


def count_weights(table: Table, without: Container[str] = ()) -> int:
    """Return the number of weights of a supported model, norms and biases too; 0 of any other.

    Args:
        without: Names of tensors that do not count.
    """
    matrices = [shape for name, shape in tensor_shapes(table, has_head=True) if name not in without]
    return sum(map(math.prod, matrices)) + sum(_vectors(table)) if matrices else 0


def tensor_shapes(table: Mapping[str, object], has_head: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of the matrices that a supported model has for certain; nothing of any other.

    Args:
        has_head: Whether a model whose embedding is not tied has an output projection.
    """
    try:
        size = ModelSize.read(table)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return
    if any(find_unsupported(table)):
        return
    vocabulary = (size.vocab_size, size.hidden_size)
    family = FAMILIES[str(table["model_type"])]
    yield "model.embed_tokens.weight", vocabulary
    if has_head and not is_tied(table):
        yield "lm_head.weight", vocabulary
    for index in range(size.num_layers):
        for name, shape in (*_attention_shapes(size, family), *_mlp_shapes(size, family, index)):
            yield f"model.layers.{index}.{name}.weight", shape


def _attention_shapes(size: ModelSize, family: Family) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name within the layer, shape) of the matrices of a layer's attention."""
    hidden, queries = size.hidden_size, size.num_heads * size.head_size
    keys = size.num_key_value_heads * size.head_size
    parts = {"qkv": queries + 2 * keys} if family.is_fused else {"q": queries, "k": keys, "v": keys}
    yield from ((f"self_attn.{part}_proj", (rows, hidden)) for part, rows in parts.items())
    yield "self_attn.o_proj", (hidden, queries)


def _mlp_shapes(size: ModelSize, family: Family, layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name within the layer, shape) of the matrices behind a layer's attention."""
    experts, hidden, names = size.experts, size.hidden_size, ExpertNames()
    blocks, channels = ["mlp"], size.intermediate_size
    if experts is not None and family.experts is not None and experts.layers[layer]:
        names, channels = family.experts, experts.size
        yield f"{names.block}.gate", (experts.num, hidden)
        blocks = [f"{names.block}.experts.{number}" for number in range(experts.num)]
    if family.is_fused:
        yield "mlp.gate_up_proj", (2 * channels, hidden)
        yield "mlp.down_proj", (hidden, channels)
        return
    for block in blocks:
        yield f"{block}.{names.gate}", (channels, hidden)
        yield f"{block}.{names.up}", (channels, hidden)
        yield f"{block}.{names.down}", (hidden, channels)


def _vectors(table: Table) -> Iterator[int]:
    """Yield the lengths of norms and biases."""
    size = ModelSize.read(table)
    yield size.hidden_size
    queries, keys = (num * size.head_size for num in (size.num_heads, size.num_key_value_heads))
    family = FAMILIES[str(table["model_type"])]
    biases = queries + 2 * keys if family.has_qkv_bias else 0
    norm_sizes = queries + keys if family.is_qk_norm_wide else 2 * size.head_size
    norms = norm_sizes if family.has_qk_norm else 0
    yield size.num_layers * (2 * size.hidden_size + biases + norms)
