"""The benchmarks that need a GPU: their logic, with tiny sizes on a CPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import end_to_end, logprob
from benchmarks.harness.rows import RowFile


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
    def made_up(way: str, seconds: float, peak_bytes: float) -> dict:
        values = {"seconds": seconds, "peak_bytes": peak_bytes}
        return {"case": {"way": way, "num_tokens": 8192}, "values": values}

    is_met, verdict = logprob.check({"rows": [made_up("fused", 1.0, 20.0), made_up("plain", 2.0, 100.0)]})
    assert not is_met and "0.50 (a tenth of its memory, 20.0%)" in verdict
    assert logprob.check({"rows": [made_up("fused", 1.0, 9.0), made_up("plain", 1.1, 100.0)]})[0]


@pytest.mark.parametrize("sizes", [end_to_end.GPU, end_to_end.TINY])
def test_the_whole_run_is_the_shipped_one_with_a_made_up_task(tmp_path: Path, sizes: end_to_end.Sizes):
    config = end_to_end.make_config(tmp_path, sizes, 2)
    assert (config.staleness.max_lag, config.rollout.gpus, config.learner.gpus) == (2, sizes.gpus, 0)
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
    results = {"rows": [asdict(row) for row in rows]}
    assert end_to_end.table(results).splitlines()[-1] == "| 2 | 1 | 5 | 75 |"
    # Twice as many steps, of which a quarter of the tokens was masked.
    assert end_to_end.check(results) == (True, "worst ratio to a target: 1.15 (speed-up 1.50, target 1.3)")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("module", [logprob, end_to_end])
def test_without_a_gpu_they_say_so(module, capsys: pytest.CaptureFixture[str]):
    assert module.main([]) == 1
    assert "--quick" in capsys.readouterr().err
