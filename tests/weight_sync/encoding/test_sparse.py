"""Differences between runs of bytes: exact, as short as promised, and refused if they are none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import WireError
from weight_sync.encoding.choice import choose, choose_widths
from weight_sync.encoding.sparse import BLOCK_ELEMENTS, Code, Sparse, decode, encode
from weight_sync.memory.manifest import TensorSpec, plan

GAPS_OF_NOTE = (0, 1, 253, 254, 255, 256, 509, 510, 511, 1000, 20000)


def turned(old: np.ndarray, sparse: Sparse) -> np.ndarray:
    target = old.copy()
    decode(target, sparse)
    return target


def bfloat16_image(num_elements: int, seed: int = 0) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_elements, generator=generator).bfloat16().view(torch.uint8).numpy()


def change(old: np.ndarray, share: float, seed: int = 1) -> np.ndarray:
    """Return a copy with about `share` of the 2-byte elements changed in their last bit."""
    new = old.copy()
    new.view(np.uint16)[np.random.default_rng(seed).random(len(old) // 2) < share] ^= 1
    return new


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 400))
def test_any_two_runs_of_bytes_come_out_exact(data, width, num_elements):
    size = width * num_elements
    old = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    new = old.copy()
    for position, byte in data.draw(
        st.lists(st.tuples(st.integers(0, max(size - 1, 0)), st.integers(0, 255)))
    ):
        new[position : position + 1] = byte
    sparse = encode(old, new, width, max_bytes=2 * size + 100)
    assert sparse is not None
    assert np.array_equal(turned(old, sparse), new)
    is_changed = (old.reshape(-1, width) != new.reshape(-1, width)).any(1)
    assert sparse.num_changed == is_changed.sum()
    assert encode(old, new, width, max_bytes=len(sparse.data)) is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(GAPS_OF_NOTE), max_size=12), st.integers(0, 300), st.sampled_from([1, 2, 8]))
def test_gaps_of_every_size_come_out_exact(gaps, rest, width):
    positions = np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1
    old = np.zeros((sum(gaps) + len(gaps) + rest) * width, np.uint8)
    new = old.copy()
    new.reshape(-1, width)[positions] = 7
    sparse = encode(old, new, width, max_bytes=10**9)
    assert sparse is not None and sparse.num_changed == len(gaps)
    assert np.array_equal(turned(old, sparse), new)


def test_bits_decide_and_not_numbers():
    old = torch.tensor([0.0, torch.nan, 1.0, -0.0]).bfloat16().view(torch.uint8).numpy()
    new = torch.tensor([-0.0, torch.nan, 1.0, -0.0]).bfloat16().view(torch.uint8).numpy()
    sparse = encode(old, new, 2, max_bytes=8)
    assert sparse is not None and sparse.num_changed == 1
    assert np.array_equal(turned(old, sparse), new)


@pytest.mark.parametrize(
    ("share", "code", "max_share"),
    [(0.0, Code.GAPS, 0), (0.001, Code.GAPS, 0.004), (0.03, Code.GAPS, 0.05), (0.5, Code.BITMAP, 0.57)],
)
def test_a_difference_takes_as_few_bytes_as_promised(share, code, max_share):
    """Of bfloat16; the promise at 3 % was 12 % of the bucket. Several blocks, the last one not whole."""
    old = bfloat16_image(3 * BLOCK_ELEMENTS // 2 + 5)
    new = change(old, share)
    sparse = choose(old, new, 2)
    assert sparse is not None and sparse.code is code
    assert len(sparse.data) <= max_share * len(new)
    assert np.array_equal(turned(old, sparse), new)


@pytest.mark.parametrize("num_elements", [64, 1 << 18])
def test_a_bucket_that_has_changed_everywhere_is_sent_as_it_is(num_elements):
    """The large one is not even compared: a sample says so."""
    old = bfloat16_image(num_elements)
    assert choose(old, ~old, 2) is None
    assert choose(None, old, 2) is None


def test_a_bucket_s_elements_are_those_of_most_of_its_bytes():
    specs = [
        TensorSpec("a", "float32", (64,)),
        TensorSpec("b", "bfloat16", (416,)),
        TensorSpec("c", "int8", (3,)),
    ]
    assert choose_widths(plan(specs, 384)) == [4, 2, 2]
    assert choose_widths(plan(specs, 511)) == [1, 1, 2], "elements are not cut"


SOUND = Sparse(Code.GAPS, 2, 2, np.array([0, 5, 1, 1, 2, 2], np.uint8))
BITS = Sparse(Code.BITMAP, 2, 1, np.array([1, 0, 9, 9], np.uint8))


@pytest.mark.parametrize(
    ("sparse", "changes"),
    [
        (SOUND, {"width": 3}),
        (SOUND, {"num_changed": 1}),
        (SOUND, {"num_changed": 3}),
        (SOUND, {"num_changed": 99}),
        (SOUND, {"num_changed": -1}),
        (SOUND, {"data": np.array([0, 9, 1, 1, 2, 2], np.uint8)}),
        (SOUND, {"data": np.array([0, 0, 255, 1, 1, 2, 2], np.uint8)}),
        (SOUND, {"data": np.array([255, 1, 1, 2, 2], np.uint8)}),
        (SOUND, {"num_changed": 4, "data": np.array([0, 0, 0, 0, 1, 1], np.uint8)}),
        (BITS, {"num_changed": 2}),
        (BITS, {"data": np.array([1, 4, 9, 9], np.uint8)}),
        (BITS, {"data": np.array([1, 9, 9], np.uint8)}),
        (BITS, {"data": np.array([0, 4, 9, 9], np.uint8)}),
    ],
)
def test_what_is_no_difference_is_refused_and_changes_nothing(sparse, changes):
    target = np.arange(20, dtype=np.uint8)
    decode(target.copy(), sparse)
    with pytest.raises(WireError, match="a difference"):
        decode(target, dataclasses.replace(sparse, **changes))
    assert np.array_equal(target, np.arange(20, dtype=np.uint8))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(Code)),
    st.integers(0, 9),
    st.integers(-2, 40),
    st.binary(max_size=60),
    st.integers(0, 64),
)
def test_hostile_bytes_never_leave_the_bucket(code, width, num_changed, data, size):
    whole = np.full(size + 16, 77, np.uint8)
    try:
        decode(whole[8 : size + 8], Sparse(code, width, num_changed, np.frombuffer(data, np.uint8)))
    except WireError:
        assert (whole == 77).all()
    assert (whole[:8] == 77).all() and (whole[size + 8 :] == 77).all()
