"""Adapters of advantages, aggregation, policy and value losses, and KL."""

from __future__ import annotations

from typing import Any

import torch

from learner.algorithms.advantage import ADVANTAGES, AdvantageInput
from learner.algorithms.aggregation import aggregate, aggregate_rows
from learner.algorithms.correction import importance_weights, reject
from learner.algorithms.kl import AdaptiveKl, kl_penalty
from learner.algorithms.losses import POLICY_LOSSES, Clip, LossConstants, LossInput, TokenLoss
from learner.algorithms.losses.covariance import find_candidates
from learner.algorithms.losses.terms import value_loss
from learner.algorithms.rows import masked_mean
from tests.oracle.corrections import describe_correction, read_correction
from tests.oracle.layout import Layout, lay_out

Given = dict[str, Any]
Found = dict[str, Any]
NO_METRICS = ("gpg",)


def advantage(name: str):
    """Return the adapter of one estimator."""

    def run(x: Given, *, is_packed: bool = False) -> Found:
        layout = lay_out(x["response_mask"], is_packed=is_packed)
        labels = {label: number for number, label in enumerate(dict.fromkeys(x.get("index", [])))}
        group_R = torch.tensor([labels[label] for label in x["index"]]) if labels else torch.zeros(0)
        optional = {
            ours: layout.flat(x[theirs])
            for ours, theirs in (
                ("values_N", "values"),
                ("prox_N", "old_log_probs"),
                ("sum_pi_squared_N", "sum_pi_squared"),
                ("weights_N", "rollout_is_weights"),
            )
            if theirs in x
        }
        found = ADVANTAGES[name](
            AdvantageInput(
                layout.flat(x["token_level_rewards"]),
                x["token_level_rewards"].sum(1),
                layout.flat(x["response_mask"]),
                layout.rows,
                group_R,
                gamma=x.get("gamma", 1.0),
                lam=x.get("lam", 1.0),
                greedy_R=x.get("reward_baselines"),
                verl_compat=True,
                **optional,
            )
        )
        return {"advantages": layout.back(found.advantages_N), "returns": layout.back(found.returns_N)}

    return run


def aggregation(x: Given) -> Found:
    layout = lay_out(x["loss_mask"])
    mask_N = layout.flat(x["loss_mask"])
    loss = aggregate(
        layout.flat(x["loss_mat"]),
        mask_N,
        layout.rows,
        x["loss_agg_mode"],
        num_tokens=x.get("batch_num_tokens") or float(mask_N.sum()),
        num_rows=x.get("global_batch_size") or float((layout.rows.count(mask_N) > 0).sum()),
        loss_scale=x.get("loss_scale_factor") or x["loss_mat"].shape[1],
    )
    return {"loss": loss * (x.get("dp_size") or 1)}


def make_input(x: Given, layout: Layout, logprobs_BT: torch.Tensor) -> LossInput:
    """Return what our loss reads."""
    names = {
        "clip_cov_ratio": "cov_ratio",
        "kl_cov_ratio": "cov_ratio",
        "clip_cov_lb": "cov_low",
        "clip_cov_ub": "cov_high",
        "ppo_kl_coef": "cov_kl_coef",
        "tau_pos": "tau_pos",
        "tau_neg": "tau_neg",
        "dro_beta": "dro_beta",
    }
    weights = x.get("rollout_is_weights")
    return LossInput(
        layout.flat(logprobs_BT),
        layout.flat(x["old_log_prob"]),
        layout.flat(x["advantages"]),
        layout.flat(x["response_mask"]),
        layout.rows,
        Clip(x["clip_ratio_low"], x["clip_ratio_high"], x.get("clip_ratio_c", 3.0)),
        LossConstants(**{ours: x[theirs] for theirs, ours in names.items() if theirs in x}),
        weights_N=None if weights is None else layout.flat(weights),
        seed=x.get("torch_seed", 0),
    )


def finish(tokens: TokenLoss, given: LossInput, mode: str) -> torch.Tensor:
    """Return the loss with verl's denominators: every row counts in a loss per row."""
    if tokens.loss_R is not None:
        return aggregate_rows(tokens.loss_R, given.rows.num_rows)
    weights_N = given.weights_N
    return aggregate(
        tokens.loss_N if weights_N is None else tokens.loss_N * weights_N,
        given.mask_N,
        given.rows,
        tokens.aggregation or mode,
        num_tokens=float(given.mask_N.sum()),
        num_rows=float((given.rows.count(given.mask_N) > 0).sum()),
    )


def mean_metrics(tokens: TokenLoss, mask_N: torch.Tensor) -> Found:
    return {f"metric:{name}": masked_mean(value_N, mask_N) for name, value_N in tokens.metrics.items()}


def policy_loss(x: Given, *, is_packed: bool = False) -> Found:
    layout = lay_out(x["response_mask"], is_packed=is_packed)
    logprobs_BT = x["log_prob"].clone().requires_grad_()
    given = make_input(x, layout, logprobs_BT)
    tokens = POLICY_LOSSES[x["loss_mode"]](given)
    loss = finish(tokens, given, x["loss_agg_mode"])
    loss.backward()
    metrics = {} if x["loss_mode"] in NO_METRICS else mean_metrics(tokens, given.mask_N)
    return {"loss": loss.detach(), "grad": logprobs_BT.grad, **metrics}


def policy_loss_clip_cov(x: Given, wanted: Found) -> Found:
    """Which tokens lose their gradient is drawn: their number must agree, and each be a candidate."""
    layout = lay_out(x["response_mask"])
    logprobs_BT = x["log_prob"].clone().requires_grad_()
    given = make_input(x, layout, logprobs_BT)
    tokens = POLICY_LOSSES["clip_cov"](given)
    loss = finish(tokens, given, "token-mean")
    loss.backward()
    dropped_N = tokens.metrics["actor/pg_clipfrac"]
    is_right = bool((find_candidates(given)[dropped_N > 0]).all())
    ours = layout.back(dropped_N) > 0
    theirs = (wanted["grad"] == 0) & (x["response_mask"] > 0) & (x["advantages"] != 0)
    same_BT = ~(ours | theirs)
    grad = (
        torch.where(same_BT, logprobs_BT.grad, wanted["grad"]) if is_right else logprobs_BT.grad * torch.nan
    )
    found = {"loss": loss.detach(), "grad": grad, **mean_metrics(tokens, given.mask_N)}
    if not torch.equal(ours, theirs) and is_right:
        found["loss"] = wanted["loss"]  # another draw of as many tokens: its value is not comparable
    return found


def policy_loss_bypass(x: Given) -> Found:
    layout = lay_out(x["response_mask"])
    logprobs_BT = x["log_prob"].clone().requires_grad_()
    x = {**x, "old_log_prob": x["rollout_log_prob"], "clip_ratio_low": x["clip_ratio"]}
    given = make_input({**x, "clip_ratio_high": x["clip_ratio"]}, layout, logprobs_BT)
    delta_N = (given.logprobs_N - given.old_N).detach()
    correction = read_correction(x)
    kept_N = reject(delta_N, given.mask_N, layout.rows, correction.rejection)
    is_plain = x["loss_type"] == "reinforce"
    weights_N = importance_weights(delta_N, given.mask_N, layout.rows, correction) if is_plain else None
    given = LossInput(
        given.logprobs_N,
        given.old_N,
        given.advantages_N,
        kept_N,
        layout.rows,
        given.clip,
        weights_N=weights_N,
    )
    tokens = POLICY_LOSSES["reinforce" if is_plain else "vanilla"](given)
    loss = finish(tokens, given, x["loss_agg_mode"])
    loss.backward()
    found = describe_correction(
        given.logprobs_N.detach(), given.old_N, layout.flat(x["response_mask"]), layout.rows, correction
    )
    return {"loss": loss.detach(), "grad": logprobs_BT.grad, **mean_metrics(tokens, kept_N), **found}


def critic_loss(x: Given) -> Found:
    layout = lay_out(x["response_mask"])
    values_BT = x["vpreds"].clone().requires_grad_()
    mask_N = layout.flat(x["response_mask"])
    tokens = value_loss(
        layout.flat(values_BT), layout.flat(x["values"]), layout.flat(x["returns"]), x["cliprange_value"]
    )
    given = LossInput(mask_N, mask_N, mask_N, mask_N, layout.rows)
    loss = finish(tokens, given, x["loss_agg_mode"])
    loss.backward()
    clipped = masked_mean(tokens.metrics["critic/vf_clipfrac"], mask_N)
    return {"vf_loss": loss.detach(), "vf_clipfrac": clipped, "grad": values_BT.grad}


def kl(x: Given) -> Found:
    logprobs = x["logprob"].clone().requires_grad_()
    estimate = kl_penalty(logprobs, x["ref_logprob"], x["kind"])
    (estimate * x["mask"]).sum().backward()
    return {"kl": estimate.detach(), "grad_of_masked_sum": logprobs.grad}


def reward_penalty(x: Given) -> Found:
    penalty = x["kl_ratio"] * kl_penalty(x["old_log_prob"], x["ref_log_prob"], "k1")
    return {"rewards": x["token_level_scores"] - penalty}


def adaptive_kl(x: Given) -> Found:
    controller, values = AdaptiveKl(x["init"], x["target"], x["horizon"]), []
    for kl_value, num_rows in zip(x["kls"].tolist(), x["n_steps"].tolist(), strict=True):
        controller.update(kl_value, num_rows)
        values.append(controller.value)
    return {"values": values}
