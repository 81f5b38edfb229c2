"""Attention of packed rows: both kernels give what each row alone gives, on every context-parallel rank."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from learner.attention import varlen
from learner.attention.layout import AttentionLayout, lay_out
from learner.attention.pieces import whole_rows
from learner.attention.rectangles import RectanglePieces, line_length
from learner.fsdp2.model.language_model import Ways
from learner.fsdp2.ranked import _make_lay_out
from learner.megatron.model.packing import describe_rows
from tests.learner.attention import reference

CPU = torch.device("cpu")
HEADS, SHARED, SIZE = 4, 2, 8
LENGTHS = ([1], [7, 7, 7], [3, 37, 1, 19], [1, 1, 2, 130, 64, 5], [65, 33, 65])


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", reference.varlen_attn)


@dataclass
class Packed:
    """Rows as packed queries [T, h, D], keys and values [T, g, D], and the weights of a sum of outputs."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    weights: torch.Tensor

    @classmethod
    def draw(cls, num_tokens: int) -> Packed:
        generator = torch.Generator().manual_seed(num_tokens)

        def tensor(heads: int) -> torch.Tensor:
            return torch.randn(num_tokens, heads, SIZE, generator=generator, dtype=torch.float64)

        return cls((tensor(HEADS), tensor(SHARED), tensor(SHARED)), tensor(HEADS))

    def alone(self, lengths: Sequence[int], window: int | None = None) -> list[torch.Tensor]:
        """Return outputs and gradients of rows that are each computed alone."""
        leaves = [tensor.clone().requires_grad_() for tensor in self.tensors]
        outputs = []
        for row in zip(*(leaf.split(list(lengths)) for leaf in leaves), strict=True):
            q, k, v = (x.transpose(0, 1) for x in row)
            places = torch.arange(q.shape[1])
            sees = places <= places[:, None]
            if window is not None:
                sees &= places > places[:, None] - window
            outputs.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True))
        output = torch.cat(outputs, 1).transpose(0, 1)
        (output * self.weights).sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def attend(packed: Packed, layout: AttentionLayout, window: int | None = None) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in packed.tensors]
    output = layout.attend(*leaves, None, window)
    (output * packed.weights).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def offsets(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("is_varlen", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_rows_are_each_row_alone(lengths: list[int], is_varlen: bool, window: int | None) -> None:
    packed = Packed.draw(sum(lengths))
    layout = lay_out(whole_rows(offsets(lengths)), CPU, is_varlen=is_varlen)
    for ours, alone in zip(attend(packed, layout, window), packed.alone(lengths, window), strict=True):
        torch.testing.assert_close(ours, alone)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("is_varlen", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_ranks_of_a_context_together_give_each_row_alone(
    lengths: list[int], is_varlen: bool, cp_size: int
) -> None:
    packed = Packed.draw(sum(lengths))
    leaves = [tensor.clone().requires_grad_() for tensor in packed.tensors]
    ranks = [
        describe_rows(offsets(lengths), CPU, cp_rank=rank, cp_size=cp_size, is_varlen=is_varlen)
        for rank in range(cp_size)
    ]
    shares = [rows.share for rows in ranks if rows.share is not None]
    queries, keys, values = (
        [share.take(leaf.movedim(0, -1)).movedim(-1, 0) for share in shares] for leaf in leaves
    )
    outputs = [
        rows.attention.attend(query, torch.cat(keys), torch.cat(values), None)
        for rows, query in zip(ranks, queries, strict=True)
        if rows.attention is not None
    ]
    output = torch.cat(outputs)[shares[0].gathered_from_T[: sum(lengths)]]
    (output * packed.weights).sum().backward()
    found = [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    for ours, alone in zip(found, packed.alone(lengths), strict=True):
        torch.testing.assert_close(ours, alone)


def test_lengths_share_a_rectangle_by_powers_of_two_then_by_quarters_of_an_octave() -> None:
    found = [line_length(length) for length in (1, 16, 17, 64, 65, 100, 129, 1000)]
    assert found == [16, 16, 32, 64, 80, 112, 160, 1024]
    assert all(length <= line_length(length) <= 1.25 * length for length in range(65, 3000))


def test_padding_and_packing_are_inverse() -> None:
    layout = RectanglePieces.of(whole_rows([0, 3, 40, 41, 60]))
    assert [(found.num_lines, found.num_keys) for found in layout.rectangles] == [(2, 3), (1, 19), (1, 37)]
    assert torch.equal(layout.query_from_M[layout.output_from_N], torch.arange(60))


@pytest.mark.parametrize(
    ("ends", "is_in_order"),
    [
        ([0, 21, 42, 63], True),
        ([0, 3, 40], True),  # sorted by length already
        ([0, 40, 43], False),
        ([0, 20, 43], False),  # one rectangle, padded
    ],
)
def test_rows_that_need_no_move_are_not_moved(ends: list[int], is_in_order: bool) -> None:
    assert RectanglePieces.of(whole_rows(ends)).is_in_order == is_in_order


def test_context_parallel_keys_are_no_more_than_a_rank_s_queries_see() -> None:
    rows = describe_rows([0, 1000], CPU, cp_rank=0, cp_size=4, is_varlen=True)
    assert isinstance(rows.attention, varlen.VarlenPieces)
    assert rows.attention.query_offsets_P1.tolist() == [0, 125, 250]
    assert rows.attention.key_offsets_P1.tolist() == [0, 125, 1125]
    rows = describe_rows([0, 1000], CPU, cp_rank=3, cp_size=4, is_varlen=True)
    assert isinstance(rows.attention, varlen.VarlenPieces)
    assert rows.attention.query_offsets_P1.tolist() == [0, 250], "neighbours are one piece"


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "capability", "can_run"),
    [
        ("cuda", torch.bfloat16, [128], (9, 0), True),
        ("cuda", torch.float16, [64, 64], (8, 0), True),
        ("cuda", torch.float32, [128], (9, 0), False),
        ("cuda", torch.bfloat16, [320], (9, 0), False),
        ("cuda", torch.bfloat16, [36], (9, 0), False),
        ("cuda", torch.bfloat16, [192, 128], (9, 0), False),
        ("cuda", torch.bfloat16, [128], (7, 5), False),
        ("cpu", torch.bfloat16, [128], (9, 0), False),
    ],
)
def test_the_kernel_for_variable_lengths_runs_on_gpus_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    sizes: list[int],
    capability: tuple[int, int],
    can_run: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert varlen.can_run(torch.device(device), dtype, sizes) == can_run


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="2.11 has not all options")
def test_the_installed_torch_has_the_kernel_and_its_options() -> None:
    assert set(inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters) >= varlen._OPTIONS


@pytest.mark.parametrize(
    ("is_packed", "dtype", "expected"),
    [
        (True, torch.bfloat16, varlen.VarlenPieces),
        (True, torch.float32, RectanglePieces),
        (False, torch.bfloat16, RectanglePieces),
    ],
)
def test_fsdp2_takes_the_kernel_where_its_model_runs_packed_rows(
    monkeypatch: pytest.MonkeyPatch, is_packed: bool, dtype: torch.dtype, expected: type
) -> None:
    monkeypatch.setattr(varlen, "can_run", lambda _, dtype, sizes: dtype is torch.bfloat16 and sizes == {32})
    lay_out = _make_lay_out(Ways(is_packed, True, frozenset([32])), CPU, dtype)
    assert isinstance(lay_out([0, 3, 40]).attention, expected)


@pytest.mark.parametrize(
    "kernel", [None, lambda query, key, value, *, scale=None: query], ids=["absent", "without options"]
)
def test_an_older_torch_without_the_kernel_or_an_option_of_it_takes_padded_rows_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: object
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    assert not varlen.can_run(torch.device("cuda"), torch.bfloat16, [128])
    assert "attended as padded rows" in caplog.text
