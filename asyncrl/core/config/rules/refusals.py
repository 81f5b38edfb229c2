"""Keys and values that many would write, and why they are refused or what stands for them (pure).

Owns these sentences. Must never decide whether a key is known: the tree does, and is asked first.
"""

from __future__ import annotations

from collections.abc import Mapping

FOREIGN_DISTRIBUTION = (
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logits_processors",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
)
"""Well-known options that draw tokens from another distribution than the policy's."""
BREAKS_LOGPROBS = (
    "Leave it out: answers are sampled with the temperature alone. The learner weighs each token by its "
    "log-prob under the whole vocabulary's distribution, and would take every token that this option favours "
    "or bans for one that the policy favours or avoids"
)
NO_ADAPTER = {
    ("learner.backend", "deepspeed"): (
        "There is no adapter for DeepSpeed: megatron cuts large models, fsdp2 runs any Hugging Face model"
    ),
    ("model.dtype", "fp8"): "The learner does not compute in 8 bits; an engine does: rollout.quantization",
}
"""Reason why a value that many would write is not allowed."""

_LORA = ("adapters stand in one place", "Write lora: {rank, alpha, targets} under 'model'")
_VISION = (
    "there are no images or videos yet",
    "Prompts, trajectories and the wire hold text tokens only: name a text model and a column of text",
)
_MOE = (
    "a mixture of experts needs no key of its own",
    "model.path names it; learner.ep and learner.etp say how ranks share its experts",
)
_STAGE = (
    "weights are always staged",
    "Leave it out: they arrive in shared memory beside the engine while generation goes on",
)
_QUANTIZED = (
    "only an engine's weights are quantised",
    "Set rollout.quantization: fp8 on GPUs, int8 on CPUs; versions and the learner keep model.dtype",
)
_SPECULATIVE = (
    "there is no speculative decoding yet",
    "Leave it out: a draft model would be another set of weights to keep at the policy's version",
)
_COLOCATED = (
    "neither side is put to sleep for the other",
    "They have GPUs of their own, or shares of one: rollout.gpus and learner.gpus",
)
_REMOTE_CODE = (
    "no code is taken from a model folder",
    "Leave it out: choose a model that Transformers and vLLM know by themselves",
)

NOT_THERE: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("lora_rank", "lora_alpha", "lora_path", "peft", "adapter"), _LORA),
    **dict.fromkeys(
        ("vision", "image_key", "images", "video_key", "videos", "multimodal", "processor"), _VISION
    ),
    **dict.fromkeys(("moe", "expert_parallel", "expert_parallel_size", "num_experts"), _MOE),
    "stage": _STAGE,
    **dict.fromkeys(("quantize", "fp8", "load_in_8bit", "load_in_4bit", "qlora"), _QUANTIZED),
    **dict.fromkeys(("speculative", "speculative_config", "speculative_model", "draft_model"), _SPECULATIVE),
    **dict.fromkeys(("colocate", "colocated", "hybrid_engine", "sleep_level"), _COLOCATED),
    "trust_remote_code": _REMOTE_CODE,
}
"""A key or a section, wherever it stands: what is not there, and why or what to do instead."""

_ADAPTIVE = "Write adaptive: {target, horizon} under 'algorithm.kl', and leave it out for a fixed coefficient"
_REVISION = "Write it behind the hub id: path: owner/name@revision"
_GPUS = "Write gpus under 'rollout': an engine is cut over the GPUs of its replica"
_REPLAY = "Write router_replay: r3 under 'rollout': the engine records the experts that it chose"
_OVERLONG = "Write overlong: {buffer_tokens, penalty} under 'reward', and leave it out for none"


def _limit(form: str, *metrics: str) -> str:
    limits = ", ".join(f"{metric}: {{{form}: x}}" for metric in metrics)
    return f"Write limits: {{{limits}}} under 'guard'"


MOVED = {
    "guard.max_kl": _limit("max", "actor/ppo_kl", "rollout_corr/kl"),
    "guard.max_grad_norm": _limit("max", "actor/grad_norm", "critic/grad_norm"),
    "guard.max_clipfrac": _limit("max", "actor/pg_clipfrac"),
    "guard.max_vf_clipfrac": _limit("max", "critic/vf_clipfrac"),
    "guard.min_entropy": _limit("min_share", "actor/entropy"),
    "guard.min_ess": _limit("min", "rollout_corr/rollout_is_eff_sample_size"),
    "guard.min_throughput": _limit("min_share", "perf/throughput"),
    "algorithm.kl_coef": "Write kl: {coef: ...} under 'algorithm'",
    "algorithm.kl.controller": _ADAPTIVE,
    "algorithm.kl.target": _ADAPTIVE,
    "algorithm.kl.horizon": _ADAPTIVE,
    "algorithm.rejection_threshold": 'Write it behind its rejection: rejection: {seq_mean_k1: "0.8_1.25"}',
    "learner.min_lr_ratio": "Write it behind the schedule: lr_schedule: cosine:0.1",
    "model.revision": _REVISION,
    "critic.revision": _REVISION,
    "data.shuffle": "Write order: shuffled or order: sequential under 'data'",
    "data.curriculum": "Write it as the order: order: extra_info.level under 'data'",
    "reward.overlong_buffer_tokens": _OVERLONG,
    "reward.overlong_penalty": _OVERLONG,
    "buffer.managed": "Write url: managed under 'buffer'",
    "learner.router_replay": _REPLAY,
    "rollout.tensor_parallel_size": _GPUS,
    "rollout.tp": _GPUS,
    "rollout.multi_turn": "Write environment: {name, max_turns} under 'rollout'",
    "rollout.agent": "Write gateway: {port} under 'rollout' for agents with a loop of their own",
    "reward.model": "Write fn: {fn: model, path: ...} under 'reward'",
}
"""Keys that other versions or systems have, and what stands for them here."""
