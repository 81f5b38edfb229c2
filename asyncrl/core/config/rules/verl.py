"""verl's keys and what stands for them here, for who brings its configuration along (pure).

Owns the keys that most of its configurations set; docs/from-verl.md has all of them, with the differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

PAGE = "docs/from-verl.md"
SECTIONS = (
    "actor_rollout_ref",
    "trainer",
    "async_training",
    "custom_reward_function",
    "reward_model",
    "global_profiler",
    "ray_kwargs",
)
"""Sections that verl has and the tree has not."""
KEYS: Mapping[str, str] = {
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "learner.groups_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_tokens",
    "data.seed": "run.seed",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.targets",
    "actor_rollout_ref.model.lora_adapter_path": "model.lora.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "learner.recompute",
    "actor_rollout_ref.actor.strategy": "learner.backend",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "learner.minibatches",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "learner.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "learner.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.dual_clip",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "algorithm.loss",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coeff",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl.where",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl.estimator",
    "actor_rollout_ref.actor.optim.lr": "learner.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "learner.warmup_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "learner.weight_decay",
    "actor_rollout_ref.actor.grad_clip": "learner.grad_clip",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "learner.tp",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "learner.pp",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.gpus",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.engine_args",
    "actor_rollout_ref.rollout.quantization": "rollout.quantization",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": "rollout.router_replay",
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.use_kl_in_reward": "algorithm.kl.where",
    "algorithm.kl_penalty": "algorithm.kl.estimator",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coef",
    "critic.model.path": "critic.path",
    "critic.optim.lr": "critic.lr",
    "critic.cliprange_value": "algorithm.value_clip",
    "custom_reward_function.path": "reward.fn",
    "custom_reward_function.name": "reward.fn",
    "reward_model.reward_manager": "reward.fn",
    "async_training.staleness_threshold": "staleness.max_lag",
    "trainer.total_epochs": "learner.steps",
    "trainer.total_training_steps": "learner.steps",
    "trainer.experiment_name": "run.name",
    "trainer.project_name": "run.name",
    "trainer.default_local_dir": "run.dir",
    "trainer.logger": "metrics.sinks",
    "trainer.nnodes": "rollout.replicas",
    "trainer.n_gpus_per_node": "learner.gpus",
    "trainer.save_freq": "checkpoint.every_steps",
    "trainer.test_freq": "eval.every_steps",
}
MAX_TOLD = 6
"""Of the keys below one that is not known."""


def hint_for(key: str, value: object) -> str:
    """Return what stands here for verl's `key`, or for the keys in the map `value` below it; else nothing.

    >>> hint_for("algorithm.adv_estimator", "gae")
    "It is verl's; here it is algorithm.advantage (docs/from-verl.md)"
    """
    if key in KEYS:
        return f"It is verl's; here it is {KEYS[key]} ({PAGE})"
    told = [f"{path[len(key) + 1 :]} -> {KEYS[path]}" for path in _paths(key, value) if path in KEYS]
    if told:
        more = ", ..." if len(told) > MAX_TOLD else ""
        return f"It is verl's, key by key in {PAGE}: {', '.join(told[:MAX_TOLD])}{more}"
    return f"It is verl's: {PAGE} says what stands for each of its keys here" if key in SECTIONS else ""


def _paths(key: str, value: object) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield key
        return
    for name, below in value.items():
        yield from _paths(f"{key}.{name}", below)
