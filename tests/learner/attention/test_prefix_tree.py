"""Prefix trees: rows that share a beginning attend to it once, and get what each row alone gets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from learner.attention import cascade_varlen
from learner.attention.layout import lay_out_tree
from learner.attention.prefix_tree import PrefixTree, Segment, build_tree, find_runs
from tests.learner.attention import reference

CPU = torch.device("cpu")
HEADS, SHARED, SIZE = 4, 2, 8
Rows = list[list[int]]


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade_varlen, "flash", reference.flash)
    monkeypatch.setattr(cascade_varlen, "flash_backward", reference.flash_backward)


def branches(depth: int) -> st.SearchStrategy[Rows]:
    """Rows of one group: some tokens, then nothing or several branches."""
    beginning = st.lists(st.integers(0, 2), min_size=1, max_size=40)
    if not depth:
        return beginning.map(lambda row: [row])
    ends = st.lists(branches(depth - 1), max_size=3).map(lambda parts: list(itertools.chain(*parts)))
    return st.tuples(beginning, ends).map(
        lambda found: [found[0], *(found[0] + end for end in found[1])] if found[1] else [found[0]]
    )


GROUPS = st.lists(branches(2), min_size=1, max_size=3)


def tree_of(groups: Sequence[Rows], min_saved: int = 1) -> tuple[PrefixTree, list[int]]:
    rows = [row for group in groups for row in group]
    group_R = [number for number, group in enumerate(groups) for _ in group]
    ends = [0, *itertools.accumulate(map(len, rows))]
    return build_tree(torch.tensor(list(itertools.chain(*rows))), ends, group_R, min_saved), ends


def draw(num_tokens: int, dtype: torch.dtype = torch.float64, factor: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, heads, SIZE) for heads in (HEADS, SHARED, SHARED)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [
        (x * size).to(dtype).requires_grad_() for x, size in zip(tensors, (factor, factor, 1), strict=True)
    ]


def attend_alone(heads: Sequence[torch.Tensor], tree: PrefixTree, ends: Sequence[int]) -> torch.Tensor:
    """Return what each row gives alone, the rows one after another."""
    outputs = []
    for start, end in itertools.pairwise(ends):
        q, k, v = (x[tree.tree_from_N[start:end]].transpose(0, 1) for x in heads)
        outputs.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    return torch.cat(outputs, 1).transpose(0, 1)


def differentiate(output_NhD: torch.Tensor, heads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(output_NhD.shape, generator=generator, dtype=torch.float64).to(output_NhD.dtype)
    return [output_NhD.detach(), *torch.autograd.grad((output_NhD * weights).sum(), list(heads))]


def assert_each_row_is_alone(
    groups: Sequence[Rows], is_varlen: bool, dtype: torch.dtype = torch.float64, factor: float = 1.0
) -> None:
    tree, ends = tree_of(groups)
    heads = draw(tree.num_tokens, dtype, factor)
    found = lay_out_tree(tree, CPU, is_varlen=is_varlen).attend(*heads, None)[tree.tree_from_N]
    exact = [x.detach().double().requires_grad_() for x in heads]
    wanted = differentiate(attend_alone(exact, tree, ends), exact)
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.2}[dtype]
    for ours, alone in zip(differentiate(found, heads), wanted, strict=True):
        torch.testing.assert_close(ours.double(), alone, rtol=tolerance, atol=tolerance)


@given(GROUPS, st.booleans())
@settings(max_examples=40, deadline=None)
def test_rows_attend_over_a_tree_of_any_shape_as_each_alone(groups: list[Rows], is_varlen: bool) -> None:
    assert_each_row_is_alone(groups, is_varlen)


@pytest.mark.parametrize("is_varlen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shorter_numbers_round_and_nothing_more(dtype: torch.dtype, is_varlen: bool) -> None:
    prompt = list(range(40))
    assert_each_row_is_alone([[[*prompt, 50, *range(n)] for n in (3, 30, 40)], [[7] * 20]], is_varlen, dtype)


def test_a_padded_query_has_no_part_in_a_gradient_however_large_scores_are() -> None:
    """Its probabilities, by another query's log-sum-exp, would be infinite: gradients would be no numbers."""
    prompt = list(range(40))
    rows = [[*prompt, *range(50, 50 + size)] for size in (65, 70, 78)]
    tree, _ = tree_of([[[0] * 33, [1] * 40, [2] * 48], rows])
    heads = draw(tree.num_tokens, torch.float32, factor=30.0)
    output = lay_out_tree(tree, CPU, is_varlen=False).attend(*heads, None)
    assert all(grad.isfinite().all() for grad in differentiate(output, heads))


@given(GROUPS, st.sampled_from([1, 16]))
@settings(max_examples=60, deadline=None)
def test_the_path_to_a_place_has_the_tokens_of_each_row_through_it(
    groups: list[Rows], min_saved: int
) -> None:
    tree, ends = tree_of(groups, min_saved)
    tokens_N = torch.tensor([token for group in groups for row in group for token in row])
    tokens_M = torch.empty(tree.num_tokens, dtype=torch.long)
    tokens_M[tree.tree_from_N] = tokens_N
    assert torch.equal(tokens_M[tree.tree_from_N], tokens_N), "a place has one token"
    segment_of = {place: segment for segment in tree.segments for place in range(segment.start, segment.end)}
    for start, end in itertools.pairwise(ends):
        path = tree.tree_from_N[start:end].tolist()
        assert tree.positions_M[path].tolist() == list(range(end - start))
        sees = [place for place in path if place <= path[-1]]
        assert sees == path and len({*path}) == len(path)
        for above in {segment_of[place] for place in path}:
            assert above.start <= path[-1] < above.below, "the last token lies below each segment of its path"
    assert all(one.end > one.start for one in tree.segments)


def test_groups_never_share_with_one_another() -> None:
    tree, ends = tree_of([[list(range(40))], [list(range(40))]])
    assert tree.num_tokens == ends[-1] == 80 and not tree.is_shared


def test_turns_of_episodes_share_what_came_before_each() -> None:
    prompt, first, second = [1] * 20, [2] * 20, [3] * 20
    rows = [prompt + first + [5], prompt + first + second, prompt + [7] * 16]
    tree, _ = tree_of([rows], min_saved=16)
    assert tree.segments == (
        Segment(0, 20, 77, -1),
        Segment(20, 40, 61, 0),
        Segment(40, 60, 60, 1),
        Segment(60, 61, 61, 1),
        Segment(61, 77, 77, 0),
    )


@pytest.mark.parametrize(("num_more", "num_tokens"), [(15, 20 + 2 * 35 + 20), (16, 20 + 16 + 2 * 20 + 20)])
def test_a_run_of_equal_tokens_that_saves_little_is_no_segment(num_more: int, num_tokens: int) -> None:
    prompt, more = [1] * 20, [2] * num_more
    tree, _ = tree_of([[prompt + more + [3] * 20, prompt + more + [4] * 20, prompt + [5] * 20]], 16)
    assert tree.num_tokens == num_tokens


@pytest.mark.parametrize(("num_answer", "is_shared"), [(99, True), (100, False)])
def test_a_group_is_a_tree_where_it_has_a_tenth_more_tokens(num_answer: int, is_shared: bool) -> None:
    tree, ends = tree_of([[[1] * 22 + [answer] * num_answer for answer in (2, 3)], [[1] * 9, [1] * 9]])
    assert tree.num_tokens == ends[-1] - 9 - 22 * is_shared


def test_as_many_turns_as_there_are_may_each_go_on_from_the_one_before() -> None:
    rows = [torch.arange(16 * size).numpy() for size in range(1, 1500)]
    assert [run.num_tokens for run in find_runs(rows, 1)] == [16] * 1499


@pytest.mark.parametrize("is_varlen", [False, True])
def test_a_sliding_window_and_another_head_size_of_values_are_refused(is_varlen: bool) -> None:
    tree, _ = tree_of([[[1, 2], [1, 3]]])
    layout, heads = lay_out_tree(tree, CPU, is_varlen=is_varlen), draw(tree.num_tokens)
    with pytest.raises(NotImplementedError, match="no prefix tree for a sliding window"):
        layout.attend(*heads, None, 2)
    with pytest.raises(NotImplementedError, match="another head size"):
        layout.attend(heads[0], heads[1], heads[2][..., :4], None)
