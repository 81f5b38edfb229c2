"""Recorded experts: their rows, and their column on the wire."""

import contextlib
import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.bounds import UNBOUNDED, GroupBounds
from asyncrl.core import experts, wire
from asyncrl.core.errors import WireError
from asyncrl.core.experience import Group, decode_group, encode_group, outline_group
from asyncrl.core.experts import ITEM_BYTES, Rows, extend, has_row, item_bytes, no_expert
from tests.core.test_experience import make_group

LAYERS, CHOSEN = 3, 4


def make_rows(num_tokens: int, seed: int, num_experts: int = 60, num_bytes: int = 1) -> Rows:
    """Return rows of distinct experts; each layer's are in no order."""
    scores = np.random.default_rng(seed).random((num_tokens, LAYERS, num_experts))
    return scores.argsort(-1)[..., :CHOSEN].astype(ITEM_BYTES[num_bytes])


def routed(lengths: list[int], num_experts: int = 60, num_bytes: int = 1) -> Group:
    """Return a group whose last tokens have no rows."""
    group, trajectories = make_group(lengths), []
    for seed, one in enumerate(group.trajectories):
        rows = make_rows(one.num_tokens, seed, num_experts, num_bytes)
        rows[-1:] = no_expert(num_bytes)
        trajectories.append(dataclasses.replace(one, experts=rows))
    prompt = make_rows(len(group.prompt_ids), 99, num_experts, num_bytes)
    return dataclasses.replace(group, trajectories=tuple(trajectories), prompt_experts=prompt)


@pytest.mark.parametrize("num_bytes", [1, 2])
@pytest.mark.parametrize("lengths", [[3], [40, 0, 900]])
def test_a_group_s_experts_come_back_as_sets(lengths: list[int], num_bytes: int) -> None:
    group = routed(lengths, 60 if num_bytes == 1 else 300, num_bytes)
    found = decode_group(encode_group(group))
    pairs = [(group.prompt_experts, found.prompt_experts)]
    pairs += [
        (before.experts, after.experts)
        for before, after in zip(group.trajectories, found.trajectories, strict=True)
    ]
    for before, after in pairs:
        assert before is not None and after is not None and after.dtype == before.dtype
        assert np.sort(after, -1).tolist() == np.sort(before, -1).tolist()
        assert not (after.flags.writeable and len(lengths) > 1), "as all that comes out of frames"


def test_a_column_is_packed_where_that_saves_bytes() -> None:
    long, short = encode_group(routed([2000])), encode_group(routed([1]))
    assert len(long[7]) < 0.95 * 2002 * LAYERS * CHOSEN
    assert len(short[7]) == 3 * LAYERS * CHOSEN
    assert [wire.unpack_header(one[0])["experts"][3] for one in (long, short)] == [1, 0]


def test_a_group_without_experts_has_the_bytes_that_it_always_had() -> None:
    """Of the release before: a run that records none is read by it, and reads its journals."""
    frames = encode_group(make_group([3, 4]))
    told = hashlib.sha256(b"|".join(bytes(frame) for frame in frames)).hexdigest()
    assert (len(frames), told) == (7, "13f9046d34ab7a7831ce69b01b25be58fec5447bf80b12b12b951f7e4b28f5f0")


def test_a_trajectory_without_rows_has_none_beside_others_that_have_some() -> None:
    group = routed([3, 4])
    bare = dataclasses.replace(group.trajectories[0], experts=None)
    group = dataclasses.replace(group, trajectories=(bare, group.trajectories[1]), prompt_experts=None)
    found = decode_group(encode_group(group))
    assert found.prompt_experts is not None and not has_row(found.prompt_experts).any()
    first, second = (one.experts for one in found.trajectories)
    assert first is not None and not has_row(first).any()
    assert second is not None and has_row(second).tolist() == [True] * 3 + [False]


def test_forks_have_experts_too() -> None:
    group = dataclasses.replace(routed([3, 4, 5]), forked=(0, 0, 1))
    found = decode_group(encode_group(group))
    assert found.forked == (0, 0, 1) and found.trajectories[2].experts is not None
    whole = decode_group(encode_group(routed([3, 4, 5])))
    assert whole.forked == ()


def test_experts_of_two_models_in_one_group_cannot_be_sent() -> None:
    group = routed([3])
    other = dataclasses.replace(group, prompt_experts=make_rows(2, 0)[:, :2])
    with pytest.raises(WireError, match="not of one model"):
        encode_group(other)


def spoil(group: Group, **fields: object) -> list[wire.Frame]:
    frames = encode_group(group)
    header = wire.unpack_header(frames[0]) | fields
    return [wire.pack_header({name: value for name, value in header.items() if name != "v"}), *frames[1:]]


@pytest.mark.parametrize(
    "form",
    [
        [LAYERS, CHOSEN, 1],
        [LAYERS, CHOSEN, 1, 2],
        [LAYERS, CHOSEN, 3, 0],
        [0, CHOSEN, 1, 0],
        [LAYERS, -1, 1, 0],
        [LAYERS, CHOSEN, 1, True],
        [1 << 16, CHOSEN, 1, 0],
        "experts",
    ],
)
def test_a_form_that_is_none_is_refused(form: object) -> None:
    with pytest.raises(WireError, match="'experts'"):
        outline_group(spoil(routed([3]), experts=form))


@pytest.mark.parametrize("lengths", [[3], [900]], ids=["plain", "packed"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_column_of_another_size_is_refused_when_it_is_read(lengths: list[int], index: int) -> None:
    form = [LAYERS, CHOSEN, 1, int(lengths == [900])]
    form[index] += 1
    frames = spoil(routed(lengths), experts=form)
    with pytest.raises(WireError, match="'experts'"):
        decode_group(frames)


def test_a_packed_column_that_is_damaged_is_refused_when_it_is_read() -> None:
    frames = encode_group(routed([900]))
    for damaged in (bytes(frames[7])[:-9], b"", bytes(900)):
        with pytest.raises(WireError, match="cannot be unpacked"):
            decode_group([*frames[:7], damaged])


def test_a_column_does_not_grow_past_the_limit_of_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = encode_group(routed([900]))
    monkeypatch.setattr(experts, "_codec", lambda: pytest.fail("it was unpacked"))
    with pytest.raises(WireError, match="over the limit"):
        decode_group(spoil_sizes(frames))


def spoil_sizes(frames: list[wire.Frame]) -> list[wire.Frame]:
    header = wire.unpack_header(frames[0]) | {"experts": [1 << 15, 1 << 10, 2, 1]}
    return [wire.pack_header({name: value for name, value in header.items() if name != "v"}), *frames[1:]]


def test_a_group_whose_frame_of_experts_is_missing_or_too_much_is_refused() -> None:
    plain, with_experts = encode_group(make_group([3])), encode_group(routed([3]))
    with pytest.raises(WireError, match="8 frames, not 7"):
        outline_group(with_experts[:-1])
    with pytest.raises(WireError, match="7 frames, not 8"):
        outline_group([*plain, with_experts[7]])


MODEL = (LAYERS, CHOSEN, 60)


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        (UNBOUNDED, "this run records no experts"),
        (GroupBounds(experts=(LAYERS, CHOSEN + 1, 60)), "are not the model's"),
        (GroupBounds(experts=(LAYERS + 1, CHOSEN, 60)), "are not the model's"),
        (GroupBounds(experts=(LAYERS, CHOSEN, 256)), "are not the model's"),
        (GroupBounds(experts=(LAYERS, CHOSEN, 59)), "expert 59 was chosen of 59"),
    ],
)
def test_the_buffer_refuses_experts_that_its_run_cannot_replay(bounds: GroupBounds, why: str) -> None:
    outline = outline_group(encode_group(routed([900])))
    GroupBounds(experts=MODEL).check(outline)
    with pytest.raises(WireError, match=why):
        bounds.check(outline)
    bounds.check(outline_group(encode_group(make_group([3]))))


@pytest.mark.parametrize("num_tokens", [3, 900], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("experts", "is_refused"),
    [
        ([1, 2, 3, 4], False),
        ([255, 255, 255, 255], False),
        ([4, 2, 3, 4], True),
        ([1, 2, 3, 255], True),
        ([255, 2, 3, 4], True),
        ([1, 255, 255, 255], True),
    ],
)
def test_the_buffer_refuses_a_layer_s_experts_that_are_no_set(
    num_tokens: int, experts: list[int], is_refused: bool
) -> None:
    """The learner would end at them, and at every start again."""
    group = routed([num_tokens])
    (one,) = group.trajectories
    assert one.experts is not None
    one.experts[1, 2] = experts
    outline = outline_group(encode_group(group))
    with pytest.raises(WireError, match="not different ones") if is_refused else contextlib.nullcontext():
        GroupBounds(experts=MODEL).check(outline)


def test_a_packed_column_whose_steps_wrap_around_is_refused() -> None:
    group = routed([900])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_sorted_steps", lambda rows: np.full_like(rows, 100))
        outline = outline_group(encode_group(group))
    assert outline.experts is not None and outline.experts.form[3] == 1
    with pytest.raises(WireError, match="not different ones"):
        GroupBounds(experts=MODEL).check(outline)


def test_a_damaged_column_is_refused_by_the_buffer_and_not_by_the_learner() -> None:
    frames = encode_group(routed([900]))
    outline = outline_group([*frames[:7], bytes(frames[7])[:-9]])
    with pytest.raises(WireError, match="cannot be unpacked"):
        GroupBounds(experts=MODEL).check(outline)


@pytest.mark.parametrize(("num_experts", "num_bytes"), [(8, 1), (255, 1), (256, 2), (65_535, 2)])
def test_the_number_that_stands_for_none_is_no_expert(num_experts: int, num_bytes: int) -> None:
    assert item_bytes(num_experts) == num_bytes
    assert num_experts - 1 < no_expert(num_bytes)


def test_a_dense_layer_has_no_experts_in_a_row_that_is_there() -> None:
    rows = make_rows(2, 0)
    rows[0, 1:], rows[1] = no_expert(1), no_expert(1)
    assert has_row(rows).tolist() == [True, False]


@given(st.integers(0, 6), st.integers(0, 6), st.data())
def test_known_rows_stay_and_others_are_filled_from_the_end(
    known: int, found: int, data: st.DataObject
) -> None:
    total = data.draw(st.integers(max(known, found), 8))
    before, after = make_rows(known, 1), make_rows(found, 2)
    before[data.draw(st.lists(st.integers(0, known - 1), unique=True)) if known else []] = no_expert(1)
    rows = extend(before, total, after)
    assert rows is not None and len(rows) == total
    for place in range(total):
        is_known = place < known and has_row(before[place : place + 1])[0]
        is_found = place >= total - found
        wanted = before[place] if is_known else after[place - total] if is_found else None
        assert (rows[place] == (no_expert(1) if wanted is None else wanted)).all()


def test_there_are_no_rows_where_none_were_told() -> None:
    assert extend(None, 3, None) is None


@pytest.mark.parametrize("num_partial", [0, 3])
def test_rows_that_are_no_sets_do_not_make_up_for_each_other(num_partial: int) -> None:
    """Of one layer each: one that only begins with none, equal experts, and rows that end with none."""
    rows = [[[255, 4, 5, 6]], [[7, 7, 7, 8]], *[[[1, 2, 3, 255]]] * num_partial]
    assert not experts._are_sets(np.array(rows, np.uint8))
    assert experts._are_sets(np.array([[[255] * 4], [[4, 5, 6, 7]]], np.uint8))
