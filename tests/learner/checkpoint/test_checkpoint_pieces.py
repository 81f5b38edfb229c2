"""The geometry of the checkpoint format, and reading it."""

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from asyncrl.core.errors import CheckpointError
from learner.checkpoint.pieces import Piece, RowRun, pieces_of_range, whole
from learner.checkpoint.reader import StateReader
from learner.checkpoint.snapshot import KINDS, HostCopies, PieceState, Snapshot
from learner.checkpoint.store import digest_file
from learner.checkpoint.tensor_file import DTYPES, write_tensors

SHAPE = (12, 5)


@st.composite
def cut_matrices(draw):
    """Return interleaved runs of two parameters, a width, and the bounds of flat ranges."""
    heights = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    num_columns = draw(st.integers(1, 6))
    total = [sum(heights[0::2]), sum(heights[1::2])]
    runs, row, at = [], 0, [0, 0]
    for index, height in enumerate(heights):
        which = index % 2
        runs.append(RowRun(row, height, "ab"[which], (total[which], num_columns), at[which]))
        row, at[which] = row + height, at[which] + height
    num_padded_rows = draw(st.integers(0, 2))
    size = (row + num_padded_rows) * num_columns
    bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
    return runs, num_columns, bounds


@given(cut_matrices())
def test_the_pieces_of_all_ranges_cover_each_element_once_and_know_where_it_lies(case):
    runs, num_columns, bounds = case
    local = torch.arange(bounds[-1], dtype=torch.float32)
    full = {run.name: torch.full(run.shape, -1.0) for run in runs}
    for start, end in itertools.pairwise(bounds):
        for at, piece in pieces_of_range(runs, num_columns, start, end):
            place = full[piece.name][slice(*piece.rows), slice(*piece.columns)]
            assert (place == -1).all()
            place.copy_(local[start + at : start + at + piece.num_elements].view(place.shape))
    for run in runs:
        rows = local[run.local_row * num_columns :][: run.num_rows * num_columns]
        assert torch.equal(full[run.name][run.row : run.row + run.num_rows].reshape(-1), rows)


def write(folder, rank, world_size, pieces, values):
    states = tuple(
        PieceState(
            piece,
            {kind: values[slice(*piece.rows), slice(*piece.columns)].flatten().clone() for kind in KINDS},
            4.0,
        )
        for piece in pieces
    )
    Snapshot(rank, {"world_size": world_size}, states, {}, {"lr": 0.5}).write(folder)


@pytest.fixture
def values():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [(0, 12), (3, 8), (5, 6)])
@pytest.mark.parametrize("columns", [(0, 5), (1, 4)])
def test_any_rectangle_is_read_from_whatever_pieces_hold_it(tmp_path, values, rows, columns):
    write(tmp_path, 0, 2, [Piece("w", SHAPE, (0, 7), (0, 3))], values)
    write(tmp_path, 1, 2, [Piece("w", SHAPE, (0, 7), (3, 5)), Piece("w", SHAPE, (7, 12), (0, 5))], values)
    piece = Piece("w", SHAPE, rows, columns)
    with StateReader(tmp_path) as reader:
        into = torch.empty(piece.num_elements)
        reader.read(piece, "exp_avg", into)
        assert torch.equal(into.view(piece.num_rows, -1), values[slice(*rows), slice(*columns)])
        assert reader.step(piece) == 4.0
        assert reader.extra == {"lr": 0.5}
        assert torch.equal(reader.read_whole("w"), values)


def test_state_that_is_missing_or_of_another_model_is_refused_by_name(tmp_path, values):
    write(tmp_path, 0, 1, [Piece("w", SHAPE, (0, 11), (0, 5))], values)
    with StateReader(tmp_path) as reader:
        with pytest.raises(CheckpointError, match="lacks 5 values of w"):
            reader.read_whole("w")
        with pytest.raises(CheckpointError, match="has no such parameter"):
            reader.step(whole("v", (3,)))
        with pytest.raises(CheckpointError, match=r"has it as \(12, 5\)"):
            reader.step(whole("w", (12, 6)))


def test_a_folder_without_the_records_of_all_ranks_is_refused(tmp_path, values):
    with pytest.raises(CheckpointError, match="0 ranks"):
        StateReader(tmp_path)
    write(tmp_path, 0, 2, [whole("w", SHAPE)], values)
    with pytest.raises(CheckpointError, match="1 ranks"):
        StateReader(tmp_path)


def test_a_torn_tensor_file_or_record_is_an_error_of_ours(tmp_path, values):
    write(tmp_path, 0, 1, [whole("w", SHAPE)], values)
    path = tmp_path / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"), StateReader(tmp_path) as reader:
        reader.read_whole("w")
    (tmp_path / "rank-00000.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        StateReader(tmp_path)


def test_a_copy_on_the_host_stays_as_it_was_and_its_memory_is_used_again():
    copies, live, other = HostCopies(), torch.ones(3, 2), torch.full((2,), 3.0, dtype=torch.bfloat16)
    first = copies.take([live, torch.zeros(0), other])
    live.zero_()
    assert [one.tolist() for one in first] == [[1.0] * 6, [], [3.0] * 2]
    assert all(one.dtype == torch.float32 for one in first)
    second = copies.take([live, torch.zeros(0), other])
    assert second[0].data_ptr() == first[0].data_ptr()
    assert first[0].untyped_storage().nbytes() == 8 * 4, "one buffer holds all, and nothing else"
    assert [one.tolist() for one in second] == [[0.0] * 6, [], [3.0] * 2]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=3))))
def test_a_file_of_tensors_is_what_safetensors_reads_and_its_digest_is_the_file_s(made):
    tensors = {f"t{index}": torch.randint(0, 2, shape).to(dtype) for index, (dtype, shape) in enumerate(made)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        assert write_tensors(path, tensors, {"format": "pt"}) == digest_file(path)
        found = load_file(path)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
