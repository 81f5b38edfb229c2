"""Copies of tensors from the CPU to a rank's device, which the host does not wait for."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

_ALIGNMENT = 16
T = TypeVar("T")


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `values` on `device`, which the host does not wait for."""
    is_there = values.is_cuda or device.type == "cpu"
    return values if is_there else values.pin_memory().to(device, non_blocking=True)


def send_fields(values: T, device: torch.device) -> T:
    """Return a dataclass with its tensors on `device`; on the CPU, itself.

    They are sent by one copy from pinned memory, which the host does not wait for.
    """
    assert dataclasses.is_dataclass(values) and not isinstance(values, type)
    if device.type == "cpu":
        return values
    fields = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = slice(end, end + tensor.nbytes)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    pinned = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    for name, tensor in tensors.items():
        pinned[places[name]].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    sent = pinned.to(device, non_blocking=True)
    moved = {
        name: sent[places[name]].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()
    }
    return dataclasses.replace(values, **moved)
