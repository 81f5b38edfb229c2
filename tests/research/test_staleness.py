import json

import pytest
import torch

from asyncrl.core.config.tree import AlgorithmSection
from research.staleness.cell import METHODS, Cell, Recipe, make_method, run_cell, score
from research.staleness.report import check, figures_of, table
from research.staleness.sampler import Sampler, Samples, Shape, Weights
from research.staleness.study import load_results, main, save_results, select_cells
from research.staleness.through_up import settings_of
from rollout_service.tasks.digit_sort.vocabulary import EOS, EQUALS, PAD, encode_prompt
from rollout_service.tasks.digit_sort.warm_start import build_model, train_warm_start

PROMPTS = [encode_prompt(digits) for digits in ((3, 1, 2), (9, 0, 4, 4, 1), (5, 5, 0, 7))]


@pytest.fixture(scope="module")
def model():
    return build_model(seed=0).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "model"
    model.save_pretrained(path)
    return path


def test_the_sampler_records_the_log_probs_that_transformers_gives(model, folder):
    shape = Shape.read(folder)
    weights = Weights.copy(model.state_dict().items(), shape)
    samples = Sampler(shape, eos=EOS, max_tokens=9, seed=0).sample(weights, PROMPTS, 4)
    assert len(samples.num_tokens) == 12
    assert len(set(samples.num_tokens)) > 1  # the untrained model ends some answers early
    for row, length in enumerate(samples.num_tokens):
        prompt, answer_T = PROMPTS[row // 4], samples.tokens_BT[row, :length]
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*prompt, *answer_T.tolist()]])).logits[0, len(prompt) - 1 : -1]
        expected_T = logits_TV.log_softmax(-1).gather(1, answer_T[:, None])[:, 0]
        torch.testing.assert_close(samples.logprobs_BT[row, :length], expected_T, atol=1e-5, rtol=0)
        assert samples.is_finished[row] == (answer_T[-1] == EOS)
        assert EOS not in answer_T[:-1]


def test_a_copy_of_the_weights_does_not_follow_the_model(folder):
    shape, live = Shape.read(folder), build_model(seed=1)
    weights = Weights.copy(live.state_dict().items(), shape)
    before = [part.clone() for part in (weights.embedding_VH, weights.layers[0].down, weights.head_HV)]
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.add_(1.0)
    for part, expected in zip(
        (weights.embedding_VH, weights.layers[0].down, weights.head_HV), before, strict=True
    ):
        assert torch.equal(part, expected)


@pytest.mark.parametrize(
    ("tokens", "is_finished", "reward"),
    [
        ([1, 2, 3, EOS], True, 1.0),
        ([3, 2, 1, EOS], True, 0.0),
        ([1, 2, 3], False, 0.0),
        ([1, 2, 3, PAD, EOS], True, 0.0),
        ([1, 2, EQUALS, EOS], True, 0.0),
    ],
)
def test_an_answer_is_scored_as_the_task_scores_it(tokens, is_finished, reward):
    samples = Samples(torch.tensor([tokens]), torch.zeros(1, len(tokens)), (len(tokens),), (is_finished,))
    assert score(samples, 0, (3, 1, 2)) == reward


@pytest.mark.long
def test_at_lag_0_the_sampler_and_the_learner_agree_and_at_lag_2_they_drift_apart(tmp_path):
    # After 60 steps the model answers in the right form and now and then in the right order: 1 % rewards.
    train_warm_start(0, 60, []).model.save_pretrained(tmp_path)
    recipe = Recipe(
        num_steps=6, evaluate_every=6, measure_every=1, lr=3e-3, warmup_steps=0, num_evaluation_prompts=8
    )
    synchronous = run_cell(Cell("decoupled", 0, 0), recipe, tmp_path)["measured"]["kl"]
    stale = run_cell(Cell("decoupled", 2, 0), recipe, tmp_path)["measured"]["kl"]
    assert max(abs(kl) for _, kl in synchronous) < 1e-5
    assert abs(stale[0][1]) < 1e-5
    assert abs(stale[-1][1]) > 1e-3


def test_every_method_is_an_objective_of_its_own_without_a_veto():
    described = {(o.policy_loss, o.centre) for o in (make_method(method, lag=4) for method in METHODS)}
    assert len(described) == len(METHODS)
    assert all(AlgorithmSection(**section).veto == 0 for section in METHODS.values())


def made_up(accuracies, num_steps=300):
    cells = {
        f"{method}/{lag}/0": {
            "method": method, "lag": lag, "seed": 0, "accuracy": [[0, 0.1], [1, a], [2, a], [3, a]],
            "measured": {"kl": [[0, 0.1]], "ess": [[0, 0.9]]},
        }
        for (method, lag), a in accuracies.items()
    }  # fmt: skip
    return {
        "recipe": {"num_steps": num_steps},
        "methods": dict.fromkeys(METHODS),
        "cells": cells,
        "through_up": {},
    }


GOOD = {
    ("decoupled", 0): 0.96,
    ("decoupled", 1): 0.935,
    ("decoupled", 4): 0.94,
    ("decoupled", 64): 0.9,
    ("none", 64): 0.4,
}


def test_the_check_passes_when_every_target_is_met():
    is_met, verdict = check(made_up(GOOD))
    assert is_met
    assert "decoupled at lag 1" in verdict  # the closest one


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({("decoupled", 64): 0.8}, "decoupled at lag 64"),
        ({("none", 64): 0.85}, "decoupled over none"),
        ({("decoupled", 4): 0.85}, "decoupled at lag 4"),
    ],
)
def test_the_check_names_the_target_that_is_missed(changed, named):
    is_met, verdict = check(made_up(GOOD | changed))
    assert not is_met
    assert named in verdict


def test_a_repeat_through_up_must_lie_within_the_seeds_spread():
    results = made_up(GOOD)
    record = {"method": "decoupled", "lag": 4, "seed": 0, "accuracy_end": 0.85, "lag_mean": 2.5}
    results["through_up"] = {"decoupled/4/0": record}
    is_met, verdict = check(results)
    assert not is_met
    assert "through up" in verdict
    assert "| decoupled, lag 4 | 0.940 | 0.850 | 2.50 |" in table(results)


def test_no_cells_are_no_success():
    assert not check(made_up({}))[0]


def test_the_final_accuracy_is_the_mean_of_the_last_three_evaluations():
    results = made_up({("none", 0): 0.5})
    results["cells"]["none/0/0"]["accuracy"] = [[0, 0.0], [1, 0.3], [2, 0.6], [3, 0.9]]
    assert figures_of(results, "none", 0).accuracy == pytest.approx(0.6)


def test_cells_are_chosen_by_whole_parts_of_their_names():
    assert [cell.name for cell in select_cells("none/1", False, False)] == [
        f"none/1/{seed}" for seed in range(3)
    ]
    assert len(select_cells("", False, False)) == 90
    assert len(select_cells("", False, True)) == 12


def test_a_file_of_another_recipe_is_refused(tmp_path):
    path = tmp_path / "grid.json"
    save_results(load_results(path, Recipe(num_steps=3)), path)
    assert load_results(path, Recipe(num_steps=3))["cells"] == {}
    with pytest.raises(SystemExit, match="another recipe"):
        load_results(path, Recipe(num_steps=4))


def test_cells_that_are_done_are_not_run_again(tmp_path, capsys):
    path = tmp_path / "grid.json"
    results = load_results(path, Recipe(num_steps=300)) | {"cells": made_up(GOOD)["cells"]}
    save_results(results, path)
    before = json.loads(path.read_text())
    assert main(["--json", str(path), "--cells", "decoupled/64/0,none/64/0", "--check"]) == 0
    assert json.loads(path.read_text()) == before
    assert capsys.readouterr().out.splitlines()[-1].startswith("worst ratio to a target:")


def test_a_cell_through_up_differs_from_the_demo_in_what_the_study_varies(tmp_path):
    from asyncrl.core.config.load import load_config
    from configs import shipped

    settings = settings_of(Cell("token TIS", 4, 2), Recipe(num_steps=7), tmp_path, tmp_path)
    config = load_config(shipped()["quickstart"], settings)
    assert (config.staleness.max_lag, config.run.seed, config.learner.steps) == (4, 2, 7)
    assert config.algorithm.correction == "bypass_pg_is"
    assert config.algorithm.veto == 0


def test_the_command_line_hands_its_arguments_over():
    with pytest.raises(SystemExit) as ended:
        main(["--steps", "many"])
    assert ended.value.code == 2
