"""A key that is changed changes what is made of it: the services' parts, the loss, the plan.

`EFFECTS` has a line for each key whose effect is cheap to see: what is looked at, and a value that must make
it look otherwise. `SHOWN_BY` names, for the others, the test that shows it with the real part. Every leaf
stands in one of them; `test_every_key_acts` holds besides that each is read at all.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.buffer.composition import build as build_buffer
from asyncrl.buffer.composition import ledger_settings
from asyncrl.buffer.journals.kind import open_journal
from asyncrl.cli.run.start import folder_of
from asyncrl.cli.schema import walk
from asyncrl.control.fleet.autoscaler import autoscaler_of
from asyncrl.control.fleet.rules import make_rules
from asyncrl.control.ray.bootstrap import namespace_of
from asyncrl.control.ray.head import _make_keys
from asyncrl.control.ray.inventory import needed_paths
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.record.sinks.opening import check_sinks, open_sinks
from asyncrl.control.roster import Roster
from asyncrl.core.config.tree import Config
from asyncrl.core.service import ServiceContext
from asyncrl.models.architectures import ModelSize
from asyncrl.planner.plan import checks, choose_backend, derived, machine
from asyncrl.planner.plan.footprint import estimate
from asyncrl.planner.plan.footprint.memory import count_parts
from asyncrl.planner.plan.footprint.sizes import count_tokens, estimate_activations
from learner.algorithms.learning_rate import schedule_lr
from learner.algorithms.objective import make_objective
from learner.batching.batch import build_batch
from learner.guard.guard import Guard
from learner.leader.leader import Leader
from learner.ranks import Ranks
from learner.service import LearnerService
from rollout_service import composition as rollout
from rollout_service.engine.protocol import engine_variant
from rollout_service.environments.registry import load_environment
from rollout_service.evaluation.wiring import make_evaluator
from rollout_service.rewards.registry import load_reward
from tests.learner.parts.samples import make_groups
from weight_sync.control_composition import build_coordinator

ROOT = Path(__file__).parents[4]
REQUIRED = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
NUM_WEIGHTS = 10**6
Changes = Mapping[str, Any]


def config_of(changes: Changes) -> Config:
    """Return the defaults with values by dotted key."""
    sections: dict[str, Any] = {name: dict(values) for name, values in REQUIRED.items()}
    for key, value in changes.items():
        *path, name = key.split(".")
        place = sections
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return Config.model_validate(sections)


# --- what is looked at ---------------------------------------------------------------------


def ledger(config: Config, folder: Path) -> Any:
    return ledger_settings(config)


def journal(config: Config, folder: Path) -> Any:
    opened = open_journal(config.buffer, folder)
    opened.close()
    return type(opened), getattr(opened, "_fsync", None)


def buffer(config: Config, folder: Path) -> Any:
    service = build_buffer(ServiceContext(config, "buffer.0", folder, "id", bind=f"ipc://{folder}/b"))
    service._server.close()
    return service._store._drops_constant_groups


def learner(config: Config, folder: Path) -> Any:
    ranks = Ranks(0, 1, torch.device("cpu"))
    models: Any = SimpleNamespace(policy=None, critic=None, reference=None)
    objective: Any = SimpleNamespace(needs_prox=True)
    service = LearnerService(config, ranks, models, objective, None, None, folder)  # type: ignore[arg-type]
    peak = vars(service._efficiency) if config.metrics.peak_tflops else None
    return service._window._first, service._window._end, peak


def replica(config: Config, folder: Path) -> Any:
    engine = engine_variant(config.rollout.engine).build(config, SimpleNamespace(eos_token_id=0))  # type: ignore[arg-type]
    overlong = rollout._build_overlong(config)
    return (
        rollout._replica_settings(config),
        rollout._group_settings(config),
        overlong and vars(overlong),
        type(engine),
        getattr(engine, "_settings", None),
    )


def evaluator(config: Config, folder: Path) -> Any:
    held_out = SimpleNamespace(first_of_each=lambda number: [one(number)] * 2)
    found = make_evaluator(config, None, None, held_out)  # type: ignore[arg-type]
    return found._settings, [prompt.number for prompt in found._prompts]


def one(number: int) -> Any:
    return SimpleNamespace(prompt=SimpleNamespace(data_source="a"), number=number)


def reward(config: Config, folder: Path) -> Any:
    total = load_reward(config.reward)
    parts = [(part.part.name, part.weight, type(part.part)) for part in total._parts]
    return parts, total._rate._max_error_rate, [functions_in(part.part) for part in total._parts]


def functions_in(part: Any) -> list[str]:
    """Return the names of the functions that a part of a reward calls, however it wraps them."""
    inner = [value for value in vars(part).values() if callable(value) or hasattr(value, "__dict__")]
    return [getattr(one, "__name__", "") or repr(functions_in(one)) for one in inner]


def environment(config: Config, folder: Path) -> Any:
    if config.rollout.environment is None:
        return None
    found = load_environment(config.rollout.environment)
    return found.max_turns, found.make


def services(config: Config, folder: Path) -> Any:
    roster = Roster(config, folder, "id", folder, "rendezvous", 20_000)
    names = ["buffer.0", "rollout.0", *(f"learner.{rank}" for rank in range(roster.config.learner.num_ranks))]
    specs = [roster.spec(name) for name in names]
    return [(one.cpus, one.gpus, one.context.bind, one.context.world_size, one.environment) for one in specs]


def fleet(config: Config, folder: Path) -> Any:
    rules = make_rules(config, config.learner.num_ranks)
    return rules, autoscaler_of(config) and vars(autoscaler_of(config)), machine.count_replicas(config)


def place(config: Config, folder: Path) -> Any:
    keys = _make_keys(config, RunDir(folder))
    return folder_of(config).path, namespace_of(config), keys is None, needed_paths(config)


def plan(config: Config, folder: Path) -> Any:
    parts = count_parts(config, NUM_WEIGHTS, machine.count_replicas(config), NUM_WEIGHTS)
    ports, problems = dict(estimate._ports(config)), list(checks.find_unchecked(config))
    activations = estimate_activations(config, ModelSize(2, 64, 4, 2, 16, 128, 256))
    sums = derived.derive(config), count_tokens(config), activations
    return parts, sums, ports, problems, choose_backend(config)


def sinks(config: Config, folder: Path) -> Any:
    """No service's sink is opened: where its package is installed it would log in."""
    services = [(sink.name, dict(sink.arguments)) for sink in config.metrics.sinks]
    own = config.metrics.model_copy(update={"sinks": ()})
    opened = open_sinks(config.model_copy(update={"metrics": own}), RunDir(folder))
    for sink in opened:
        sink.close(5.0)
    return list(check_sinks(config)), services, [sink.name for sink in opened]


def sync(config: Config, folder: Path) -> Any:
    service = build_coordinator(
        ServiceContext(config, "weight_sync.0", folder, "id", bind=f"ipc://{folder}/s")
    )
    service._server.close()
    state = service._coordination._state
    return state.timing, state.parallelism, state.uses_delta, state.max_unavailable


def leader(config: Config, folder: Path) -> Any:
    keeper = Leader(config, None, None, None).checkpoints.keeper  # type: ignore[arg-type]
    return keeper._max_stall_s, keeper._best_metric


def rates(config: Config, folder: Path) -> Any:
    return [schedule_lr(config.learner.lr, step, config.learner) for step in range(0, 300, 10)]


def guard(config: Config, folder: Path) -> Any:
    found, noise = Guard(config.guard, "float32"), [1.0, 1.05, 0.95]
    for step in range(30):
        usual = {"actor/grad_norm": noise[step % 3], "actor/entropy": 1.0, "actor/ppo_kl": 0.01}
        found.judge(step, usual)
    spike = {"actor/grad_norm": 30.0, "actor/entropy": 0.3, "actor/ppo_kl": 0.5}
    return [found.judge(30 + step, spike) for step in range(5)], found.limits()


def training(config: Config, folder: Path) -> Any:
    """The loss, its gradient and the critic's loss on a batch of strong noise, two steps old."""
    objective = make_objective(config.algorithm, max_lag=3, max_response_tokens=config.rollout.max_tokens)
    batch = build_batch(make_groups(4), 2, {1: 0})
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(batch.num_tokens, generator=generator) for _ in range(4)]
    reference_N, values_N = batch.behaviour_N + 0.3 * noise[0], noise[1]
    batch = dataclasses.replace(batch, reference_N=reference_N, values_N=values_N)
    prox_N = batch.behaviour_N + 1.5 * noise[2] if objective.needs_prox else None
    prepared, _ = objective.prepare(batch, prox_N)
    leaf_N = (batch.behaviour_N + 1.5 * noise[3]).requires_grad_()
    loss, _ = objective.loss(leaf_N, leaf_N.square(), prepared)
    loss.backward()
    assert leaf_N.grad is not None
    value = objective.value_loss(values_N + noise[3], prepared)[0] if objective.needs_values else 0.0
    objective.update_controllers({"actor/reward_kl_penalty": 5.0}, 50)
    sums = (float(loss.detach()), float(leaf_N.grad.abs().sum()), float(value))
    return [round(one, 7) for one in sums], objective.read_controllers()


# --- which key changes what ----------------------------------------------------------------

Look = Callable[[Config, Path], Any]
GAE = {"algorithm.advantage": "gae"}
KL = {"algorithm.kl.coef": 0.3}
ADAPTIVE = {"algorithm.kl.coef": 0.3, "algorithm.kl.where": "reward"}
REJECT = {"algorithm.rejection": {"token_k3": 0.5}}
ONE_REWARD = {"reward.fn": [{"fn": "gsm8k", "name": "a"}]}
OVERLONG = {"reward.overlong.buffer_tokens": 8}
TOOLS = {"rollout.environment.name": "tools"}
GPUS = {"learner.gpus": 1, "rollout.gpus": 1}
COSINE = {"learner.lr_schedule": "cosine:0.1"}
EFFECTS: tuple[tuple[str, Look, Any, Changes], ...] = (
    ("run.name", place, "other", {}),
    ("run.dir", place, "elsewhere", {}),
    ("run.seed", ledger, 7, {}),
    ("model.path", replica, "n", {}),
    ("model.dtype", replica, "float32", {}),
    ("data.train", place, "/other/t.jsonl", {}),
    ("data.eval", place, "/other/e.jsonl", {}),
    ("data.max_prompt_tokens", ledger, 9, {}),
    ("data.order", ledger, "sequential", {}),
    ("reward.fn", reward, "math", {}),
    ("reward.fn.*.fn", reward, {"reward.fn": [{"fn": "math", "name": "a"}]}, ONE_REWARD),
    ("reward.fn.*.weight", reward, {"reward.fn": [{"fn": "gsm8k", "name": "a", "weight": 2.0}]}, ONE_REWARD),
    ("reward.fn.*.name", reward, {"reward.fn": [{"fn": "gsm8k", "name": "b"}]}, ONE_REWARD),
    ("reward.max_error_rate", reward, 0.5, {}),
    ("reward.overlong", replica, {"buffer_tokens": 8}, {}),
    ("reward.overlong.buffer_tokens", replica, 9, OVERLONG),
    ("reward.overlong.penalty", replica, 0.5, OVERLONG),
    ("rollout.replicas.min", fleet, 2, {"rollout.replicas": {"min": 1, "max": 4}}),
    ("rollout.replicas.max", fleet, 3, {"rollout.replicas": {"min": 1, "max": 4}}),
    ("rollout.standby", fleet, 1, {}),
    ("rollout.gpus", services, 1, {}),
    ("rollout.cpus", services, 1.5, {}),
    ("rollout.engine", replica, "scripted", {}),
    ("rollout.group_size", ledger, 4, {}),
    ("rollout.max_tokens", replica, 9, {}),
    ("rollout.temperature", replica, 0.5, {}),
    ("rollout.kv_cache", replica, "keep", {}),
    ("rollout.prefix_caching", replica, False, {}),
    ("rollout.max_sequences", replica, 64, {}),
    ("rollout.kv_cache_bytes", replica, 1 << 20, {}),
    ("rollout.quantization", replica, "int8", {}),
    ("rollout.engine_args", replica, {"block_size": 32}, {}),
    ("rollout.response_tokens", replica, "lognormal:1.0:64", {}),
    ("rollout.stop", replica, ["x"], {}),
    ("rollout.truncated", replica, "mask", {}),
    ("rollout.resume_partial", replica, True, {}),
    ("rollout.gateway", plan, {}, {}),
    ("rollout.gateway.port", plan, 9000, {"rollout.gateway": {}}),
    ("rollout.environment", environment, {"name": "tools"}, {}),
    ("rollout.environment.max_turns", environment, 3, TOOLS),
    ("rollout.environment.branches", replica, 2, TOOLS),
    ("staleness.max_lag", ledger, 1, {}),
    ("staleness.policy", ledger, "drop", {}),
    ("staleness.max_wait_s", ledger, 3.0, {}),
    ("staleness.ready_batches", ledger, 2, {}),
    ("buffer.journal", journal, "none", {}),
    ("buffer.fsync", journal, "always", {}),
    ("buffer.memory_bytes", ledger, 1 << 29, {}),
    ("buffer.lease_s", ledger, 5.0, {}),
    ("buffer.max_attempts", ledger, 7, {}),
    ("algorithm.advantage", training, "rloo", {}),
    ("algorithm.gamma", training, 0.9, GAE),
    ("algorithm.lam", training, 0.9, GAE),
    ("algorithm.loss", training, "gspo", {}),
    ("algorithm.clip", training, [0.01, 0.02], {}),
    ("algorithm.dual_clip", training, 1.1, {}),
    ("algorithm.value_clip", training, 0.01, GAE),
    ("algorithm.entropy_coeff", training, 0.5, {}),
    ("algorithm.aggregation", training, "token-sum", {}),
    ("algorithm.prox", training, "loglinear", {"algorithm.veto": 0.0}),
    ("algorithm.correction", training, "disabled", {}),
    ("algorithm.is_threshold", training, 1.1, {}),
    ("algorithm.normalize_weights", training, True, {}),
    ("algorithm.rejection", training, {"token_k3": 1.5}, REJECT),
    ("algorithm.veto", training, 0.5, {}),
    ("algorithm.kl.coef", training, 0.1, KL),
    ("algorithm.kl.where", training, "reward", KL),
    ("algorithm.kl.estimator", training, "k1", KL),
    ("algorithm.kl.adaptive", training, {"target": 0.2}, ADAPTIVE),
    (
        "algorithm.kl.adaptive.target",
        training,
        4.9,
        {**ADAPTIVE, "algorithm.kl.adaptive": {"horizon": 100.0}},
    ),
    ("algorithm.kl.adaptive.horizon", training, 50.0, {**ADAPTIVE, "algorithm.kl.adaptive": {"target": 0.2}}),
    ("algorithm.verl_compat", training, True, REJECT),
    ("algorithm.drop_constant_groups", buffer, False, {}),
    ("critic.path", plan, "other", GAE),
    ("learner.backend", plan, "fsdp2", {"learner.dp": 2}),
    ("learner.tp", services, 2, {}),
    ("learner.pp", services, 2, {}),
    ("learner.cp", services, 2, {}),
    ("learner.dp", services, 2, {}),
    ("learner.gpus", services, 1, {}),
    ("learner.cpus", services, 0.5, {}),
    ("learner.groups_per_step", ledger, 8, {}),
    ("learner.minibatches", plan, 2, {}),
    ("learner.max_tokens_per_microbatch", plan, 4096, {}),
    ("learner.lr", rates, 1e-3, {}),
    ("learner.lr_schedule", rates, "cosine", {}),
    ("learner.warmup_steps", rates, 20, {}),
    ("learner.recompute", plan, "full", {}),
    ("learner.offload", plan, True, GPUS),
    ("learner.deterministic", services, True, GPUS),
    ("learner.steps", rates, 100, {"learner.lr_schedule": "cosine"}),
    ("weight_sync.backend", plan, "gloo", GPUS),
    ("weight_sync.folder", plan, "memory://bucket", {}),
    ("weight_sync.parallelism", sync, 3, {}),
    ("weight_sync.max_unavailable", sync, 0.5, {}),
    ("weight_sync.deadline_s", sync, 9.0, {}),
    ("weight_sync.encoding", sync, "delta", {}),
    ("eval.every_steps", plan, 5, {"data.eval": "e"}),
    ("eval.prompts", evaluator, 7, {}),
    ("eval.samples", evaluator, 2, {}),
    ("eval.replicas", ledger, 2, {"data.eval": "e"}),
    ("eval.temperature", evaluator, 0.5, {}),
    ("checkpoint.every_steps", plan, 7, {}),
    ("checkpoint.best_metric", leader, "critic/rewards/mean", {}),
    ("checkpoint.max_stall_s", leader, 3.0, {}),
    ("guard.action", guard, "reduce_lr", {}),
    ("guard.warmup_steps", guard, 40, {}),
    ("guard.z_score", guard, 1000.0, {}),
    ("guard.limits", guard, {"actor/grad_norm": None}, {}),
    ("guard.limits.*.max", guard, {"guard.limits": {"actor/grad_norm": {"max": 9.0}}}, {}),
    ("guard.limits.*.min", guard, {"guard.limits": {"actor/entropy": {"min": 3.0}}}, {}),
    ("guard.limits.*.max_times", guard, {"guard.limits": {"actor/grad_norm": {"max_times": 9.0}}}, {}),
    (
        "guard.limits.*.over_steps",
        guard,
        {"guard.limits": {"actor/grad_norm": {"max_times": 20.0, "over_steps": 3}}},
        {},
    ),
    ("guard.limits.*.min_share", guard, {"guard.limits": {"actor/entropy": {"min_share": 0.5}}}, {}),
    ("metrics.tensorboard", sinks, False, {}),
    ("metrics.sinks", sinks, ["wandb"], {}),
    ("metrics.sinks.*.name", sinks, {"metrics.sinks": ["swanlab"]}, {"metrics.sinks": ["wandb"]}),
    (
        "metrics.sinks.*.arguments",
        sinks,
        {"metrics.sinks": [{"mlflow": {"nope": 1}}]},
        {"metrics.sinks": ["mlflow"]},
    ),
    ("metrics.profile_steps", learner, [3, 5], {}),
    ("metrics.peak_tflops", learner, 2.0, {"metrics.peak_tflops": 1.0}),
    ("launcher.ray", place, "10.0.0.1:6379", {}),
    ("launcher.host", services, "127.0.0.1", {}),
    ("launcher.curve", place, "on", {"launcher.host": "127.0.0.1"}),
    ("launcher.api_port", plan, 8765, {}),
    ("launcher.start_deadline_s", fleet, 9.0, {}),
    ("launcher.max_restarts", fleet, 1, {}),
)
"""Key, what is looked at, another value, and what else must be set for the key to matter."""


SHOWN_BY: Mapping[str, tuple[str, str]] = {
    "rollout.router_replay": (
        "tests/rollout/experts/test_recorded_experts.py",
        "test_a_run_s_groups_and_bounds_have_room_for_experts",
    ),
    "format": (
        "tests/core/config/test_format.py",
        "test_a_file_that_names_an_older_form_is_brought_up_to_date",
    ),
    "buffer.url": (
        "tests/buffer/journals/redis/test_redis_tls.py",
        "test_a_certificate_that_does_not_fit_is_a_config_error_that_names_what_to_set",
    ),
    "checkpoint.keep": (
        "tests/learner/checkpoint/test_checkpoint.py",
        "test_the_newest_are_kept_and_a_later_abandoned_branch_is_not",
    ),
    "checkpoint.keep_best": (
        "tests/learner/checkpoint/test_checkpoint.py",
        "test_the_best_are_kept_besides_the_newest",
    ),
    "learner.betas": (
        "tests/learner/backends/test_model.py",
        "test_logprobs_and_gradients_are_hugging_faces_on_packed_rows",
    ),
    "learner.compile": (
        "tests/learner/backends/fsdp2/test_fsdp2.py",
        "test_torch_compile_changes_nothing_but_the_rounding",
    ),
    "learner.ep": (
        "tests/learner/backends/experts/test_expert_parallel.py",
        "test_two_ranks_that_share_experts_train_as_one_process_does",
    ),
    "learner.etp": (
        "tests/learner/backends/experts/test_expert_parallel.py",
        "test_a_layout_that_would_train_wrongly_or_not_at_all_is_refused_by_name",
    ),
    "learner.kernels": (
        "tests/pretended_gpu/learner/test_te_layers.py",
        "test_layers_of_transformer_engine_are_taken_where_they_are_asked_for_and_can_run",
    ),
    "model.lora.alpha": (
        "tests/learner/lora/test_adapter_arithmetic.py",
        "test_updates_of_adapters_are_those_of_peft",
    ),
    "model.lora.path": (
        "tests/learner/lora/test_adapter_arithmetic.py",
        "test_an_adapter_that_peft_saved_is_trained_on",
    ),
    "model.lora.rank": (
        "tests/learner/lora/test_adapter_arithmetic.py",
        "test_an_adapter_that_does_not_fit_is_refused",
    ),
    "model.lora.targets": (
        "tests/learner/lora/test_adapter_arithmetic.py",
        "test_an_adapter_that_peft_saved_is_trained_on",
    ),
    "learner.overlap": (
        "tests/learner/backends/test_parallel.py",
        "test_two_ranks_train_as_one_process_does",
    ),
    "learner.router_aux_loss": (
        "tests/learner/backends/experts/test_router_losses.py",
        "test_the_balance_evens_the_loads_of_experts",
    ),
    "learner.router_z_loss": (
        "tests/learner/backends/experts/test_router_losses.py",
        "test_losses_change_nothing_but_the_gradient_and_without_them_there_are_no_metrics",
    ),
    "learner.sequence_parallel": (
        "tests/learner/backends/test_parallel.py",
        "test_two_ranks_train_as_one_process_does",
    ),
    "learner.shared_prompt": (
        "tests/learner/backends/sharing/test_shared_prompt.py",
        "test_outputs_and_gradients_are_those_of_packed_rows",
    ),
    "learner.stream": (
        "tests/learner/streaming/test_streamed_run.py",
        "test_a_streamed_run_ends_with_the_weights_of_one_that_waits",
    ),
    "run.record": (
        "tests/learner/record/test_replay.py",
        "test_recorded_steps_train_again_bit_by_bit_from_a_checkpoint",
    ),
    "learner.vpp": (
        "tests/learner/backends/test_parallel.py",
        "test_two_ranks_train_as_one_process_does",
    ),
    "rollout.environment.name": (
        "tests/rollout/environments/test_registry.py",
        "test_what_cannot_be_loaded_is_refused_with_the_reason",
    ),
    "rollout.gateway.reasoning_parser": (
        "tests/rollout/gateway/test_gateway_tools.py",
        "test_an_answer_is_recognised_with_its_reasoning_and_without_it",
    ),
    "rollout.gateway.session_deadline_s": (
        "tests/rollout/gateway/test_gateway.py",
        "test_missing_siblings_end_a_group_at_its_deadline_with_an_error_in_the_stream",
    ),
    "rollout.gateway.max_branches": (
        "tests/rollout/gateway/test_gateway.py",
        "test_an_agent_that_changes_its_history_where_no_branch_is_left_ends_its_group",
    ),
    "rollout.gateway.strict": (
        "tests/rollout/gateway/test_gateway_requests.py",
        "test_a_replicas_gateway_is_as_strict_as_its_configuration",
    ),
    "rollout.gateway.tool_call_parser": (
        "tests/rollout/gateway/test_gateway_tools.py",
        "test_a_conversation_with_tools_is_recorded_as_it_was_sampled",
    ),
    "weight_sync.bucket_bytes": (
        "tests/weight_sync/faults/test_many_syncs.py",
        "test_five_hundred_syncs_in_a_row_leave_every_process_as_it_was",
    ),
    "weight_sync.probe_every": (
        "tests/system/exactness/test_exactness.py",
        "test_every_version_brings_a_probe_of_tokens_that_were_trained_and_says_when_to_check",
    ),
    "data.train.*.path": (
        "tests/rollout/data/test_sources.py",
        "test_sources_are_numbered_one_after_the_other_and_know_their_weights",
    ),
    "data.train.*.weight": (
        "tests/rollout/data/test_sources.py",
        "test_sources_are_numbered_one_after_the_other_and_know_their_weights",
    ),
    "data.train.*.filter": (
        "tests/rollout/data/test_sources.py",
        "test_filters_leave_out_by_function_by_length_and_what_came_before",
    ),
    "data.eval.*.path": (
        "tests/rollout/data/test_sources.py",
        "test_sources_are_numbered_one_after_the_other_and_know_their_weights",
    ),
    "data.eval.*.weight": (
        "tests/rollout/data/test_sources.py",
        "test_sources_are_numbered_one_after_the_other_and_know_their_weights",
    ),
    "data.eval.*.filter": (
        "tests/rollout/data/test_sources.py",
        "test_filters_leave_out_by_function_by_length_and_what_came_before",
    ),
    "learner.grad_clip": (
        "tests/learner/backends/test_backend.py",
        "test_the_optimizer_gets_a_gradient_that_is_clipped_to_its_norm",
    ),
}
"""Keys whose effect takes a real part, and the test that has it: its file and its name."""
NOT_SHOWN: Mapping[str, str] = {
    "critic.lr": "the critic's optimizer has it in place of learner.lr: it takes a backend to see it",
    "learner.weight_decay": "handed to Megatron's and torch's AdamW; tests only switch it off",
}
"""Keys that are only known to be read (`test_every_key_acts`), and why."""


def look_at(look: Look, changes: Changes, folder: Path) -> str:
    """Return what is seen, without what differs from one look to the next: addresses, and the folder."""
    folder.mkdir()
    seen = repr(look(config_of(changes), folder)).replace(str(folder), "-")
    return re.sub(r"0x[0-9a-f]+", "-", seen)


@pytest.mark.parametrize(("key", "look", "value", "others"), EFFECTS, ids=[line[0] for line in EFFECTS])
def test_another_value_makes_something_else(
    tmp_path: Path, key: str, look: Look, value: Any, others: Changes
) -> None:
    changes = {**others, **(value if "*" in key else {key: value})}
    before, again = look_at(look, others, tmp_path / "a"), look_at(look, others, tmp_path / "b")
    assert before == again, "else any change would be seen"
    assert before != look_at(look, changes, tmp_path / "c"), f"{look.__name__} sees no change"


def test_every_key_has_an_effect_that_is_seen_or_a_reason_why_not() -> None:
    keys, seen = {leaf.key for leaf in walk()}, [line[0] for line in EFFECTS]
    assert len(seen) == len(set(seen))
    assert sorted([*seen, *SHOWN_BY, *NOT_SHOWN]) == sorted(keys)


@pytest.mark.parametrize("key", sorted(SHOWN_BY))
def test_a_test_that_is_named_is_there(key: str) -> None:
    file, name = SHOWN_BY[key]
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
