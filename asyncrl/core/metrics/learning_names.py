"""Metrics of the learner's step: data, actor, critic, staleness."""

from __future__ import annotations

from asyncrl.core.metrics.metric import Metric, means, spread

_DATA = [
    *spread("critic/score", "reward", "sum of a trajectory's rewards before any KL penalty", "answered rows"),
    *spread(
        "critic/rewards", "reward", "sum of a trajectory's rewards after the KL penalty", "answered rows"
    ),
    *spread("response_length", "tokens", "response length; observation tokens count", "rows"),
    *spread(
        "response_length_non_aborted", "tokens", "length of a response that has a token", "answered rows"
    ),
    *spread("prompt_length", "tokens", "prompt length; a prompt counts once per trajectory", "rows"),
    *spread(
        "num_turns",
        "turns",
        "number of turns: the prompt, and each segment of sampled or observed tokens",
        "rows",
    ),
    *means(
        "rows",
        ("response_length/clip_ratio", "share", "Trajectories that were cut at `rollout.max_tokens`"),
        ("response/aborted_ratio", "share", "Trajectories without a response token"),
        (
            "prompt_length/clip_ratio",
            "share",
            "Trajectories whose prompt has `data.max_prompt_tokens` tokens",
        ),
    ),
    *means(
        "answered rows",
        (
            "response_length_non_aborted/clip_ratio",
            "share",
            "Same as `response_length/clip_ratio`, over answered rows only",
        ),
    ),
]

_TARGETS = [
    *means(
        "rows", ("critic/greedy_score/mean", "reward", "Mean reward of the greedy answers (with `remax`)")
    ),
    *spread("critic/advantages", "reward", "advantage of a trained token", "trained tokens"),
    *spread(
        "critic/returns",
        "reward",
        "return of a trained token; the advantage if the estimator computes no returns",
        "trained tokens",
    ),
    *spread(
        "critic/values", "reward", "predicted value of a trained token (with a critic)", "trained tokens"
    ),
    *means(
        "trained tokens",
        (
            "critic/vf_explained_var",
            "1",
            "1 - var(returns - values) / (var(returns) + 1e-5), unbiased variances (with a critic)",
        ),
    ),
]

_ACTOR = [
    *means(
        "updates",
        ("actor/loss", "1", "Policy loss plus entropy and KL terms"),
        ("actor/pg_loss", "1", "Policy loss under `algorithm.aggregation`"),
        ("actor/pg_clipfrac", "share", "Trained tokens at which the upper clip of the ratio is active"),
        ("actor/pg_clipfrac_lower", "share", "Trained tokens at which the dual clip is active"),
        ("actor/ppo_kl", "nats", "Mean of prox minus current log-prob (k1 estimate)"),
        ("actor/entropy_loss", "nats", "Aggregated entropy of the loss (with an entropy coefficient)"),
        ("actor/kl_loss", "nats", "Aggregated KL to the reference policy (with `kl.where: loss`)"),
        ("actor/kl_coef", "1", "Coefficient of the KL to the reference policy"),
        ("actor/unsampled_share", "share", "Trained tokens that no version sampled: above 0 by a wrong mask"),
        ("actor/grad_norm", "1", "Norm of the gradient before clipping"),
        ("actor/lr", "1", "Learning rate of the update"),
        ("actor/skipped_updates", "share", "Updates not applied: not finite, or refused by the guard"),
        ("actor/router_entropy", "nats", "Entropy of a mixture's routers per token and layer"),
        ("actor/router_flip_rate", "share", "Replayed rows (token, layer) that the router would not choose"),
        ("actor/router_unrecorded", "share", "Tokens per layer without a row to replay: the router chose"),
        ("actor/router_aux_loss", "1", "Balance of experts, per row and layer; 1: even (with a router loss)"),
        ("actor/router_z_loss", "1", "Square of routers' log-sum-exp per token and layer (the same)"),
    ),
    Metric("actor/expert_load_max", "1", "Most positions of an expert in a layer; 1: even", "max"),
    Metric("actor/expert_load_min", "1", "Fewest positions of an expert in a layer; 1: even", "min"),
    *means(
        "counted tokens",
        ("actor/entropy", "nats", "Entropy per token under the weights at the step's start"),
        ("actor/reward_kl_penalty", "nats", "KL to the reference policy that was subtracted from the reward"),
        ("actor/reward_kl_penalty_coeff", "1", "Coefficient of `actor/reward_kl_penalty` in this step"),
    ),
    *means(
        "checked tokens",
        (
            "actor/step_kl",
            "nats",
            "KL (k3) from the policy before the step to the policy after it, on an eighth of the groups",
        ),
        (
            "actor/step_gain",
            "1",
            "Sum of advantage x change of log-prob, divided by the sum of absolute values: -1 to 1",
        ),
    ),
    *means(
        "current tokens",
        (
            "weights/engine_gap_mean",
            "nats",
            "Mean |engine - learner| log-prob, on tokens of lag 0 (cache kept: in rows without older ones)",
        ),
    ),
    Metric(
        "weights/engine_gap_max", "nats", "Largest |engine - learner| log-prob, on the same tokens", "max"
    ),
    Metric("weights/engine_gap_tokens", "tokens", "Tokens that the two gaps above rest on", "sum"),
    Metric("actor/num_updates", "updates", "Optimizer updates of this step", "mean", "ranks"),
    *means(
        "ranks",
        ("stream/parts", "parts", "Parts of a streamed batch (`learner.stream`)"),
        ("stream/overlapped_s", "s", "Stage time on all parts but the last, which overlaps generation"),
    ),
]

_CRITIC = means(
    "updates",
    ("critic/vf_loss", "1", "Value loss (with a critic)"),
    ("critic/vf_clipfrac", "share", "Trained tokens at which the value clip is active"),
    ("critic/vpred_mean", "reward", "Mean predicted value during the update"),
    ("critic/grad_norm", "1", "Norm of the critic's gradient before clipping"),
    ("critic/lr", "1", "Learning rate of the critic"),
    ("critic/loss", "1", "Loss of the critic, equal to `critic/vf_loss`"),
    ("critic/skipped_updates", "share", "Critic updates not applied: not finite, or refused by the guard"),
)

_ADVANTAGE = [
    *means(
        "rows",
        (
            "variance_proxy/proxy1_signal_strength",
            "1",
            "Squared norm of the mean gradient (all with an optimal token baseline)",
        ),
        ("variance_proxy/proxy2_total_power", "1", "Mean of squared advantage times token weight"),
        ("variance_proxy/proxy3_pure_noise", "1", "Larger of 0 and (proxy2 - proxy1) / (rows - 1)"),
        ("variance_proxy/expected_a_squared", "1", "Mean of the squared advantage"),
        ("variance_proxy/expected_w", "1", "Mean of the token weight"),
    )
]

_STALENESS = [
    Metric(
        "staleness/lag_max_trained", "steps", "Largest lag of a trained token; never over `max_lag`", "max"
    ),
    *means(
        "counted tokens",
        ("staleness/lag_mean", "steps", "Mean lag of trained tokens"),
        ("staleness/lag_share/<number>", "share", "Trained tokens with that lag; 32 means 32 or more"),
        ("staleness/masked_share", "share", "Sampled tokens masked for a lag over `max_lag`"),
    ),
    Metric("staleness/trained_tokens", "tokens", "Sampled tokens with a lag of at most `max_lag`", "sum"),
    Metric("staleness/masked_tokens", "tokens", "Sampled tokens masked for a lag over `max_lag`", "sum"),
    *spread(
        "training/off_policy/trajectory_spans",
        "versions",
        "number of versions of a trajectory: newest minus oldest, plus one",
        "answered rows",
    ),
    *spread(
        "training/off_policy/trajectory_staleness",
        "steps",
        "lag of the newest token of a trajectory",
        "answered rows",
    ),
    *spread(
        "training/off_policy/trajectory_staleness_worst",
        "steps",
        "lag of the oldest token of a trajectory",
        "answered rows",
    ),
]

LEARNING = (*_DATA, *_TARGETS, *_ACTOR, *_CRITIC, *_ADVANTAGE, *_STALENESS)
