"""The benchmark of differences: how the weights of a run's checkpoints are compared."""

import pytest
import torch

from asyncrl.core.config.load import load_config
from configs import shipped
from research.delta import learning_runs
from research.delta.learning_runs import RUNS, share_changed


def test_only_elements_whose_bits_change_in_the_published_dtype_count():
    old = torch.tensor([1.0, 1.0, 0.0, 2.0])
    new = torch.tensor([1.0 + 1e-6, 1.5, -0.0, 2.0])
    assert share_changed(old, new, torch.float32) == 0.75
    assert share_changed(old, new, torch.bfloat16) == 0.5  # 1 + 1e-6 is 1 there; -0 has other bits than 0


@pytest.mark.parametrize("learning_run", RUNS, ids=lambda run: f"{run.model} {run.dtype} {run.learning_rate}")
def test_every_run_is_a_valid_configuration_that_keeps_all_its_versions(learning_run, tmp_path):
    settings = learning_runs.settings_of(learning_run, tmp_path, tmp_path, tmp_path)
    config = load_config(shipped()["quickstart"], settings)
    assert config.checkpoint.every_steps == 1
    assert config.checkpoint.keep > config.learner.steps
    assert (config.model.dtype, config.learner.lr) == (learning_run.dtype, learning_run.learning_rate)
