"""Our algorithms against verl 0.9.1's own numbers, where the vectors are at hand."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.algorithms import advantage, diagnostics, kl
from learner.algorithms.aggregation import aggregate
from learner.algorithms.correction import Correction, importance_weights
from learner.algorithms.policy_loss import POLICY_LOSSES, Clip, LossInput
from learner.algorithms.rows import masked_mean, padded_rows

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    [Path(os.environ["ASYNCRL_ORACLE"])]
    if "ASYNCRL_ORACLE" in os.environ
    else [ROOT.parent / "shared/oracle"]
)
FOLDER = next((folder for folder in FOLDERS if (folder / "verl091.json").is_file()), None)
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="verl's vectors are not here (set ASYNCRL_ORACLE to their folder)"
)


@pytest.fixture(scope="module")
def cases():
    assert FOLDER is not None
    arrays = np.load(FOLDER / "verl091.npz")

    def resolve(table):
        is_array = {name: isinstance(value, dict) and "array" in value for name, value in table.items()}
        return {
            name: torch.from_numpy(arrays[value["array"]].copy()) if is_array[name] else value
            for name, value in table.items()
        }

    table = json.loads((FOLDER / "verl091.json").read_text())["cases"]
    return [
        (name, c["fn"], resolve(c["in"]), resolve(c["out"]))
        for name, c in table.items()
        if c["fn"] in FUNCTIONS
    ]


def rows_of(x):
    return padded_rows(*x.shape)


def flat(x):
    return None if x is None else x.reshape(-1)


def check(name, got, wanted):
    __tracebackhide__ = True
    for key, value in got.items():
        expected = torch.as_tensor(wanted[key], dtype=torch.float32)
        actual = torch.as_tensor(value, dtype=torch.float32).reshape(expected.shape)
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m, k=key: f"{name} {k}: {m}"
        )


def run_advantage(estimator):
    def run(x):
        labels = {label: number for number, label in enumerate(dict.fromkeys(x["index"]))}
        group_R = torch.tensor([labels[label] for label in x["index"]])
        advantages_R = estimator(x["token_level_rewards"].sum(1), group_R)
        return {"advantages": advantages_R[:, None] * x["response_mask"]}

    return run


def run_aggregation(x):
    mask_N, rows = flat(x["loss_mask"]), rows_of(x["loss_mask"])
    num_rows = x.get("global_batch_size") or float((rows.count(mask_N) > 0).sum())
    loss = aggregate(
        flat(x["loss_mat"]),
        mask_N,
        rows,
        x["loss_agg_mode"],
        num_tokens=x.get("batch_num_tokens") or float(mask_N.sum()),
        num_rows=num_rows,
        loss_scale=x.get("loss_scale_factor") or x["loss_mat"].shape[1],
    )
    return {"loss": loss * (x.get("dp_size") or 1)}


def run_policy_loss(x):
    logprobs_BT = x["log_prob"].clone().requires_grad_()
    mask_N, rows = flat(x["response_mask"]), rows_of(x["response_mask"])
    clip = Clip(x["clip_ratio_low"], x["clip_ratio_high"], x["clip_ratio_c"])
    tokens = POLICY_LOSSES[x["loss_mode"]](
        LossInput(flat(logprobs_BT), flat(x["old_log_prob"]), flat(x["advantages"]), mask_N, rows, clip)
    )
    weights = x["rollout_is_weights"]
    loss = aggregate(
        tokens.loss_N if weights is None else tokens.loss_N * flat(weights),
        mask_N,
        rows,
        x["loss_agg_mode"],
        num_tokens=float(mask_N.sum()),
        num_rows=float((rows.count(mask_N) > 0).sum()),
    )
    loss.backward()
    metrics = (
        {}
        if x["loss_mode"] == "gpg"
        else {f"metric:{name}": masked_mean(value_N, mask_N) for name, value_N in tokens.metrics.items()}
    )
    return {"loss": loss.detach(), "grad": logprobs_BT.grad, **metrics}


def read_correction(x):
    threshold = x["rollout_is_threshold"]
    lower, upper = (
        map(float, threshold.split("_")) if isinstance(threshold, str) else (None, float(threshold))
    )
    return Correction(
        level=x["rollout_is"],
        upper=upper,
        lower=lower,
        is_batch_normalized=x.get("rollout_is_batch_normalize", False),
    )


def run_weights(x):
    delta_N, mask_N, rows = flat(x["log_ratio"]), flat(x["response_mask"]), rows_of(x["response_mask"])
    correction = read_correction(x)
    got = {"weights": importance_weights(delta_N, mask_N, rows, correction)}
    if not correction.is_batch_normalized:
        metrics = diagnostics.importance_metrics(delta_N, mask_N, rows, correction)
        got |= {f"metric:{name}": value for name, value in metrics.items()}
    return got


def run_off_policy(x):
    mask_N, rows = flat(x["response_mask"]), rows_of(x["response_mask"])
    found = diagnostics.off_policy_metrics(flat(x["old_log_prob"]), flat(x["rollout_log_prob"]), mask_N, rows)
    return {f"metric:{name}": value for name, value in found.items()}


def run_probabilities(x):
    prox_N, behaviour_N = flat(x["old_log_probs"]), flat(x["rollout_log_probs"])
    found = diagnostics.probability_metrics(prox_N, behaviour_N, flat(x["response_mask"]))
    return {f"metric:training/{name}": value for name, value in found.items()}


def run_kl(x):
    logprobs = x["logprob"].clone().requires_grad_()
    estimate = kl.kl_penalty(logprobs, x["ref_logprob"], x["kind"])
    (estimate * x["mask"]).sum().backward()
    return {"kl": estimate.detach(), "grad_of_masked_sum": logprobs.grad}


FUNCTIONS = {
    "grpo": run_advantage(advantage.grpo),
    "dr_grpo": run_advantage(advantage.dr_grpo),
    "rloo_vectorized": run_advantage(advantage.rloo),
    "agg_loss": run_aggregation,
    "policy_loss": run_policy_loss,
    "rollout_correction_weights": run_weights,
    "offpolicy_metrics": run_off_policy,
    "debug_metrics": run_probabilities,
    "kl_penalty": run_kl,
}
MINIMUM_CASES = {"policy_loss": 240, "rollout_correction_weights": 320, "agg_loss": 100, "kl_penalty": 90}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_case_of_a_family_agrees_with_verl(cases, function):
    chosen = [case for case in cases if case[1] == function]
    if function == "policy_loss":
        chosen = [case for case in chosen if case[2]["loss_mode"] in POLICY_LOSSES]
    assert len(chosen) >= MINIMUM_CASES.get(function, 10)
    for name, _, given, wanted in chosen:
        check(name, FUNCTIONS[function](given), wanted)
