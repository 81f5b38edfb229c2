"""Metrics of rank 0, the supervisor, evaluations and the guard."""

from __future__ import annotations

from asyncrl.core.metrics.metric import Metric, means, singles

FIRST_AFTER_START = "training/is_first_after_start"
"""1 on the first row after a start or a resume: its time also holds that start."""

_PROGRESS = singles(
    "leader",
    ("training/global_step", "steps", "Number of the learner step, from 1"),
)
_PASSES = singles(
    "supervisor",
    ("training/epoch", "passes", "Pass over the data of the last drawn prompt, from 0"),
    (
        FIRST_AFTER_START,
        "1",
        "1 on the first row after a start or resume; its times include the start",
    ),
)

_TIME = singles(
    "leader",
    ("timing_s/step", "s", "Time from the end of the previous step to the end of this step"),
    ("timing_s/wait", "s", "Wait for a complete batch"),
    (
        "timing_s/wait_<cause>",
        "s",
        "Wait by another cause: paused, buffer (responses), checkpoint (the previous one), publisher",
    ),
    ("timing_s/other", "s", "Remainder of `timing_s/step` after all stages and waits"),
    (
        "timing_s/<stage>",
        "s",
        "Time of a stage on rank 0: fetch, old_log_prob, ref, values, update_critic, update_actor, ...",
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
        ("perf/time_per_step", "s", "Equal to `timing_s/step`"),
        ("perf/throughput", "tokens/s", "Tokens per second per learner rank"),
        ("perf/learner_tokens_per_s", "tokens/s", "Tokens per second of all learner ranks"),
        ("perf/learner_idle_share", "share", "Share of `timing_s/step` spent waiting for a batch"),
        (
            "perf/learner_idle/<cause>",
            "share",
            "Share of `timing_s/step` per wait: batch, paused, buffer, checkpoint, publisher",
        ),
        ("perf/learner_busy_share", "share", "1 minus the sum of `perf/learner_idle/*`"),
        (
            "weights/publish_s",
            "s",
            "Time to hand new weights to the publisher, since the previous row",
        ),
        (
            "weights/publish_gather_s",
            "s",
            "Part of `weights/publish_s`: gather of shards and wait for other ranks",
        ),
        ("weights/publish_copy_s", "s", "Part of `weights/publish_s`: copy into shared memory"),
        ("weights/publish_digest_s", "s", "Part of `weights/publish_s`: digests of the buckets"),
        ("weights/publish_call_s", "s", "Part of `weights/publish_s`: calls to the publisher"),
        ("weights/publish_other_s", "s", "Part of `weights/publish_s`: the remainder"),
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
        ("perf/mfu/critic", "share", "Same as `perf/mfu/actor`, of update_critic (with a critic)"),
        ("perf/peak_tflops", "TFLOP/s", "Peak of one rank's device, the divisor of MFU"),
    ),
    Metric("perf/total_num_tokens", "tokens", "Prompt (once per trajectory) and response tokens", "sum"),
    Metric(
        "perf/computed_tokens", "tokens", "Tokens that a forward pass computes: shared prompts once", "sum"
    ),
    Metric("perf/attention_pairs", "pairs", "(Query, key) pairs that causal attention computes", "sum"),
    Metric("perf/max_memory_allocated_gb", "GiB", "Peak GPU memory of tensors since the start", "max"),
    Metric(
        "perf/max_memory_reserved_gb",
        "GiB",
        "Peak GPU memory reserved by the allocator since the start",
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
        "Fewest tokens of a data-parallel shard if the batch is cut in ticket order",
    ),
    ("global_seqlen/max", "tokens", "Most tokens of such a shard"),
    ("global_seqlen/minmax_diff", "tokens", "Difference of `global_seqlen/max` and `/min`"),
    ("global_seqlen/balanced_min", "tokens", "Fewest tokens of a shard after balancing"),
    ("global_seqlen/balanced_max", "tokens", "Most tokens of a shard after balancing"),
    ("global_seqlen/mean", "tokens", "Mean tokens of a shard"),
)

_ROLLOUT = singles(
    "supervisor",
    ("perf/rollout_tokens", "tokens", "Tokens that all replicas sampled since the previous row"),
    (
        "perf/rollout_tokens_s",
        "s",
        "Time of `perf/rollout_tokens`; in the first row, since the first token",
    ),
    ("perf/rollout_tokens_per_s", "tokens/s", "Sampled tokens per second of all replicas, over the last 2 s"),
    (
        "perf/rollout_idle_share",
        "share",
        "Share of replica time without a request in flight, over the last 2 s",
    ),
    (
        "perf/rollout_idle/<cause>",
        "share",
        "Share of replica time per wait: start, weights, swap, lease, group (tools, rewards), ...",
    ),
    ("perf/rollout_busy_share", "share", "1 minus the sum of `perf/rollout_idle/*`"),
    ("perf/rollout_replicas", "replicas", "Rollout replicas of the run"),
    (
        "perf/rollout_cache_hit_share",
        "share",
        "Prompt tokens found in engines' KV caches, of those of the requests of the last 2 s",
    ),
    (
        "perf/rollout_preemptions",
        "requests",
        "Requests so far that lost their KV cache; at a swap with `kv_cache: recompute` all that run do",
    ),
    ("perf/rollout_kv_usage", "share", "KV cache in use, of the fullest engine"),
    (
        "perf/rollout_limit",
        "share",
        "Samples that a replica may have unfinished, of a batch and a quarter; of the most limited one",
    ),
    (
        "perf/rollout_limit/<reason>",
        "changes",
        "Changes of that limit so far: cut (preemptions), trim and grow (fewer or more fit in the KV cache)",
    ),
    (
        "rollout/overlong_share",
        "share",
        "Answers in the buffer of `reward.overlong`, of those scored in the last 2 s",
    ),
    ("rollout/overlong_penalty", "reward", "Mean penalty of the answers scored in the last 2 s"),
    (
        "rollout/reward_errors/<cause>",
        "answers",
        "Answers so far without a score, by cause: raised, timeout, not_finite, died, ...",
    ),
    (
        "rollout/rewards/<source>/<reason>",
        "answers",
        "Answers so far of a data source: rewarded, or the reason of a zero or a failure (docs/rewards.md)",
    ),
    (
        "reward/<part>/mean",
        "reward",
        "Mean of one part of the reward before weighting, over answers scored in the last 2 s",
    ),
    (
        "gateway/overridden",
        "count",
        "Sampling parameters of agents' calls so far replaced by the run's (`rollout.gateway`)",
    ),
    (
        "gateway/overridden/<parameter>",
        "count",
        "Replaced parameters so far by name: temperature, seed, top_p, n, ...",
    ),
    ("weights/version", "1", "Oldest policy version that a replica serves"),
    ("weights/published", "1", "Newest policy version that the publisher holds"),
    ("weights/bytes", "bytes", "Size of `weights/published`"),
    ("weights/bytes_sent", "bytes", "Bytes that the publisher has sent so far, counted once per round"),
    ("weights/bytes_copied", "bytes", "Bytes of versions so far that receivers got by a transfer"),
    ("weights/bytes_mapped", "bytes", "Bytes of versions so far that receivers mapped on their node instead"),
    ("weights/maps_failed", "count", "Copies so far that a receiver could not map; a transfer follows"),
    ("weights/transfer_s", "s", "Last successful round, from its offer to the last verified copy"),
    (
        "weights/rounds",
        "count",
        "Rounds so far: transfers of one version to a set of replicas, or its mapping by them",
    ),
    (
        "weights/rounds_failed",
        "count",
        "Rounds so far that did not reach every replica; each is retried",
    ),
    (
        "weights/failed/<cause>",
        "count",
        "Failed rounds so far by cause: transport, silent, digest, deadline, ...",
    ),
    (
        "weights/culprits",
        "count",
        "Faults so far attributed to a replica or the publisher (`asyncrl inspect weights`)",
    ),
    ("weights/fenced", "replicas", "Fenced replicas: no leases until they hold the newest version"),
    (
        "weights/deferred",
        "count",
        "Publishes so far deferred for lack of a free buffer; a later one has newer weights",
    ),
    ("weights/skipped", "versions", "Versions so far superseded before any transfer"),
    ("weights/missed_swaps", "count", "Swaps so far that took longer than the deadline"),
    ("weights/failed_loads", "count", "Loads so far that failed in an engine; each is retried"),
    ("weights/apply_s", "s", "Longest of the replicas' last swaps (generation is paused)"),
    ("weights/probe_gap_max", "nats", "Largest `weights/probe_gap/<number>`"),
    (
        "weights/probe_gap/<number>",
        "nats",
        "Mean |engine - learner| log-prob of a replica's last probe, by its number (up to 64 replicas)",
    ),
    ("buffer/depth", "groups", "Complete groups not yet reserved by the learner"),
    (
        "buffer/dropped/stale",
        "groups",
        "Groups so far with a token over `max_lag`; their prompts were issued again",
    ),
    ("buffer/dropped/zero_variance", "groups", "Zero-variance groups so far, replaced by new prompts"),
    (
        "buffer/dropped/masked",
        "groups",
        "Groups so far whose answers were all truncated and masked, replaced by new prompts",
    ),
    ("buffer/dropped/poison", "groups", "Groups so far whose attempts failed, or killed their replicas"),
    (
        "buffer/dropped/<cause>",
        "groups",
        "Groups so far without a reward, by cause: a failure's reason (docs/rewards.md)",
    ),
    ("buffer/dropped/guard", "groups", "Groups so far whose update the guard refused"),
    ("buffer/dropped/oversized", "groups", "Groups so far with a row longer than a microbatch"),
    (
        "buffer/placed/<reason>",
        "groups",
        "Groups leased so far, of several sources, by whose KV cache has that source: hit, copy, new",
    ),
    (
        "buffer/residue",
        "tickets",
        "Tickets and prompts that the account cannot explain; not 0 is a bug",
    ),
)

_EVALUATION = singles(
    "evaluation",
    ("val/id", "1", "Number of the evaluation"),
    ("val/version", "1", "Policy version that was evaluated"),
    (
        "val-core/<source>/<variable>/<metric>",
        "1",
        "Of a source or of all (`held_out`): `acc/mean@k`, `acc/maj@k`, ..., k = `eval.samples` (data.md)",
    ),
    (
        "val-aux/<source>/<variable>/<metric>",
        "1",
        "Further results and bounds: `response_length/mean`, `acc/pass@n` for n below k",
    ),
    ("val-aux/<source>/clip_ratio", "share", "Held-out answers truncated at the token limit"),
    ("val-aux/num_prompts", "prompts", "Held-out prompts that were answered"),
    (
        "val-aux/num_failed",
        "answers",
        "Held-out answers that failed: counted as wrong, excluded from mean rewards",
    ),
    (
        "val-aux/num_refused",
        "parts",
        "Parts of the evaluation with sums that are not finite; all other metrics are left out",
    ),
)

_CHECKPOINT = singles(
    "leader",
    ("checkpoint/wait_s", "s", "Wait for the previous checkpoint, since the previous row"),
    ("checkpoint/skipped", "count", "Checkpoints skipped because the previous one was still being written"),
    ("checkpoint/write_s", "s", "Background write of the checkpoint that ended since the previous row"),
    ("checkpoint/bytes", "bytes", "Size of the checkpoint that ended since the previous row"),
)

_RECORD = singles(
    "leader",
    ("record/bytes", "bytes", "Bytes written to `run.record` since the previous row"),
    (
        "record/lost_steps",
        "count",
        "Steps and weight digests that rank 0 could not write to `run.record` since the previous row",
    ),
)

_GUARD = singles(
    "guard",
    ("guard/<signal>", "count", "Findings of one kind since the learner's start: kl_spike, not_finite, ..."),
    ("guard/rollbacks", "count", "Rollbacks of the guard to a checkpoint"),
    ("guard/lr_scale", "1", "Factor of the guard on the learning rate"),
    ("guard/is_kl_off", "1", "1 after the guard set the KL coefficient to 0"),
    (
        "guard/out_of_memory",
        "count",
        "Out-of-memory errors of a rank, each retried with smaller microbatches",
    ),
)

_SINKS = singles(
    "supervisor",
    (
        "metrics/sink_dropped/<sink>",
        "rows",
        "Rows so far dropped because the sink failed or is too slow",
    ),
    ("metrics/sink_waiting/<sink>", "rows", "Rows queued for a sink"),
)

_AROUND = (*_CHECKPOINT, *_RECORD, *_GUARD, *_SINKS)
RUN = (*_PROGRESS, *_PASSES, *_TIME, *_PERFORMANCE, *_BALANCE, *_ROLLOUT, *_EVALUATION, *_AROUND)
