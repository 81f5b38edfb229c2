"""Placements of what a learner rank publishes: its parts, as the plan of parcels and packs see them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from asyncrl.core.errors import SyncError
from weight_sync.memory.parts import Part
from weight_sync.rectangles.rectangle import Placement, Rectangle


def place_parts(parts: Iterable[Part]) -> tuple[list[Placement], dict[str, torch.Tensor]]:
    """Return the placements of `parts` and their values by holder; a rectangle held twice is placed once.

    Raises:
        SyncError: A part of a tensor of three dimensions or more is no rectangle of it.
    """
    placements: dict[tuple[str, Rectangle], Placement] = {}
    holders: dict[str, torch.Tensor] = {}
    for part in parts:
        rectangle = _rectangle_of(part)
        if rectangle.num_elements == 0 or (part.name, rectangle) in placements:
            continue
        holder = f"{part.name}[{part.row}:, {part.column}:]"
        placements[part.name, rectangle] = Placement(part.name, rectangle, holder)
        holders[holder] = part.values_RC.reshape(rectangle.shape)
    return list(placements.values()), holders


def _rectangle_of(part: Part) -> Rectangle:
    """Return the part's elements in the tensor's own dimensions."""
    shape, (num_rows, num_columns) = part.shape, part.values_RC.shape
    rows = (part.row, part.row + num_rows)
    if len(shape) == 2:
        return Rectangle((rows[0], part.column), (rows[1], part.column + num_columns))
    whole = Rectangle.whole(shape[1:])
    if part.column or num_columns != whole.num_elements:
        raise SyncError(f"columns {part.column} to {part.column + num_columns} of '{part.name}' {shape}")
    return Rectangle((rows[0], *whole.start), (rows[1], *whole.stop)) if shape else Rectangle((), ())
