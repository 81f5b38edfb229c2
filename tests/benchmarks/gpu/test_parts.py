"""The benchmarks that need a GPU: their logic, with tiny sizes on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import attention, collectives, end_to_end, exactness, frame, learner, logprob, weight_sync
from benchmarks.harness.rows import Row, RowFile

TINY = learner.Work("tiny", "float32", 128, 2, 2)


def test_both_ways_of_log_probs_find_the_same_numbers_and_gradients():
    inputs = logprob.make_inputs(logprob.TINY, 64)
    fused, plain = (logprob.differentiate(name, inputs, logprob.TINY) for name in ("fused", "plain"))
    for ours, reference in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_the_log_prob_benchmark_writes_a_row_per_size_and_way(tmp_path: Path):
    assert logprob.main(["--quick", "--json", str(tmp_path / "rows.json")]) == 0
    rows = RowFile.read(tmp_path / "rows.json").rows
    assert [(row.case["num_tokens"], row.case["way"]) for row in rows] == [
        (64, "fused"), (64, "plain"), (128, "fused"), (128, "plain"),
    ]  # fmt: skip
    assert all(row.values["tokens_per_s"] > 0 and "seconds" in row.spread for row in rows)


def test_log_probs_are_judged_by_time_and_memory_at_the_most_tokens():
    def made_up(way: str, seconds: float, peak_bytes: float) -> Row:
        values = {"seconds": seconds, "peak_bytes": peak_bytes}
        return Row("gpu.logprob", {"way": way, "num_tokens": 8192}, values)

    is_met, verdict = logprob.check([made_up("fused", 1.0, 20.0), made_up("plain", 2.0, 100.0)])
    assert not is_met and "0.50 (a tenth of its memory, 20.0%)" in verdict
    assert logprob.check([made_up("fused", 1.0, 9.0), made_up("plain", 1.1, 100.0)])[0]


@pytest.mark.parametrize("sizes", [end_to_end.GPU, end_to_end.TINY])
def test_the_whole_run_is_the_shipped_one_with_a_made_up_task(tmp_path: Path, sizes: end_to_end.Sizes):
    config = end_to_end.make_config(tmp_path, sizes, 2)
    assert (config.staleness.max_lag, config.rollout.gpus, config.learner.gpus) == (2, sizes.gpus, sizes.gpus)
    assert config.learner.steps > end_to_end.WARM_UP_STEPS + 2


@pytest.mark.long
def test_the_task_of_the_whole_run_has_a_model_a_tokenizer_and_prompts(tmp_path: Path):
    from transformers import AutoTokenizer

    folder = end_to_end.make_task(tmp_path, end_to_end.TINY)
    assert len(AutoTokenizer.from_pretrained(folder)) == end_to_end.TINY.model["vocab_size"]
    assert (folder / "model.safetensors").stat().st_size > 0
    assert len((folder / "prompts.jsonl").read_text().splitlines()) == 512


def test_a_whole_run_s_row_has_the_steps_after_its_warm_up():
    slow, fast = (
        [
            {
                "timing_s/step": step_s * (10 if step < 3 else 1),
                "perf/throughput": 5.0,
                "staleness/trained_tokens": trained,
            }
            for step in range(6)
        ]
        for step_s, trained in ((2.0, 100.0), (1.0, 75.0))
    )
    rows = [
        end_to_end.make_row(0, slow, is_quick=False),
        end_to_end.make_row(2, fast, is_quick=False),
    ]
    assert end_to_end.make_row(2, fast, is_quick=True).case == {"max_lag": 2, "quick": 1}
    assert [row.values["step_s"] for row in rows] == [2.0, 1.0]
    assert frame.table(rows).splitlines()[-1] == "| 2 | 0 | 1 | 5 | 75 |"
    # Twice as many steps, of which a quarter of the tokens was masked.
    assert end_to_end.check(rows) == (True, "worst ratio to a target: 1.15 (speed-up 1.50, target 1.3)")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("module", [attention, learner, logprob, end_to_end, weight_sync])
def test_without_a_gpu_they_say_so(module, capsys: pytest.CaptureFixture[str]):
    assert module.main([]) == 1
    assert "--quick" in capsys.readouterr().err


def test_causal_attention_is_counted_within_rows_only():
    batch = learner.make_batch(TINY, "equal", 64)
    assert batch.row_lengths == [64] * 4
    assert learner.count_pairs(batch) == 4 * 64 * 65 / 2


def test_ragged_rows_fill_the_microbatches_too():
    lengths = learner.make_batch(TINY, "ragged", 64).row_lengths
    assert len(set(lengths)) > 1 and max(lengths) <= TINY.num_tokens
    assert 224 <= sum(lengths) <= 256


def test_updates_are_measured_at_equal_and_ragged_lengths_beside_the_plan_s_memory():
    equal, ragged = learner.measure(TINY)
    assert (equal.case["lengths"], ragged.case["lengths"]) == ("equal", "ragged")
    for row in (equal, ragged):
        assert 0 < row.values["optimizer_s"] < row.values["update_s"]
        assert row.values["plan_bytes"] > 16 * 1000, "weights, gradients and AdamW's moments"


@pytest.mark.parametrize(("mfu", "said"), [(0.5, "1.11"), (0.3, "0.67")])
def test_a_low_utilisation_at_equal_lengths_is_a_miss(mfu: float, said: str):
    rows = [Row("gpu.learner", {"lengths": "equal"}, {"mfu": mfu})]
    rows.append(Row("gpu.learner", {"lengths": "ragged"}, {"mfu": 0.01}))
    is_met, verdict = learner.check(rows)
    assert is_met == (mfu > 0.45)
    assert f"worst ratio to a target: {said}" in verdict


def test_the_kernels_of_attention_find_what_each_row_by_itself_does():
    rows = attention.measure(attention.TINY)
    found = {(row.case["lengths"], row.case["kernel"]) for row in rows}
    kernels = ("rectangles", "row_by_row")
    assert found >= {(lengths, kernel) for lengths in ("equal", "one", "ragged") for kernel in kernels}
    assert all(0 < row.values["error"] < attention.MAX_ERROR for row in rows)


def test_a_kernel_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch):
    def blind(sizes: attention.Sizes, lengths: list[int]) -> attention.Attend:
        return lambda query, key, value: attention.attend_row_by_row([sizes.num_tokens], query, key, value)

    monkeypatch.setattr(attention, "KERNELS", {"rectangles": attention.KERNELS["rectangles"], "blind": blind})
    is_met, verdict = attention.check(attention.measure(attention.TINY))
    assert not is_met and "error of blind" in verdict


def test_a_kernel_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(sizes: attention.Sizes, lengths: list[int]) -> attention.Attend:
        raise ValueError("of another version")

    monkeypatch.setattr(attention, "KERNELS", {"broken": broken, "ours": attention.KERNELS["rectangles"]})
    assert [row.case["kernel"] for row in attention.measure(attention.TINY)] == ["ours"] * 3
    assert "broken, equal: ValueError: of another version" in capsys.readouterr().err


def test_weights_go_to_the_host_and_back_in_exact_bytes(tmp_path: Path):
    flags = ["--quick", "--bytes", "300000", "--bucket-bytes", "65536"]
    assert weight_sync.main([*flags, "--json", str(tmp_path / "rows.json")]) == 0
    (row,) = RowFile.read(tmp_path / "rows.json").rows
    assert row.bench == "gpu.weight_sync" and row.case["device"] == "CPU"
    assert len(row.values) == 13 and min(row.values.values()) > 0


@pytest.mark.parametrize(("bounced", "is_met"), [(41.0, True), (39.0, False)])
def test_the_export_is_judged_by_the_bus(bounced: float, is_met: bool):
    rates = {"export_bounced": bounced, "copy_to_host_pinned": 50.0, "export_by_tensor": 5.0}
    rates |= {"load_ipc": 1.0, "load_host": 1.0}
    row = Row("gpu.weight_sync", {}, {f"{name}_bytes_per_s": rate for name, rate in rates.items()})
    assert weight_sync.check([row])[0] == is_met


@pytest.mark.long
def test_ranks_agree_on_sums_and_tell_the_rate_of_the_bus():
    (row,) = collectives.measure("cpu", 2, [1 << 16])
    assert set(row.values) == {f"{name}_bytes_per_s" for name in ("all_reduce", "all_gather", "broadcast")}


@pytest.mark.long
def test_recorded_steps_train_again_bit_for_bit_and_a_step_that_differs_is_seen(
    monkeypatch: pytest.MonkeyPatch,
):
    row = exactness.measure_replay(TINY)
    assert (row.values["weights"], row.values["metrics"] > 100) == (3, True)
    assert exactness.check([row])[0], "on a CPU nothing differs"
    replays = iter([exactness.replay_run, lambda run, root: exactness_of_other_rate(run, root)])
    replay_run = exactness.replay_run

    def exactness_of_other_rate(run: str, root: str):
        return replay_run(run, root, overrides=["learner.lr=3e-4"])

    monkeypatch.setattr(exactness, "replay_run", lambda run, root: next(replays)(run, root))
    other = exactness.measure_replay(TINY)
    assert other.values["different_weights"] > 0 and not exactness.check([other])[0]


@pytest.mark.long
def test_bfloat16_is_near_float32_and_not_the_same():
    values = exactness.measure_gap(TINY).values
    assert 0 < values["gap_abs_mean"] < values["gap_abs_p99"] <= values["gap_abs_max"] < 0.1
