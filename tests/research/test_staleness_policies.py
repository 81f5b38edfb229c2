"""The comparison of staleness policies: its table, its targets, its command."""

import json

import pytest

from research.policies import study as staleness_policies
from research.policies.experiment import RULES, Sizes
from research.policies.study import check, main, measure, select_cells, table

TINY = Sizes(groups_per_step=8, warm_up_steps=10, window_steps=20, num_seeds=1)

FINE = {
    "violations": 0.0,
    "idle": 0.0,
    "share": 0.9,
    "length_bias": 1.0,
    "mean_lag": 1.9,
    "pace": 0.9,
    "least_lag": 1.8,
}
PUBLISHED = {"areal": {"violations": 0.2}, "prime_rl": {"share": 0.7, "pace": 0.7}, "blocking": {"pace": 0.3}}


def made_up(max_lag: int = 8, sigma: float = 1.2, **changed: dict[str, float]):
    setting = {"sigma": sigma, "max_lag": max_lag, "batches_in_flight": 3.0}
    figures = {rule: FINE | PUBLISHED.get(rule, {}) | changed.get(rule, {}) for rule in RULES}
    return {"cells": {rule: {"rule": rule, **setting, **found} for rule, found in figures.items()}}


def test_good_figures_pass():
    assert check(made_up())[0]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"drop": {"violations": 1e-9}}, "no violation of drop"),
        ({"mask": {"length_bias": 0.98}}, "length bias"),
        ({"mask": {"length_bias": 1.02}}, "length bias"),
        ({"mask": {"idle": 0.02}}, "idle over AReaL's"),
        ({"mask": {"share": 0.69}}, "share over prime-rl's"),
        ({"mask": {"pace": 0.69}}, "pace over prime-rl's"),
        ({"blocking": {"pace": 0.95}}, "pace over blocking"),
        ({"mask": {"mean_lag": 3.3}}, "mean lag of mask"),
    ],
)
def test_the_check_names_the_target_that_is_missed(changed, named):
    is_met, verdict = check(made_up(**changed))
    assert not is_met
    assert named in verdict
    assert "sigma 1.2, max_lag 8, 3 batches in flight" in verdict


def test_a_lag_that_no_rule_can_have_is_no_target():
    assert check(made_up(mask={"mean_lag": 3.4, "least_lag": 3.3}))[0]
    assert not check(made_up(mask={"mean_lag": 3.4, "least_lag": 3.1}))[0]


def test_shares_are_compared_where_the_tail_is_not_very_long_and_the_bound_is_wide():
    assert check(made_up(sigma=1.8, mask={"share": 0.6}))[0]
    assert check(made_up(max_lag=2, mask={"share": 0.6}))[0]


def test_the_quick_run_covers_the_targets_of_lag_and_share():
    assert {(cell.sigma, cell.max_lag) for cell in select_cells(quick=True)} == {(1.2, 4), (1.2, 8)}
    assert len(select_cells(quick=False)) == 144


def test_the_command_prints_a_table_per_figure_and_keeps_the_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(staleness_policies, "QUICK_SIZES", TINY)
    target = tmp_path / "figures.json"
    assert main(["--quick", "--json", str(target)]) == 0
    results = json.loads(target.read_text())["figures"]
    printed = capsys.readouterr().out
    assert printed.strip() == table(results)
    assert printed.count("### ") == 7
    assert len(results["cells"]) == 24
    assert results["cells"]["areal/1.2/4/1.5"]["violations"] > 0


def test_a_broken_off_measurement_goes_on_unless_the_code_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(staleness_policies, "QUICK_SIZES", TINY)
    target = tmp_path / "figures.json"
    whole = measure(True, target)
    kept = json.loads(target.read_text())
    assert kept == whole
    name = "mask/1.2/4/1.5"
    kept["cells"] = {name: kept["cells"][name] | {"idle": 0.75}}
    target.write_text(json.dumps(kept))
    assert measure(True, target)["cells"][name]["idle"] == 0.75, "it was not simulated again"
    target.write_text(json.dumps(kept | {"code": "another"}))
    assert measure(True, target) == whole


def test_the_command_line_knows_it():
    with pytest.raises(SystemExit) as ended:
        staleness_policies.main(["--help"])
    assert ended.value.code == 0
