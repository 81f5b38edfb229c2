"""Parts that a learner rank publishes, as rectangles: in the tensor's own dimensions, each once."""

from __future__ import annotations

import pytest
import torch

from asyncrl.core.errors import SyncError
from weight_sync.memory.parts import Part
from weight_sync.rectangles.packs import Pack, Parameters, place_parts
from weight_sync.rectangles.parcels import Parcel
from weight_sync.rectangles.rectangle import Rectangle


def pack_of(tensor: str, rectangle: Rectangle) -> Pack:
    num_bytes = 4 * rectangle.num_elements
    return Pack(0, (0,), (Parcel(tensor, rectangle, num_bytes, 0, (0,)),), (0,), num_bytes)


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [((6,), (2, 5), (0, 1)), ((6, 4), (1, 3), (2, 4)), ((4, 3, 2), (1, 3), (0, 6)), ((), (0, 1), (0, 1))],
)
def test_a_part_is_a_rectangle_in_the_dimensions_of_its_tensor(
    shape: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    full = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)
    full_RC = full.reshape(shape[0], -1) if shape else full.reshape(1, 1)
    part = Part("w", shape, rows[0], columns[0], full_RC[slice(*rows), slice(*columns)])
    (placement,), holders = place_parts([part])
    pack = pack_of("w", placement.rectangle)
    data_B = torch.zeros(pack.num_bytes, dtype=torch.uint8)
    Parameters([placement], holders, {"w": torch.float32}).read(pack, data_B)
    wanted = full[placement.rectangle.slices]
    assert torch.equal(data_B.view(torch.float32), wanted.reshape(-1))
    assert wanted.numel() == part.values_RC.numel()


def test_what_is_held_twice_is_placed_once_and_no_rows_are_nothing() -> None:
    values_RC = torch.zeros(3, 4)
    parts = [
        Part("w", (6, 4), row, 0, values)
        for row, values in ((0, values_RC), (0, values_RC), (3, values_RC[:0]))
    ]
    placements, holders = place_parts(parts)
    assert [placement.rectangle for placement in placements] == [Rectangle((0, 0), (3, 4))]
    assert len(holders) == 1


def test_a_column_cut_of_stacked_matrices_is_refused() -> None:
    with pytest.raises(SyncError, match=r"columns 0 to 3 of 'experts' \(4, 3, 2\)"):
        place_parts([Part("experts", (4, 3, 2), 0, 0, torch.zeros(4, 3))])


def test_a_parcel_that_the_parameters_do_not_have_all_of_is_refused() -> None:
    placements, holders = place_parts([Part("w", (6, 4), 0, 0, torch.zeros(3, 4))])
    parameters = Parameters(placements, holders, {"w": torch.float32})
    pack = pack_of("w", Rectangle((2, 0), (4, 4)))
    with pytest.raises(SyncError, match=r"do not have all of .* of 'w'"):
        parameters.read(pack, torch.zeros(pack.num_bytes, dtype=torch.uint8))
