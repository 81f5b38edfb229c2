"""The benchmarks of batching and memory, at sizes that take no time."""

import pytest

from benchmarks.learner import memory, packing

TINY = packing.Sizes(
    num_groups=2,
    group_size=3,
    max_response_tokens=60,
    max_tokens_per_microbatch=160,
    hidden_size=32,
    num_layers=1,
    vocab_size=64,
    num_updates=1,
)


def test_padding_changes_nothing_but_the_number_of_positions():
    results = packing.measure(TINY)
    assert results["num_padded_tokens"] > results["num_tokens"]
    assert results["gradient_error"] < 1e-5
    assert packing.table(results).endswith(f"{results['speed_up']:.2f}")


def test_every_row_is_as_long_as_the_longest_and_only_its_own_tokens_count():
    batch = packing.make_batch(TINY)
    padded = packing.pad_rows(batch)
    assert set(padded.row_lengths) == {max(batch.row_lengths)}
    for row, length in enumerate(batch.row_lengths):
        start, padded_start = batch.cu_seqlens[row], padded.cu_seqlens[row]
        ours = padded.labels_N[padded_start : padded_start + length]
        assert ours.tolist() == batch.labels_N[start : start + length].tolist()
    assert padded.loss_mask_N.sum() == batch.loss_mask_N.sum()
    assert padded.totals == batch.totals


@pytest.mark.parametrize(
    ("speed_up", "error", "said"), [(2.5, 1e-6, "1.25"), (1.0, 1e-6, "0.50"), (9, 2e-5, "0.50")]
)
def test_a_missed_target_is_the_last_word(speed_up, error, said):
    is_met, verdict = packing.check({"speed_up": speed_up, "gradient_error": error})
    assert is_met == (float(said) >= 1)
    assert f"worst ratio to a target: {said}" in verdict


@pytest.mark.parametrize(
    ("share", "error", "said"), [(0.05, 1e-6, "2.00"), (0.2, 1e-6, "0.50"), (0.05, 4e-5, "0.25")]
)
def test_memory_over_its_share_or_inexact_is_a_miss(share, error, said):
    is_met, verdict = memory.check({"share_of_plain": share, "errors": {"logprobs": error}})
    assert is_met == (float(said) >= 1)
    assert f"worst ratio to a target: {said}" in verdict
