"""Groups on the wire."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core import wire
from asyncrl.core.errors import WireError
from asyncrl.core.experience import (
    FINISH_REASONS,
    GROUP_SCHEMA,
    MAX_REWARD_PARTS,
    ROUTED_SCHEMA,
    Group,
    Trajectory,
    decode_group,
    encode_group,
    outline_group,
)
from asyncrl.core.staleness import Span


def make_group(lengths: list[int], reward: float = 1.0) -> Group:
    trajectories = tuple(
        Trajectory(
            response_ids=np.arange(length, dtype=np.int32),
            loss_mask=np.ones(length, np.uint8),
            logprobs=-np.arange(length, dtype=np.float32),
            spans=(Span(2, 0, length),) if length else (),
            reward=reward,
            finish_reason="stop",
        )
        for length in lengths
    )
    return Group(ticket=7, attempt=2, prompt_ids=np.array([5, 6], np.int32), trajectories=trajectories)


@given(st.lists(st.integers(0, 9), max_size=6))
def test_a_group_comes_back_as_it_was_sent(lengths: list[int]) -> None:
    group = make_group(lengths)
    found = decode_group(encode_group(group))
    assert (found.ticket, found.attempt, found.prompt_ids.tolist()) == (7, 2, [5, 6])
    for before, after in zip(group.trajectories, found.trajectories, strict=True):
        assert before.response_ids.tolist() == after.response_ids.tolist()
        assert before.logprobs.tolist() == after.logprobs.tolist()
        assert (before.spans, before.reward, before.finish_reason) == (
            after.spans,
            after.reward,
            after.finish_reason,
        )


def test_the_learner_computes_on_the_prompt_once_per_trajectory() -> None:
    assert make_group([3, 4]).num_tokens == 3 + 4 + 2 * 2


@pytest.mark.parametrize("index", range(7))
def test_a_group_with_a_shortened_frame_is_refused(index: int) -> None:
    frames = encode_group(make_group([3, 4]))
    frames[index] = frames[index][:-1]
    with pytest.raises(WireError):
        decode_group(frames)


def test_a_group_with_a_frame_missing_is_refused() -> None:
    with pytest.raises(WireError, match="7 frames"):
        decode_group(encode_group(make_group([3]))[:-1])


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(WireError, match="finite"):
        decode_group(encode_group(make_group([3], reward=reward)))


@pytest.mark.parametrize("baseline", [None, 0.0, -1.5, 0.1])
def test_the_reward_of_the_greedy_answer_travels_along_and_is_no_trajectory(baseline: float | None) -> None:
    group = dataclasses.replace(make_group([3, 4]), baseline_reward=baseline)
    found = decode_group(encode_group(group))
    assert found.baseline_reward == (None if baseline is None else np.float32(baseline))
    assert found.num_tokens == make_group([3, 4]).num_tokens


@pytest.mark.parametrize("baseline", [float("nan"), float("inf"), 1e39, True, "1", None, 1])
def test_a_greedy_reward_that_is_no_finite_number_is_refused(baseline: object) -> None:
    frames = encode_group(make_group([3]))
    header = wire.unpack_header(frames[0]) | {"baseline_reward": baseline}
    with pytest.raises(WireError):
        decode_group([wire.pack_header(header), *frames[1:]])


def test_a_group_is_constant_only_if_the_greedy_answer_scored_the_same() -> None:
    group = make_group([3, 4], reward=0.1)
    assert group.is_constant
    told = decode_group(encode_group(dataclasses.replace(group, baseline_reward=0.1)))
    assert told.is_constant
    assert not dataclasses.replace(group, baseline_reward=1.0).is_constant


PARTS = st.dictionaries(
    st.sampled_from(["gsm8k", "format", "länge"]), st.floats(allow_nan=False, allow_infinity=False)
)


@given(st.lists(st.tuples(PARTS, st.integers(1, 1 << 40), st.sampled_from(FINISH_REASONS)), max_size=4))
def test_parts_turns_and_finish_reasons_come_back_even_if_only_some_trajectories_have_a_part(
    told: list[tuple[dict[str, float], int, str]],
) -> None:
    group = make_group([2] * len(told))
    trajectories = tuple(
        dataclasses.replace(one, reward_parts=parts, num_turns=turns, finish_reason=reason)
        for one, (parts, turns, reason) in zip(group.trajectories, told, strict=True)
    )
    found = decode_group(encode_group(dataclasses.replace(group, trajectories=trajectories)))
    assert [(dict(one.reward_parts), one.num_turns, one.finish_reason) for one in found.trajectories] == told


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("parts", value)
            for value in (None, [], {"": [1.0, 1.0]}, {"a\n": [1.0, 1.0]}, {"a" * 65: [1.0, 1.0]})
        ],
        *[
            ("parts", {"a": value})
            for value in ([1.0], 1.0, [1.0, 1], [True, 1.0], ["1", 1.0], [1.0, float("nan")])
        ],
        ("parts", {str(number): [1.0, 1.0] for number in range(MAX_REWARD_PARTS + 1)}),
        *[("turns", value) for value in (None, [1], [0, 1], [-1, 1], [1.0, 1], [True, 1], [1, 1, 1])],
        ("finish", [0, len(FINISH_REASONS) + 1]),
    ],
)
def test_parts_turns_and_finish_reasons_that_do_not_fit_are_refused(name: str, value: object) -> None:
    frames = encode_group(make_group([3, 4]))
    header = wire.unpack_header(frames[0]) | {name: value}
    for read in (decode_group, outline_group):
        with pytest.raises(WireError):
            read([wire.pack_header(header), *frames[1:]])
    header.pop(name)
    with pytest.raises(WireError, match=name):
        decode_group([wire.pack_header(header), *frames[1:]])


def test_a_span_of_an_unknown_sample_is_refused() -> None:
    frames = encode_group(make_group([3]))
    frames[5] = np.array([[4, 2, 0, 3]], "<i8").tobytes()
    with pytest.raises(WireError, match="sample 4"):
        decode_group(frames)


@given(st.binary(max_size=64))
def test_random_bytes_as_a_header_are_refused_or_read_and_never_crash(data: bytes) -> None:
    try:
        wire.unpack_header(data)
    except WireError:
        pass


def test_another_schema_version_is_refused() -> None:
    import msgpack

    with pytest.raises(WireError, match="schema version"):
        wire.unpack_header(msgpack.packb({"v": 999}))


def test_a_true_does_not_pass_for_a_number() -> None:
    with pytest.raises(WireError):
        wire.field({"n": True}, "n", int)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        (ROUTED_SCHEMA + 1, "newer"),
        (2, "schema 2, .* older"),
        (1, "older"),
        (None, "older"),
        (0, "number"),
        ("2", "number"),
    ],
)
def test_a_group_of_another_schema_is_refused_by_its_number(schema: object, word: str) -> None:
    frames = encode_group(make_group([3]))
    header = wire.unpack_header(frames[0])
    header.pop("v")
    header["schema"] = schema
    if schema is None:  # made before the header named it
        header.pop("schema")
    with pytest.raises(WireError, match=word):
        decode_group([wire.pack_header(header), *frames[1:]])


def make_forked(samples: tuple[int, ...], rewards: tuple[float, ...]) -> Group:
    group = make_group([3] * len(samples))
    rows = zip(group.trajectories, rewards, strict=True)
    trajectories = tuple(dataclasses.replace(one, reward=reward) for one, reward in rows)
    return dataclasses.replace(group, trajectories=trajectories, forked=samples)


def test_the_samples_of_forked_trajectories_come_back() -> None:
    frames = encode_group(make_forked((0, 0, 1, 2, 2), (1.0, 1.0, 0.5, 0.0, 0.0)))
    assert decode_group(frames).forked == (0, 0, 1, 2, 2)
    assert (outline_group(frames).num_samples, len(outline_group(frames).lengths)) == (3, 5)
    plain = encode_group(make_group([3, 3]))
    assert wire.unpack_header(plain[0])["schema"] == GROUP_SCHEMA, "readers of before know it"
    assert (decode_group(plain).forked, outline_group(plain).num_samples) == ((), 2)


@pytest.mark.parametrize(
    ("samples", "rewards", "words"),
    [
        ((0, 2), (1.0, 1.0), "sample 2 comes after sample 0"),
        ((0, 1, 0), (1.0, 1.0, 1.0), "sample 0 comes after sample 1"),
        ((1, 1), (1.0, 1.0), "do not fit"),
        ((0, 0), (1.0, 0.5), "an episode has one"),
    ],
)
def test_samples_that_leave_one_out_or_disagree_on_the_reward_are_refused(
    samples: tuple[int, ...], rewards: tuple[float, ...], words: str
) -> None:
    with pytest.raises(WireError, match=words):
        decode_group(encode_group(make_forked(samples, rewards)))


def test_samples_of_another_number_of_trajectories_are_refused() -> None:
    group = make_forked((0, 0, 1), (1.0, 1.0, 1.0))
    with pytest.raises(WireError, match="do not fit"):
        decode_group(encode_group(dataclasses.replace(group, forked=(0, 0))))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_an_outline_says_what_the_decoded_group_says(lengths: list[int]) -> None:
    frames = encode_group(make_group(lengths))
    outline, group = outline_group(frames), decode_group(frames)
    assert (outline.ticket, outline.attempt) == (group.ticket, group.attempt)
    assert (outline.num_tokens, list(outline.lengths)) == (group.num_tokens, lengths)
    assert outline.rewards.tolist() == group.rewards
    assert list(outline.mask_max) == [one.loss_mask.max(initial=0) for one in group.trajectories]
    assert outline.versions == {span.version for one in group.trajectories for span in one.spans}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 4, 8])
def test_a_log_prob_that_is_not_finite_is_refused_wherever_it_stands(value: float, place: int) -> None:
    frames = encode_group(make_group([3, 6]))
    logprobs = np.frombuffer(frames[4], "<f4").copy()
    logprobs[place] = value
    with pytest.raises(WireError, match="finite"):
        outline_group([*frames[:4], logprobs.tobytes(), *frames[5:]])


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([[0, 2, 0, 3]], "sample 1: no span covers its 2 tokens"),
        ([[1, 2, 0, 2]], "sample 0: no span covers its 3 tokens"),
        ([], "sample 0: no span"),
        ([[0, 2, 0, 2], [1, 2, 0, 2]], "end at token 2, but there are 3"),
        ([[0, 2, 0, 4], [1, 2, 0, 2]], "end at token 4, but there are 3"),
        ([[0, 2, 0, 1], [0, 3, 2, 3], [1, 2, 0, 2]], "does not follow"),
        ([[0, 2, 0, 1], [0, 2, 1, 3], [1, 2, 0, 2]], "does not follow"),
        ([[0, 3, 0, 1], [0, 2, 1, 3], [1, 2, 0, 2]], "does not follow"),
        ([[0, 2, 0, 0], [0, 3, 0, 3], [1, 2, 0, 2]], "does not follow"),
        ([[0, 0, 0, 3], [1, 2, 0, 2]], "does not follow"),
        ([[1, 2, 0, 2], [0, 2, 0, 3]], "sample 0: no span|comes after"),
        ([[0, 2, 0, 3], [1, 2, 0, 2], [0, 3, 0, 3]], "comes after"),
        ([[-1, 2, 0, 3], [1, 2, 0, 2]], "names sample -1"),
        ([[0, 2, 0, 3], [2, 2, 0, 2]], "names sample 2"),
    ],
)
def test_spans_that_do_not_cover_each_trajectory_in_order_are_refused(
    spans: list[list[int]], words: str
) -> None:
    frames = encode_group(make_group([3, 2]))
    header = wire.unpack_header(frames[0])
    header.pop("v")
    header["num_spans"] = len(spans)
    frames[0], frames[5] = wire.pack_header(header), np.array(spans, "<i8").tobytes()
    for read in (decode_group, outline_group):
        with pytest.raises(WireError, match=words):
            read(frames)


def test_arrays_of_other_types_are_cast_once_on_the_way_out() -> None:
    one = Trajectory(
        response_ids=np.arange(3, dtype=np.int64),
        loss_mask=np.array([True, False, True]),
        logprobs=np.array([-1.0, -2.0, -3.0]),
        spans=(Span(1, 0, 3),),
        reward=1.0,
        finish_reason="length",
    )
    (found,) = decode_group(encode_group(Group(1, 1, np.array([5]), (one,)))).trajectories
    assert found.response_ids.tolist() == [0, 1, 2]
    assert (found.loss_mask.tolist(), found.logprobs.tolist()) == ([1, 0, 1], [-1.0, -2.0, -3.0])
