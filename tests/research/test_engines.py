"""The studies of engines: what they count as equal, and what their verdicts judge."""

import torch

from research.engines import exactness, speed
from research.engines.engine_process import Answer


def test_log_probs_are_compared_answer_by_answer_as_far_as_both_go():
    account = exactness.Account("wide", "float32")
    ours, theirs = [[0.5, 1.0], [2.0]], [[0.5, 1.25], [2.0, 9.0]]
    account.add("a", "b", [torch.tensor(one) for one in ours], [torch.tensor(one) for one in theirs])
    (row,) = account.rows
    assert (row["equal"], row["of"], row["largest"]) == (2, 3, 0.25)


def test_after_the_first_other_token_nothing_is_compared():
    size = exactness.NUM_TOKENS
    same = Answer([1] * size, [0.5] * size)
    other = Answer([1, 1, *[2] * (size - 2)], [0.5] * size)
    assert [len(one) for one in exactness._same_tokens(same, same)] == [size, size]
    assert [len(one) for one in exactness._same_tokens(same, other)] == [2, 2]


def row_of(side="padded, alone", other="in a batch of 16", dtype="float32", equal=4, largest=0.0):
    found = {"width": "wide", "dtype": dtype, "side": side, "other": other}
    return found | {"equal": equal, "of": 4, "largest": largest}


def test_bits_are_judged_where_they_are_to_be_equal_and_the_distance_elsewhere():
    learner = {"side": "megatron, packed", "other": "engine, padded"}
    for changed, wanted in (
        ({}, True),
        ({"equal": 3}, False),
        ({"side": "engine, alone", "equal": 0}, True),
        ({"side": "engine, alone", "other": "again", "equal": 3}, False),
        (learner | {"equal": 0, "largest": 0.5e-4}, True),
        (learner | {"equal": 0, "largest": 2e-4}, False),
        (learner | {"equal": 0, "largest": 2e-2, "dtype": "bfloat16"}, True),
    ):
        is_met, _ = exactness.check({"rows": [row_of(), row_of(**changed)]})
        assert is_met == wanted, changed


def test_formats_are_judged_by_float32_and_served_adapters_by_merged_ones():
    def row(engine, ratio):
        return {"engine": engine, "batch": 32, "tokens_per_s": 1.0, "of_float32": ratio}

    for engine, ratio, wanted in (
        ("bfloat16", 1.2, "1.20 (bfloat16, 32 at once)"),
        ("int8 of float32", 0.5, "0.50 (int8 of float32, 32 at once)"),
        ("served adapter", 0.25, "4.00 (merged against served adapter, 32 at once)"),
    ):
        _, verdict = speed.check({"speeds": [row("float32", 1.0), row(engine, ratio)]})
        assert verdict == f"worst ratio to a target: {wanted}"
