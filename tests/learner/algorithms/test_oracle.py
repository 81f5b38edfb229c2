"""Our algorithms against verl 0.9.1's own numbers: the cases in tests/data, and all if at hand."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.oracle.__main__ import main
from tests.oracle.families import ADVANTAGE_NAMES, FAMILIES, JUDGED, run_case
from tests.oracle.vectors import read_cases

ROOT = Path(__file__).resolve().parents[3]
PREFIX = ROOT / "tests/data/oracle"
CASES = read_cases(PREFIX)
WHOLE = Path(os.environ.get("ASYNCRL_ORACLE", ROOT.parent / "shared/oracle")) / "verl091"
PACKED = [
    *ADVANTAGE_NAMES,
    "policy_loss",
    "rollout_correction_weights",
    "rollout_rejection_mask",
    "offpolicy_metrics",
]


@pytest.mark.parametrize("function", FAMILIES)
def test_every_case_of_a_function_agrees_with_verl(function):
    chosen = [case for case in CASES if case.function == function]
    assert chosen
    missed = {case.name: misses for case in chosen if (misses := run_case(case)[0])}
    assert not missed


def test_no_function_of_the_set_is_left_out():
    assert {case.function for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("function", PACKED)
def test_packed_and_padded_give_the_same_numbers(function):
    """Cut off what lies behind each row's last token; nothing that the mask lets in may change."""
    for case in (case for case in CASES if case.function == function):
        family, mask_BT = FAMILIES[function], case.given["response_mask"]
        padded, packed = family(case.given), family(case.given, is_packed=True)
        assert padded.keys() == packed.keys()
        for name, value in padded.items():
            one, other = torch.as_tensor(value).double(), torch.as_tensor(packed[name]).double()
            if one.dim() == 2:
                one, other = one * mask_BT, other * mask_BT
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (case.name, name)


def test_a_wrong_number_is_a_miss():
    for case in CASES:
        if case.function in JUDGED:
            continue
        key, value = next(
            (key, value)
            for key, value in case.wanted.items()
            if isinstance(value, (float, int, torch.Tensor, dict))
        )
        if isinstance(value, dict):
            continue
        wrong = dataclasses.replace(case, wanted=case.wanted | {key: value * 1.01 + 1.0})
        assert run_case(wrong)[0] == [key]


@pytest.mark.parametrize("has_miss", [False, True])
def test_the_command_prints_a_line_per_function_and_fails_on_a_miss(tmp_path, capsys, monkeypatch, has_miss):
    text = PREFIX.with_name("oracle.json").read_text()
    if has_miss:
        text = text.replace('"strict":1.0', '"strict":0.5')
    (tmp_path / "set.json").write_text(text)
    (tmp_path / "set.npz").write_bytes(PREFIX.with_name("oracle.npz").read_bytes())
    monkeypatch.setattr(sys, "argv", ["tests.oracle", str(tmp_path / "set")])
    code = main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if "missed" not in line} == set(FAMILIES)
    assert code == int(has_miss)
    assert last.endswith(f"of {len(CASES)} cases passed")
    assert last.startswith(f"{len(CASES)} ") is not has_miss


@pytest.mark.long
@pytest.mark.skipif(
    not WHOLE.with_suffix(".json").is_file(), reason="the whole set is not here (ASYNCRL_ORACLE)"
)
def test_the_whole_set_agrees_with_verl():
    missed = {case.name: misses for case in read_cases(WHOLE) if (misses := run_case(case)[0])}
    assert not missed
