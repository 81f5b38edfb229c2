"""Choice of a membership's transport: NCCL if each member has a GPU to itself and room there, else gloo.

Each member tells its place, and all choose alike from the same places. A place is the id of a GPU behind
`GPU`, or in words why a member's packs lie in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import is_nccl_available

GPU = "GPU "
HOST = torch.device("cpu")


def describe_place(device: torch.device) -> str:
    """Return the place of a member whose packs are to lie on `device`."""
    if device.type != "cuda":
        return f"has its packs in memory of the {device.type}"
    if not is_nccl_available():
        return "has a torch without NCCL"
    return f"{GPU}{torch.cuda.get_device_properties(device).uuid}"


def find_refusal(places: Sequence[str]) -> str:
    """Return why the members of these places, by rank, cannot meet over NCCL; "" if they can."""
    found: dict[str, int] = {}
    for rank, place in enumerate(places):
        if not place.startswith(GPU):
            return f"member {rank} {place}"
        if place in found:
            return f"members {found[place]} and {rank} share a GPU, and NCCL takes one rank on each"
        found[place] = rank
    return ""
