"""Explanations of findings, in words (pure).

For each kind: the event, its likely causes in order, the change to make, and the reason why the reward may
still look fine. Invariant: every kind that a signal names has its text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from learner.guard.signals import Finding


@dataclass(frozen=True)
class Explanation:
    """The text of one kind of finding. `causes` are in order: look at the first one first."""

    what: str
    causes: tuple[str, ...]
    change: str
    reward: str


EXPLANATIONS = {
    "weights_differ": Explanation(
        "engine and learner hold different weights: their log-probs differ on tokens that the weights being "
        "trained have sampled",
        (
            "the engine keeps an old copy of a tensor: the gap grows with every step",
            "learner and engine compute different models (configuration, dtype): then from the first step on",
            "the engine's kernels are less exact than the learner's: quantised weights, a lower precision",
        ),
        "set weight_sync.probe_every: 1, which refuses such weights; report model and vLLM version",
        "the rewards are those of the tokens: but another policy sampled them than the one that is trained",
    ),
    "unsampled_tokens": Explanation(
        "tokens are trained that no version sampled: loss mask and tokens do not belong together",
        (
            "the loss mask is off by a position, in a custom loss or in an environment of your own",
            "an environment marks its own tokens (observations, tool answers) as sampled",
        ),
        "compare loss_mask with the spans of a trajectory; 'asyncrl rollouts' shows both",
        "most tokens are still trained with the right advantage: learning is only worse than it could be",
    ),
    "wrong_direction": Explanation(
        "updates move the policy against its advantages: what was good becomes less probable",
        (
            "the loss, or the advantage, has the wrong sign: a custom loss, advantage or reward",
            "another term outweighs the policy's: the KL or the entropy coefficient",
            "the optimizer's momentum is of another objective: the reward changed over a resume",
            "advantages belong to other tokens: groups or masks are mixed up",
        ),
        "check the sign of the custom function on one batch by hand; lower the KL or entropy coefficient",
        "at first the reward only stays where it is: it falls once the bad answers have become frequent",
    ),
    "large_steps": Explanation(
        "each step moves the policy further than the clip range means it to",
        (
            "learner.lr is too high",
            "learner.warmup_steps is too small: AdamW's first steps are as long as learner.lr",
            "too many minibatches for one batch",
            "the batch is too small: one group decides",
        ),
        "divide learner.lr by three to ten, then learner.warmup_steps: 20; healthy is below 0.05",
        "the rewards of this batch were sampled before the step: they fall several steps later",
    ),
    "kl_spike": Explanation(
        "the policy moved far from the one that sampled, in one step",
        (
            "the gradient exploded: look at actor/grad_norm of this step and the one before",
            "learner.lr is too high, or the KL coefficient too low",
            "the clip range is too wide for this many updates per batch",
            "trainer and sampler compute in different precision: look at weights/engine_gap_mean",
            "no warm-up: AdamW's first steps are as long as learner.lr whatever the gradient",
        ),
        "halve learner.lr, set learner.warmup_steps, raise the KL coefficient; healthy is below 0.05",
        "the rewards of this batch were sampled before the step: they fall only when the new weights sample",
    ),
    "grad_norm_spike": Explanation(
        "gradients are much larger than before; clipping bounds their length, not their direction",
        (
            "the gradient exploded on a few sequences: very long answers, or tokens of probability near 0",
            "learner.lr is too high: the spikes grow from step to step",
            "importance weights or ratios without a bound: look at rollout_corr/rollout_is_max",
            "bfloat16 where float32 is needed: in the norm layers, the logits or the main parameters",
            "no warm-up",
            "the minibatch is too small: one group decides",
        ),
        "lower learner.lr or learner.grad_clip, warm up, larger minibatches; single spikes are usual",
        "AdamW divides by the gradient's size: one spike moves little, and the damage is in its moments",
    ),
    "not_finite": Explanation(
        "a value of the training is NaN or infinite; an update with such a gradient is not applied",
        (
            "the gradient exploded in the steps before",
            "learner.lr is too high, or the KL coefficient too high for a large KL",
            "an overflow in low precision: bfloat16 sums, or an exponential of a large log-ratio",
            "a batch without a token that counts: a mean over nothing",
            "a NaN earlier in the log, in whichever metric: the first one is the place to look",
        ),
        "resume before the first NaN with a lower learner.lr; compare with model.dtype: float32",
        "rewards are counted from sampled text: they stay finite until the NaN weights reach the engines",
    ),
    "clip_fraction": Explanation(
        "many tokens are beyond the clip range: they give no gradient",
        (
            "learner.lr is too high for this many minibatches per step",
            "the clip range algorithm.clip is too narrow",
            "the batch is stale and the loss clips around the behaviour policy: look at staleness/lag_mean",
            "trainer and sampler disagree: look at training/rollout_probs_diff_mean",
        ),
        "fewer minibatches, a lower learner.lr, or a decoupled correction; 0.05-0.2 is usual",
        "what is left of the batch still points the right way: learning slows down, it does not turn round",
    ),
    "value_clip_fraction": Explanation(
        "the critic moves further per step than its clip range allows",
        (
            "the critic's learning rate is too high",
            "the critic had no warm-up: its first values are far from the returns",
            "the returns' scale changed: rewards or the KL penalty in the reward",
            "the clip range of the value is too narrow for returns of this size",
        ),
        "lower the critic's learning rate, warm it up before the policy trains; healthy is below 0.05",
        "advantages are only noisier: the policy still follows the reward, on a worse baseline",
    ),
    "entropy_collapse": Explanation(
        "the policy became nearly deterministic, without more reward: all samples of a group are alike",
        (
            "learner.lr is too high, or too many updates per batch",
            "no entropy bonus and a symmetric clip: raise the upper end of algorithm.clip",
            "the KL coefficient is too low to keep the policy near the reference",
            "the reward can be had by one fixed answer",
        ),
        "raise the upper clip (0.28), lower learner.lr, add a KL term or an entropy bonus; read the answers",
        "a policy that repeats one good answer has a high mean reward; it can no longer find a better one",
    ),
    "low_ess": Explanation(
        "a few tokens carry most of the importance weight: the batch counts for less than its size",
        (
            "the data is too old: staleness.max_lag is too high for this learning rate",
            "learner.lr is too high: consecutive versions are far apart",
            "trainer and sampler compute different log-probs: precision, temperature or the chat template",
            "algorithm.is_threshold is too high",
            "the batch is small",
        ),
        "lower staleness.max_lag, learner.lr or algorithm.is_threshold; see training/rollout_probs_diff_mean",
        "rewards do not depend on the weights: only the gradient becomes noisy",
    ),
    "low_throughput": Explanation(
        "the learner trains far fewer tokens per second than at the start",
        (
            "it waits for batches: look at timing_s/wait and perf/learner_idle_share; too few replicas",
            "answers became short or the batch shrank: look at response_length/mean",
            "the machine is shared, swaps, or a disk is slow: look at timing_s/save_checkpoint",
        ),
        "add replicas (asyncrl scale), or look at the stage whose timing_s grew; no action is taken",
        "speed is not learning: the same steps give the same reward, later",
    ),
    "limit": Explanation(
        "a metric is beyond the limit that guard.limits gives it",
        (
            "what the metric measures has changed: docs/metrics.md says what it is",
            "the limit does not fit this run: compare with the metric's course so far",
        ),
        "look at what else changed at that step; widen the limit, or take it away with null",
        "the reward and this metric need not have anything to do with each other",
    ),
    "out_of_memory": Explanation(
        "a microbatch did not fit into memory; its step is tried again with smaller ones",
        (
            "learner.max_tokens_per_microbatch is too high for the longest answers",
            "answers became longer: look at response_length/max",
            "another process uses the device",
        ),
        "set learner.max_tokens_per_microbatch to what the guard went down to; the gradient is the same",
        "nothing was trained on the way: the result is the same, only slower",
    ),
}


def describe(finding: Finding) -> str:
    """Return one line: what was seen, and how far from its limit and from the usual."""
    text = f"{finding.kind}: {finding.metric} is {finding.value:.4g}"
    if math.isfinite(finding.limit):
        text += f", limit {finding.limit:.4g}"
    if finding.z is not None:
        text += f", {finding.z:+.1f} robust deviations from the last steps"
    return text


def summarise(finding: Finding) -> str:
    """Return one sentence: what was seen, what it means, and the first cause to look at."""
    found = EXPLANATIONS[finding.kind]
    return f"{describe(finding)}: {found.what}. Look first at: {found.causes[0]}"


def explain(finding: Finding) -> str:
    """Return the whole text of a finding, several lines."""
    found = EXPLANATIONS[finding.kind]
    causes = "".join(f"\n    {number}. {cause}" for number, cause in enumerate(found.causes, 1))
    return (
        f"{describe(finding)}\n  what happened: {found.what}\n  likely causes, in order:{causes}"
        f"\n  what to change: {found.change}\n  why the reward may still look fine: {found.reward}"
    )
