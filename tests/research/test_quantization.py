"""The study of quantised rollouts: its runs are valid, and its verdict is by lag and by medians."""

from pathlib import Path

import pytest

from asyncrl.core.config.load import load_config
from configs import shipped
from research.quantization.cells import CELLS, KINDS, LAGS, SEEDS, Cell, settings_of
from research.quantization.study import check, summarise


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell_is_a_valid_run_of_its_kind_lag_and_seed(cell: Cell, tmp_path: Path):
    config = load_config(shipped()["quickstart"], settings_of(cell, 150, tmp_path, tmp_path))
    found = (config.rollout.quantization, config.staleness.max_lag, config.run.seed)
    assert found == (cell.quantization, cell.max_lag, cell.seed)
    assert config.learner.steps % config.eval.every_steps == 0, "the last step is evaluated"


def test_the_verdict_is_the_worst_lag_by_the_median_of_its_seeds():
    assert len(set(CELLS)) == len(KINDS) * len(LAGS) * len(SEEDS)
    accuracies = {None: [0.9, 1.0, 0.2], "int8": [0.855, 0.1, 0.9]}
    cells = [
        {"quantization": kind, "max_lag": lag, "seed": seed, "lag": lag, "gap": 0.0}
        | {"accuracy": accuracies[kind][seed] * (0.5 if kind and lag == LAGS[1] else 1.0)}
        for kind in KINDS
        for lag in LAGS
        for seed in SEEDS
    ]
    summary = summarise(cells)
    assert [(row["accuracy"], row["lowest"], row["highest"]) for row in summary][:2] == [
        (0.9, 0.2, 1.0),
        (0.855, 0.1, 0.9),
    ]
    is_met, verdict = check({"summary": summary})
    assert not is_met and verdict == "worst ratio to a target: 0.50 (accuracy at lag 16)"
