"""Names of what rank 0, the supervisor, evaluations and the guard add to the rows."""

from __future__ import annotations

from asyncrl.metrics.metric import Metric, means, singles

_PROGRESS = singles(
    "leader",
    ("training/global_step", "steps", "Learner steps done; from 1"),
)
_PASSES = singles(
    "supervisor",
    ("training/epoch", "passes", "Traversals of the data begun before this one, by prompts drawn"),
    (
        "training/is_first_of_life",
        "1",
        "1 on the first row after a start or resume: its time holds the start",
    ),
)

_TIME = singles(
    "leader",
    ("timing_s/step", "s", "From the end of the step before to the end of this one"),
    ("timing_s/wait", "s", "Waiting for a complete batch"),
    (
        "timing_s/wait_<cause>",
        "s",
        "Waiting for something else: paused, buffer (its answers), checkpoint (the one before), publisher",
    ),
    ("timing_s/other", "s", "Of `timing_s/step`, what no stage has timed; all the others add up to the rest"),
    (
        "timing_s/<stage>",
        "s",
        "Seconds of a stage on rank 0, as fetch, old_log_prob, ref, values, update_critic, update_actor",
    ),
    (
        "timing_per_token_ms/<stage>",
        "ms/token",
        "1000 x `timing_s/<stage>` / (prompt and response tokens of the step); stages that compute on tokens",
    ),
)

_PERFORMANCE = [
    *singles(
        "leader",
        ("perf/time_per_step", "s", "As `timing_s/step`"),
        ("perf/throughput", "tokens/s", "Tokens per second and learner rank"),
        ("perf/learner_tokens_per_s", "tokens/s", "Tokens per second of all learner ranks"),
        ("perf/learner_idle_share", "share", "Of `timing_s/step`, waiting for a batch"),
        (
            "perf/learner_idle/<cause>",
            "share",
            "Of `timing_s/step`, waiting: batch, paused, buffer, checkpoint, publisher",
        ),
        ("perf/learner_busy_share", "share", "The rest: this and `perf/learner_idle/*` add up to 1"),
        ("weights/publish_s", "s", "Handing new weights to the publisher, since the row before"),
        ("weights/publish_gather_s", "s", "Of it, gathering shards, and waiting for the other ranks"),
        ("weights/publish_copy_s", "s", "Of it, copying into shared memory"),
        ("weights/publish_digest_s", "s", "Of it, digests of the buckets"),
        ("weights/publish_call_s", "s", "Of it, calls of the publisher"),
        ("weights/publish_other_s", "s", "Of it, the rest"),
        (
            "perf/mfu/actor",
            "share",
            "FLOPs of forward and backward / (update_actor time x peak of the devices)",
        ),
        (
            "perf/mfu/actor_infer",
            "share",
            "FLOPs of one forward pass / (old_log_prob time x peak of the devices)",
        ),
        ("perf/mfu/critic", "share", "As `perf/mfu/actor` for update_critic (with a critic)"),
        ("perf/peak_tflops", "TFLOP/s", "The peak of one rank's device that MFU divides by"),
    ),
    Metric("perf/total_num_tokens", "tokens", "Prompt (once per trajectory) and response tokens", "sum"),
    Metric("perf/attention_pairs", "pairs", "(Query, key) pairs that causal attention computes", "sum"),
    Metric("perf/max_memory_allocated_gb", "GiB", "Most GPU memory that tensors held since the start", "max"),
    Metric(
        "perf/max_memory_reserved_gb",
        "GiB",
        "Most GPU memory reserved by the allocator since the start",
        "max",
    ),
    *means(
        "ranks",
        ("perf/cpu_memory_used_gb", "GiB", "Memory in use on the node, all processes"),
        ("perf/process_memory_gb", "GiB", "Resident memory of a learner rank"),
    ),
]

_BALANCE = singles(
    "leader",
    (
        "global_seqlen/min",
        "tokens",
        "Fewest tokens of a data-parallel share, were the batch cut in ticket order",
    ),
    ("global_seqlen/max", "tokens", "Most tokens of such a share"),
    ("global_seqlen/minmax_diff", "tokens", "Their difference"),
    ("global_seqlen/balanced_min", "tokens", "Fewest tokens of a share after balancing"),
    ("global_seqlen/balanced_max", "tokens", "Most tokens of a share after balancing"),
    ("global_seqlen/mean", "tokens", "Mean tokens of a share"),
)

_ROLLOUT = singles(
    "supervisor",
    ("perf/rollout_tokens", "tokens", "Tokens that all replicas sampled since the row before"),
    (
        "perf/rollout_tokens_s",
        "s",
        "Time that `perf/rollout_tokens` took; at first from the first token on",
    ),
    ("perf/rollout_tokens_per_s", "tokens/s", "Sampled tokens per second of all replicas, over the last 2 s"),
    (
        "perf/rollout_idle_share",
        "share",
        "Of the replicas' time, without a request in flight, over the last 2 s",
    ),
    (
        "perf/rollout_idle/<cause>",
        "share",
        "Of it, by what a replica waited for: start, weights, swap, lease, group (tools, rewards), ...",
    ),
    ("perf/rollout_busy_share", "share", "The rest: this and `perf/rollout_idle/*` add up to 1"),
    ("perf/rollout_replicas", "replicas", "Rollout replicas of the run"),
    (
        "rollout/overlong_share",
        "share",
        "Of the answers scored in the last 2 s, those inside the buffer of `reward.overlong`, if it is set",
    ),
    ("rollout/overlong_penalty", "reward", "What these answers lost, as a mean over all of them"),
    (
        "rollout/reward_errors/<cause>",
        "answers",
        "Answers so far that could not be scored, by kind: raised, timeout, not_finite, died, ...",
    ),
    (
        "reward/<part>/mean",
        "reward",
        "Mean of a part of the reward before weighting, of the answers scored in the last 2 s",
    ),
    (
        "gateway/overridden",
        "count",
        "Sampling parameters of agents' calls so far that the run's replaced, with `rollout.gateway`",
    ),
    ("gateway/overridden/<parameter>", "count", "Of them, by parameter: temperature, seed, top_p, n, ..."),
    ("weights/version", "1", "Policy version that all replicas serve: the oldest of theirs"),
    ("weights/published", "1", "Newest policy version that the publisher holds"),
    ("weights/bytes", "bytes", "Size of that version"),
    ("weights/bytes_sent", "bytes", "What the publisher has sent so far, once for all members of a round"),
    ("weights/transfer_s", "s", "The last round that worked, from its offer to its last verified copy"),
    ("weights/rounds", "count", "Rounds so far: a version on its way to a set of replicas"),
    (
        "weights/rounds_failed",
        "count",
        "Of them, those that did not reach everyone; they are tried again",
    ),
    ("weights/failed/<cause>", "count", "Of these, by cause: transport, silent, digest, deadline, ..."),
    ("weights/culprits", "count", "Times that somebody was blamed; the log and `inspect weights` name them"),
    ("weights/fenced", "replicas", "Replicas that missed a deadline and get no leases until they catch up"),
    ("weights/deferred", "count", "Publishes so far that found no free buffer; newer weights went later"),
    ("weights/skipped", "versions", "Versions so far that no replica got, because a newer one was there"),
    ("weights/missed_swaps", "count", "Swaps so far that took longer than the deadline"),
    ("weights/failed_loads", "count", "Loads so far that an engine could not do; each is tried again"),
    ("weights/apply_s", "s", "Longest of the replicas' last swaps: generation paused, weights loaded"),
    ("buffer/depth", "groups", "Complete groups that wait for the learner"),
    ("buffer/dropped/stale", "groups", "Groups dropped over age so far; their prompts were issued again"),
    ("buffer/dropped/uniform", "groups", "Groups so far with equal rewards, replaced by new prompts"),
    (
        "buffer/dropped/masked",
        "groups",
        "Groups so far whose answers were all cut and masked, replaced likewise",
    ),
    ("buffer/dropped/poison", "groups", "Groups given up so far after every attempt failed"),
    ("buffer/dropped/guard", "groups", "Groups so far whose update the guard refused"),
    ("buffer/dropped/oversized", "groups", "Groups so far with a row longer than a microbatch"),
    ("buffer/residue", "tickets", "What the laws of the ledger leave unexplained; anything but 0 is a bug"),
)

_EVALUATION = singles(
    "evaluation",
    ("val/id", "1", "Number of the evaluation"),
    ("val/version", "1", "Policy version that was evaluated"),
    (
        "val-core/<source>/<variable>/<metric>",
        "1",
        "Of a source, or of all (`held_out`), k = `eval.samples`: `acc/mean@k`, `acc/maj@k`, ... (data.md)",
    ),
    (
        "val-aux/<source>/<variable>/<metric>",
        "1",
        "Further held-out results: `response_length/mean`, `acc/pass@n` for n below k; with bounds too",
    ),
    ("val-aux/<source>/clip_ratio", "share", "Held-out answers cut at the token limit"),
    ("val-aux/num_prompts", "prompts", "Held-out prompts that were answered"),
    ("val-aux/num_failed", "answers", "Held-out answers that failed: wrong, and in no mean of rewards"),
    ("val-aux/num_refused", "parts", "Parts of it whose sums were no finite numbers; it has no other figure"),
)

_CHECKPOINT = singles(
    "leader",
    ("checkpoint/wait_s", "s", "Waiting for the checkpoint before to be written, since the row before"),
    ("checkpoint/skipped", "count", "Checkpoints that were due and left out: the one before still ran"),
    ("checkpoint/write_s", "s", "Writing a checkpoint beside training, where one ended since the row before"),
    ("checkpoint/bytes", "bytes", "Size of that checkpoint"),
)

_RECORD = singles(
    "leader",
    ("record/bytes", "bytes", "Written to the run's record (`run.record`) since the row before"),
    (
        "record/lost_steps",
        "count",
        "Steps, or weights' digests, that rank 0 could not record since then: the disk",
    ),
)

_GUARD = singles(
    "guard",
    ("guard/<signal>", "count", "Findings of that kind since the learner's start: kl_spike, not_finite, ..."),
    ("guard/rollbacks", "count", "Times that the guard went back to a checkpoint"),
    ("guard/lr_scale", "1", "What the guard multiplies the learning rate by"),
    ("guard/is_kl_off", "1", "1 once the guard has set the KL coefficient to 0"),
    ("guard/out_of_memory", "count", "Times that a rank ran out of memory and made its microbatches smaller"),
)

_SINKS = singles(
    "supervisor",
    (
        "metrics/sink_dropped/<sink>",
        "rows",
        "Rows so far that a sink did not take: it failed, or is too slow",
    ),
    ("metrics/sink_waiting/<sink>", "rows", "Rows on their way to a sink"),
)

_AROUND = (*_CHECKPOINT, *_RECORD, *_GUARD, *_SINKS)
RUN = (*_PROGRESS, *_PASSES, *_TIME, *_PERFORMANCE, *_BALANCE, *_ROLLOUT, *_EVALUATION, *_AROUND)
