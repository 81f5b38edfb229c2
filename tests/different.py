"""The tensors of a model as a checkpoint has them, and the claim that its versions are different ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash

Weights = torch.nn.Module | Mapping[str, torch.Tensor]


def digests_of(weights: Weights) -> dict[str, str]:
    """Return a digest of the bytes of each tensor, by name; of a module's parameters a shared one once."""
    tensors = dict(weights.named_parameters()) if isinstance(weights, torch.nn.Module) else weights
    return {
        name: xxhash.xxh3_128(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        ).hexdigest()
        for name, tensor in tensors.items()
    }


def assert_all_differ(versions: Iterable[Weights], *, in_every_tensor: bool = False) -> None:
    """Fail if two of `versions` hold the same weights, or with `in_every_tensor` one tensor in common.

    A test of several versions shows nothing where they are equal: a helper that seeds torch once made
    all of them so, and hid that an engine served older weights.
    """
    digests = [digests_of(version) for version in versions]
    assert len(digests) > 1, "one version differs from nothing"
    assert len({tuple(sorted(of_one.items())) for of_one in digests}) == len(digests), "equal versions"
    if in_every_tensor:
        for name in digests[0]:
            assert len({of_one[name] for of_one in digests}) == len(digests), f"versions share '{name}'"


def as_saved(tensors: Mapping[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """Return views of a model's tensors, or of their gradients, by the names of a checkpoint.

    The library stacks experts in memory, and names them one by one in a file.
    """
    is_mixtral = model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        full_name = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
        head, is_stacked, kind = full_name.partition(".experts.")
        if not is_stacked:
            found[full_name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = (
                {down: expert} if kind == "down_proj" else dict(zip((gate, up), expert.chunk(2), strict=True))
            )
            found |= {f"{head}.experts.{number}.{part}.weight": view for part, view in parts.items()}
    return found
