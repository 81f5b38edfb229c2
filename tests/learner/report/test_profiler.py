"""The profiler's window and the efficiency figures of a step."""

import json

import pytest
import torch

from asyncrl.core.metrics import unknown_names
from asyncrl.models.architectures import ModelSize
from learner.report import Efficiency, ProfilerWindow, Stopwatch, make_efficiency
from learner.report.efficiency import read_model_size
from tests.learner.parts.samples import KINDS, MIXTURES, save_model

TINY = ModelSize(2, 64, 4, 2, 16, 128, 131)


def run_steps(window, steps):
    watch = Stopwatch()
    for step in steps:
        with window.step(step), watch.time("update_actor"):
            torch.ones(8, 8) @ torch.ones(8, 8)


def names_in(path):
    return [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]


def test_a_window_writes_one_trace_of_its_steps_with_the_stages_named(tmp_path):
    folder = tmp_path / "profile"
    window = ProfilerWindow((2, 4), folder, rank=0)
    run_steps(window, range(4))
    (path,) = folder.iterdir()  # written at the end of the window, not at the end of the run
    run_steps(window, range(4, 6))
    window.close()
    assert list(folder.iterdir()) == [path]
    assert path.name == "rank-00000-steps-2-3.json"
    names = names_in(path)
    assert names.count("update_actor") == 2
    assert [names.count(f"learner_step_{step}") for step in range(6)] == [0, 0, 1, 1, 0, 0]
    assert "aten::mm" in names


def test_a_run_that_ends_inside_the_window_writes_what_there_is(tmp_path):
    window = ProfilerWindow((1, 9), tmp_path, rank=3)
    run_steps(window, range(3))
    assert not list(tmp_path.iterdir())
    window.close()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00003-steps-1-2.json"]


def test_a_step_that_fails_is_written_too(tmp_path):
    window = ProfilerWindow((0, 9), tmp_path, rank=0)
    with pytest.raises(ZeroDivisionError), window.step(0):
        _ = 1 / 0
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000-steps-0-0.json"]


def test_a_resume_inside_the_window_records_the_rest(tmp_path):
    run_steps(ProfilerWindow((1, 4), tmp_path, rank=0), range(3, 6))
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000-steps-3-3.json"]


def test_without_a_window_nothing_is_written(tmp_path):
    window = ProfilerWindow(None, tmp_path / "profile", rank=0)
    run_steps(window, range(2))
    window.close()
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("kind", sorted({*KINDS} - {*MIXTURES}))
def test_flops_are_two_per_weight_of_a_matrix_and_token(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path, kind)
    size = read_model_size(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert size.num_weights == sum(module.weight.numel() for module in linears)
    assert size.forward_flops(10, 0) == 20 * size.num_weights


def test_attention_counts_every_pair_of_query_and_key_once():
    heads = TINY.num_heads * TINY.head_size
    assert TINY.forward_flops(0, 6) == TINY.num_layers * 6 * (2 * heads + 2 * heads)


def test_a_folder_without_a_known_shape_has_times_but_no_utilisation(tmp_path):
    efficiency = make_efficiency(tmp_path, num_devices=1, dtype="float32", peak_tflops=1.0)
    found = efficiency.describe({"perf/attention_pairs": 1.0}, {"timing_s/update_actor": 1.0}, 10)
    assert found == {"timing_per_token_ms/update_actor": 100.0}


def test_utilisation_is_the_flops_of_what_was_computed_over_what_the_devices_could_do():
    efficiency = Efficiency(TINY, peak_flops=1e9, num_devices=2)
    stages = {"timing_s/update_actor": 0.5, "timing_s/old_log_prob": 0.25, "timing_s/wait": 3.0}
    work = {"perf/attention_pairs": 400.0, "perf/computed_tokens": 60.0}
    found = efficiency.describe(work, stages, 100)
    forward = TINY.forward_flops(60, 400)
    assert found == pytest.approx(
        {
            "timing_per_token_ms/update_actor": 5.0,
            "timing_per_token_ms/old_log_prob": 2.5,
            "perf/mfu/actor": 3 * forward / (0.5 * 2e9),
            "perf/mfu/actor_infer": forward / (0.25 * 2e9),
            "perf/peak_tflops": 1e-3,
        }
    )
    assert unknown_names(found) == {}
    adapters = Efficiency(TINY, 1e9, 2, has_adapters=True)  # matrices get no gradient
    found = adapters.describe(work, stages, 100)
    assert found["perf/mfu/actor"] == pytest.approx(2 * forward / (0.5 * 2e9))


def test_a_stage_without_a_forward_pass_has_no_utilisation():
    efficiency = Efficiency(TINY, 1e9, 1, has_inference=False)
    found = efficiency.describe({"perf/attention_pairs": 1.0}, {"timing_s/old_log_prob": 0.1}, 10)
    assert "perf/mfu/actor_infer" not in found


def test_the_peak_is_what_is_configured_and_measured_otherwise(tmp_path):
    given = make_efficiency(tmp_path, num_devices=1, dtype="bfloat16", peak_tflops=2.5)
    assert given.peak_flops == 2.5e12
    measured = make_efficiency(tmp_path, num_devices=1, dtype="float32").peak_flops
    assert 1e8 < measured < 1e16
