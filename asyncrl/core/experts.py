"""Experts that each token was sent to in generation, and their column on the wire (pure).

A row holds the experts of one token that a model read, by layer. A token that was never read, or was found in
a prefix cache, has none: all of its row is `no_expert`. So is the part of a layer without experts.
Invariant: a row that is there is never replaced by another one.

Shapes: P prompt tokens, T and N response tokens of a trajectory and of the group, M tokens, L layers,
K experts chosen by each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.core import wire
from asyncrl.core.errors import WireError

if TYPE_CHECKING:
    import pyarrow

Rows: TypeAlias = npt.NDArray[np.unsignedinteger]
"""Experts [M, L, K], uint8 or uint16: in as few bytes as their number allows."""
ITEM_BYTES: Mapping[int, np.dtype[np.unsignedinteger]] = {1: np.dtype(np.uint8), 2: np.dtype("<u2")}
FIELD, MAX_SIZE = "experts", 1 << 16
"""Field of a group's header, see `Column.form`; no size in it is larger."""
MOST_PACKED = 0.95
"""Share of its bytes up to which a column is sent packed."""


def item_bytes(num_experts: int) -> int:
    """Return the bytes of one chosen expert; the largest number stands for none."""
    return 1 if num_experts <= no_expert(1) else 2


def no_expert(num_bytes: int) -> int:
    """Return the number that stands for no expert."""
    return int(np.iinfo(ITEM_BYTES[num_bytes]).max)


def no_rows(num_tokens: int, like: Rows) -> Rows:
    """Return rows of tokens that have none, of the form of `like`."""
    return np.full((num_tokens, *like.shape[1:]), no_expert(like.itemsize), like.dtype)


def has_row(rows: Rows) -> npt.NDArray[np.bool_]:
    """Tell of each token [M] whether it has a row."""
    told: npt.NDArray[np.bool_] = (rows != no_expert(rows.itemsize)).any(axis=(1, 2))
    return told


def extend(known: Rows | None, num_tokens: int, found: Rows | None) -> Rows | None:
    """Return rows of `num_tokens` tokens; None if there are neither `known` nor `found`.

    Args:
        known: Of the first ones. found: Of the last ones, which has those that `known` has not.
    """
    if found is None and known is None:
        return None
    like = found if found is not None else known
    assert like is not None
    rows = no_rows(num_tokens, like)
    if known is not None:
        rows[: len(known)] = known
    if found is not None and len(found):
        last = rows[-len(found) :]
        is_new = ~has_row(last)
        last[is_new] = found[is_new]
    return rows


def split(rows: Rows | None, num_last: int) -> tuple[Rows | None, Rows | None]:
    """Return the rows without those of the last tokens, and these."""
    return (None, None) if rows is None else (rows[: len(rows) - num_last], rows[len(rows) - num_last :])


def largest(rows: Rows) -> int:
    """Return the highest expert, -1 without any."""
    return int((rows + rows.dtype.type(1)).max(initial=0)) - 1  # that of none becomes 0


@dataclass(frozen=True)
class Column:
    """The rows of a group as they lie in its frame, not read yet.

    Attributes:
        form: Layers, experts chosen by each, bytes of one, and whether the frame is packed.
        num_tokens: Of the prompt and of all responses, in this order.
    """

    form: tuple[int, int, int, int]
    num_tokens: int
    frame: wire.Frame

    def check(self, num_layers: int, num_chosen: int, num_experts: int) -> None:
        """Raise WireError unless these are experts of such a model."""
        if self.form[:3] != (num_layers, num_chosen, item_bytes(num_experts)):
            raise WireError(f"experts of {self.form[:3]} (layers, of each, bytes) are not the model's")
        rows = self.read() if self.form[3] else _sum_steps(_sorted_steps(self.read()))
        if not _are_sets(rows):
            raise WireError("the experts of a token in a layer are not different ones, all or none of them")
        if (found := largest(rows)) >= num_experts:
            raise WireError(f"expert {found} was chosen of {num_experts}")

    def read(self) -> Rows:
        """Return the rows [M, L, K], read-only; of a packed frame sorted in each layer. Raises WireError."""
        num_layers, num_chosen, num_bytes, is_packed = self.form
        wanted = self.num_tokens * num_layers * num_chosen * num_bytes
        if wanted > wire.MAX_FRAME_BYTES:
            raise WireError(
                f"the array '{FIELD}' has {wanted} bytes, over the limit of {wire.MAX_FRAME_BYTES}"
            )
        frame = _unpack(self.frame, wanted) if is_packed else self.frame
        if len(frame) != wanted:
            raise WireError(f"the array '{FIELD}' has {len(frame)} bytes, wanted {wanted}")
        rows = np.frombuffer(frame, ITEM_BYTES[num_bytes]).reshape(-1, num_layers, num_chosen)
        return _sum_steps(rows) if is_packed else rows


def encode(rows: Sequence[tuple[int, Rows | None]]) -> tuple[list[int], wire.Frame] | None:
    """Return the header's field and the frame of (tokens, rows) one after another; None without any rows.

    Raises:
        WireError: They are not of one form.
    """
    like = next((one for _, one in rows if one is not None), None)
    if like is None:
        return None
    parts = [no_rows(num_tokens, like) if one is None else one for num_tokens, one in rows]
    if any(part.shape[1:] != like.shape[1:] or part.dtype != like.dtype for part in parts):
        raise WireError("the experts of a group's tokens are not of one model")
    column = np.concatenate(parts, dtype=ITEM_BYTES[like.itemsize])
    packed = _codec().compress(_sorted_steps(column).data, asbytes=True)
    is_packed = len(packed) < MOST_PACKED * column.nbytes
    form = [*like.shape[1:], like.itemsize, int(is_packed)]
    return form, packed if is_packed else column.reshape(-1).data.cast("B")


def read_column(header: Mapping[str, object], frame: wire.Frame, num_tokens: int) -> Column:
    """Return the column of a group. Raises WireError."""
    form: list[object] = wire.field(header, FIELD, list)
    sizes = [size for size in form if type(size) is int and 0 <= size < MAX_SIZE]
    if len(sizes) != 4 or len(form) != 4 or 0 in sizes[:2] or sizes[2] not in ITEM_BYTES or sizes[3] > 1:
        raise WireError(f"the field '{FIELD}' must hold layers, experts of each, 1 or 2 bytes, and 0 or 1")
    return Column((sizes[0], sizes[1], sizes[2], sizes[3]), num_tokens, frame)


def _sorted_steps(rows: Rows) -> Rows:
    """Return the experts of each layer in rising order, each as its distance from the one before.

    Their order means nothing, and takes most of the bytes. A network of comparisons of whole columns sorts
    eight times as fast as numpy does rows of eight.
    """
    num_chosen = rows.shape[-1]
    columns = list(np.ascontiguousarray(rows.reshape(-1, num_chosen).T))
    for turn in range(num_chosen):
        for left in range(turn % 2, num_chosen - 1, 2):
            pair = columns[left : left + 2]
            columns[left : left + 2] = np.minimum(*pair), np.maximum(*pair)
    steps = np.empty((len(columns[0]), num_chosen), rows.dtype)
    steps[:, 0] = columns[0]
    for index in range(1, num_chosen):
        np.subtract(columns[index], columns[index - 1], out=steps[:, index])
    return steps


def _sum_steps(steps: Rows) -> Rows:
    """Undo `_sorted_steps`."""
    rows = steps.copy()
    for index in range(1, rows.shape[-1]):
        rows[..., index] += rows[..., index - 1]
    rows.flags.writeable = False
    return rows


def _are_sets(rows: Rows) -> bool:
    """Tell of rows in rising order whether each layer has different experts, or none at all.

    A layer that begins with none adds all of its pairs to those that do not rise, and no other may add any.
    """
    num_chosen, flat = rows.shape[-1], rows.reshape(-1)  # in one run: three times as fast
    is_none, is_rising = flat == no_expert(rows.itemsize), np.ones(len(flat), dtype=bool)
    is_rising[:-1] = (flat[1:] > flat[:-1]) & ~is_none[1:]
    is_rising[num_chosen - 1 :: num_chosen] = True
    num_empty = np.count_nonzero(is_none[::num_chosen])
    num_flat = len(flat) - np.count_nonzero(is_rising)
    is_none_apart = np.count_nonzero(is_none) != num_chosen * num_empty
    return not (is_none_apart or num_flat != (num_chosen - 1) * num_empty)


def _unpack(frame: wire.Frame, num_bytes: int) -> wire.Frame:
    try:
        return memoryview(_codec().decompress(frame, num_bytes))
    except (OSError, ValueError) as error:
        raise WireError(f"the array '{FIELD}' cannot be unpacked: {error}") from error


def _codec() -> pyarrow.Codec:
    import pyarrow

    return pyarrow.Codec("zstd", compression_level=1)
