"""Made-up weights with the names and shapes of a decoder, and plain copies of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

HIDDEN_SIZE = 512
EMBEDDING_SHARE = 6
DTYPE = torch.bfloat16

NamedTensors = list[tuple[str, torch.Tensor]]


def make_weights(num_bytes: int, seed: int = 0) -> NamedTensors:
    """Return about `num_bytes` of random bfloat16 weights: an embedding, then layers until it is full.

    A sixth of them is one tensor; a layer has seven matrices of 0.1 to 1.6 MB and two norms of 1 KB.
    """
    generator = torch.Generator().manual_seed(seed)
    weights, left = [], num_bytes
    for name, shape in _shapes(num_bytes // EMBEDDING_SHARE // (2 * HIDDEN_SIZE)):
        if left <= 0:
            break
        tensor = torch.randint(0, 256, (2 * shape.numel(),), generator=generator, dtype=torch.uint8)
        weights.append((name, tensor.view(DTYPE).reshape(shape)))
        left -= tensor.numel()
    return weights


def _shapes(vocab_size: int) -> Iterator[tuple[str, torch.Size]]:
    hidden, kv, inner = HIDDEN_SIZE, HIDDEN_SIZE // 4, 3 * HIDDEN_SIZE
    yield "model.embed_tokens.weight", torch.Size((vocab_size, hidden))
    matrices = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layer = 0
    while True:
        for name, sizes in matrices.items():
            yield f"model.layers.{layer}.{name}.weight", torch.Size(sizes)
        layer += 1


def read_weights(folder: Path) -> NamedTensors:
    """Return the tensors of the checkpoint `model.safetensors` in `folder`."""
    return list(load_file(folder / "model.safetensors").items())


def count_bytes(weights: NamedTensors) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.numel() * tensor.itemsize for _, tensor in weights)


def flatten(weights: NamedTensors) -> torch.Tensor:
    """Return the bytes of all tensors, one after another."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in weights])


def cut(bytes_B: torch.Tensor, bucket_bytes: int) -> list[torch.Tensor]:
    """Return slices of `bucket_bytes`, the last one shorter."""
    return list(bytes_B.split(bucket_bytes))
