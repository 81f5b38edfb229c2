"""Names of what the learner's step measures: data, actor, critic, staleness."""

from __future__ import annotations

from asyncrl.metrics.metric import Metric, means, spread

_DATA = [
    *spread("critic/score", "reward", "sum of a trajectory's rewards before any KL penalty", "answered rows"),
    *spread(
        "critic/rewards", "reward", "sum of a trajectory's rewards after the KL penalty", "answered rows"
    ),
    *spread("response_length", "tokens", "response length; observation tokens count", "rows"),
    *spread("response_length_non_aborted", "tokens", "length of responses with a token", "answered rows"),
    *spread("prompt_length", "tokens", "prompt length; a prompt counts once per trajectory", "rows"),
    *spread(
        "num_turns",
        "turns",
        "number of turns: the prompt, and each run of sampled or observed tokens",
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
            "As `response_length/clip_ratio`, answered rows only",
        ),
    ),
]

_TARGETS = [
    *means(
        "rows",
        ("critic/greedy_score/mean", "reward", "Mean reward of the greedy answers (with `remax`)"),
    ),
    *spread("critic/advantages", "reward", "advantage of a trained token", "trained tokens"),
    *spread(
        "critic/returns",
        "reward",
        "return of a trained token; the advantage where the estimator has no other",
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
        ("actor/pg_loss", "1", "Policy loss, aggregated as `algorithm.aggregation` says"),
        ("actor/pg_clipfrac", "share", "Trained tokens at which the upper clip of the ratio is active"),
        ("actor/pg_clipfrac_lower", "share", "Trained tokens at which the dual clip is active"),
        ("actor/ppo_kl", "nats", "Mean of prox minus current log-prob (k1 estimate)"),
        ("actor/entropy_loss", "nats", "Entropy as it enters the loss (with an entropy coefficient)"),
        ("actor/kl_loss", "nats", "KL to the reference policy as it enters the loss"),
        ("actor/kl_coef", "1", "Coefficient of that KL"),
        ("actor/unsampled_share", "share", "Trained tokens that no version sampled: 0, or masks are wrong"),
        ("actor/grad_norm", "1", "Norm of the gradient before clipping"),
        ("actor/lr", "1", "Learning rate of the update"),
        ("actor/skipped_updates", "share", "Updates left out: not finite, or refused by the guard"),
    ),
    *means(
        "counted tokens",
        ("actor/entropy", "nats", "Entropy of the policy per token, under the weights at the step's start"),
        ("actor/reward_kl_penalty", "nats", "KL to the reference policy that was taken off the reward"),
        ("actor/reward_kl_penalty_coeff", "1", "Coefficient of that penalty, as used"),
    ),
    *means(
        "checked tokens",
        (
            "actor/step_kl",
            "nats",
            "KL (k3) from the policy before the step to the one after it, on an eighth of the groups",
        ),
        (
            "actor/step_gain",
            "1",
            "Sum of advantage times change of log-prob over the step, over the sum of their sizes: 1 to -1",
        ),
    ),
    *means(
        "current tokens",
        (
            "weights/engine_gap_mean",
            "nats",
            "Mean distance of the engine's log-prob from the learner's, on rows sampled by these weights",
        ),
    ),
    Metric("weights/engine_gap_max", "nats", "Largest such distance", "max"),
    Metric("actor/num_updates", "updates", "Optimizer updates of this step", "mean", "ranks"),
    *means(
        "ranks",
        (
            "stream/parts",
            "parts",
            "In which the batch came, where it was not whole at once (`learner.stream`)",
        ),
        ("stream/overlapped_s", "s", "Of the step's stages, on parts before the last: beside generation"),
    ),
]

_CRITIC = means(
    "updates",
    ("critic/vf_loss", "1", "Value loss (with a critic)"),
    ("critic/vf_clipfrac", "share", "Trained tokens at which the value clip is active"),
    ("critic/vpred_mean", "reward", "Mean predicted value during the update"),
    ("critic/grad_norm", "1", "Norm of the critic's gradient before clipping"),
    ("critic/lr", "1", "Learning rate of the critic"),
    ("critic/loss", "1", "The critic's whole loss: `critic/vf_loss`"),
    ("critic/skipped_updates", "share", "Critic updates left out: not finite, or refused by the guard"),
)

_ADVANTAGE = [
    *means(
        "rows",
        (
            "variance_proxy/proxy1_signal_strength",
            "1",
            "Squared norm of the mean gradient; all of these with an optimal token baseline",
        ),
        ("variance_proxy/proxy2_total_power", "1", "Mean of squared advantage times token weight"),
        ("variance_proxy/proxy3_pure_noise", "1", "Larger of 0 and (proxy2 - proxy1) / (rows - 1)"),
        ("variance_proxy/expected_a_squared", "1", "Mean of the squared advantage"),
        ("variance_proxy/expected_w", "1", "Mean of the token weight"),
    ),
]

_STALENESS = [
    Metric(
        "staleness/lag_max_trained", "steps", "Largest lag of a trained token; never over `max_lag`", "max"
    ),
    *means(
        "counted tokens",
        ("staleness/lag_mean", "steps", "Mean lag of trained tokens"),
        ("staleness/lag_share/<number>", "share", "Trained tokens with that lag; the last of 32 or more"),
        ("staleness/masked_share", "share", "Sampled tokens masked because they were over age"),
    ),
    Metric("staleness/trained_tokens", "tokens", "Tokens within the bound on lag", "sum"),
    Metric("staleness/masked_tokens", "tokens", "Sampled tokens masked because they were over age", "sum"),
    *spread(
        "training/off_policy/trajectory_spans",
        "versions",
        "newest minus oldest version of a trajectory, plus one",
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
