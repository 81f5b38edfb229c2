"""The benchmarks of the learner, at sizes that take no time."""

import dataclasses
import sys

import pytest
import torch

from benchmarks.learner import shared_prompt, verl_loss
from benchmarks.learner import training as learner
from benchmarks.learner.kinds import TARGETS, pad_batch

SHAPE = learner.Shape("tiny", 128, 1, 64, 1)
SIZES = learner.Sizes((SHAPE,), num_rows=4, num_tokens=32)

STEP = {"model": "10M", "kind": "dense", "lengths": "equal", "ratio": 1.1, "error": 1e-6}
FASTER = {"advantage + loss": 3.0, "advantage + weights + loss": 3.0}
LOSS = {"speed_up": {"padded": FASTER, "packed": FASTER}, "error": 0.0}


@pytest.mark.parametrize("kind", TARGETS)
def test_both_sides_of_a_step_find_the_same_loss_and_gradient(kind):
    for result in learner.measure_steps(dataclasses.replace(SHAPE, kind=kind), SIZES):
        assert result["error"] < 1e-5, result["lengths"]
        is_ragged = result["num_padded_tokens"] > result["num_tokens"]
        assert is_ragged == (result["lengths"] == "ragged")


def test_a_side_that_finds_another_loss_is_seen():
    assert learner.compare({"loss": 1.1, "norm": 2.0}, {"loss": 1.0, "norm": 2.0}) == pytest.approx(0.1)


def test_padding_the_batch_keeps_every_weight_at_its_label():
    batch = learner.make_batch(SHAPE, SIZES, "ragged")
    tokens_BT, labels_BT, weight_BT, is_real_BT = pad_batch(batch)
    assert is_real_BT.sum(1).tolist() == batch.row_lengths
    assert torch.equal(tokens_BT[is_real_BT], batch.tokens_N)
    assert torch.equal(labels_BT[is_real_BT], batch.labels_N)
    assert not weight_BT[~is_real_BT].any()
    assert (weight_BT != 0).sum() == batch.loss_mask_N.sum()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "1.00"),
        ({"ratio": 0.55}, "0.50 (10M equal, target 1.1)"),
        ({"kind": "experts", "ratio": 0.5}, "0.50 (10M equal, target 1)"),
        ({"lengths": "ragged", "ratio": 0.75}, "0.50 (10M ragged, target 1.5)"),
        ({"error": 2e-4}, "0.50 (10M equal loss and norm"),
    ],
)
def test_the_worst_ratio_of_the_steps_is_the_last_word(changed, said):
    is_met, verdict = learner.check({"steps": [STEP | changed], "loss": LOSS, "only": None})
    assert is_met == (not changed)
    assert f"worst ratio to a target: {said}" in verdict


def test_slower_than_verl_is_a_miss():
    slower = {"padded": FASTER, "packed": {"advantage + loss": 1.0}}
    is_met, verdict = learner.check({"steps": [STEP], "loss": LOSS | {"speed_up": slower}, "only": None})
    assert not is_met
    assert "0.50 (packed advantage + loss, target 2)" in verdict


def test_without_verl_the_benchmark_says_how_to_get_it_and_the_check_fails(tmp_path):
    assert verl_loss.load_verl(tmp_path) is None
    found = {"steps": [STEP], "loss": None, "only": None}
    is_met, verdict = learner.check(found)
    assert not is_met
    assert verl_loss.HOW_TO_GET in verdict
    assert learner.table(found | {"steps": []}).endswith(verl_loss.HOW_TO_GET)
    assert learner.check(found | {"only": "steps"})[0], "it was not asked for"


@pytest.mark.parametrize(
    ("is_quick", "only", "kinds"),
    [
        (True, None, ["dense"]),
        (True, "steps", ["dense", "experts", "adapters"]),
        (False, None, ["dense", "experts", "adapters", "dense"]),
        (False, "lora", ["adapters"]),
    ],
)
def test_only_chooses_among_the_models(is_quick, only, kinds):
    sizes = learner.choose_sizes(is_quick, only)
    assert [shape.kind for shape in sizes.shapes] == kinds
    assert bool(sizes.loss_turns) == (only is None)


def test_packed_and_padded_give_the_same_loss_and_gradient():
    batch = verl_loss.make_loss_batch(16, 64)
    outcomes = []
    for is_packed in (False, True):
        stages, out = verl_loss.our_stages(batch, is_packed=is_packed)
        for run in stages.values():
            run()
        outcomes.append(out)
    padded, packed = outcomes
    assert packed.gradient is not None and padded.gradient is not None
    assert packed.gradient.abs().max() > 0
    reference = dataclasses.replace(padded, gradient=padded.gradient.view(16, 64))
    assert verl_loss.compare(reference, packed, batch) < 1e-5
    packed.gradient = packed.gradient * 1.5
    assert verl_loss.compare(reference, packed, batch) == pytest.approx(0.5)


def test_verl_itself_gives_the_same_loss_and_gradient_and_leaves_no_stand_ins():
    functions = verl_loss.load_verl(None)
    if functions is None:
        pytest.skip(verl_loss.HOW_TO_GET)
    assert not {name for name in sys.modules if name.partition(".")[0] in ("verl", "tensordict")}
    results = verl_loss.measure(functions, 16, 64, 1)
    assert results["error"] < verl_loss.TARGET_ERROR


SHARED = {"backend": "fsdp2", "num_prompt_tokens": 128, "ratio": 1.6, "gradient_error": 1e-6}


def test_both_ways_of_a_prompt_find_the_same_gradient_from_fewer_tokens():
    sizes = shared_prompt.Sizes(
        {16: 1}, hidden_size=128, num_layers=1, vocab_size=64, group_size=5, num_answer_tokens=20
    )
    found = shared_prompt.measure(sizes)["steps"]
    assert [step["backend"] for step in found] == ["megatron", "fsdp2"]
    for step in found:
        assert step["num_tokens"] == {"shared": 116, "packed": 180}
        assert 0 < step["gradient_error"] < 1e-5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "1.00"),
        ({"ratio": 0.8}, "0.50 (fsdp2 prompt of 128, target 1.6)"),
        ({"num_prompt_tokens": 16, "ratio": 0.49}, "0.50 (fsdp2 prompt of 16, target 0.98)"),
        ({"gradient_error": 2e-5}, "0.50 (fsdp2 gradients, target 1e-05)"),
    ],
)
def test_a_slower_or_another_step_of_shared_prompts_is_a_miss(changed, said):
    is_met, verdict = shared_prompt.check({"steps": [SHARED | changed]})
    assert is_met == (not changed)
    assert f"worst ratio to a target: {said}" in verdict


def test_one_part_of_the_learner_s_benchmark_can_be_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(shared_prompt, "run", lambda given: asked.append(given.quick) or 7)
    assert learner.main(["--only", "shared_prompt", "--quick"]) == 7 and asked == [True]
