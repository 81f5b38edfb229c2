"""Values that follow from a configuration, each with the rule that it follows by (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.core.config.prefix_caching import choose_prefix_caching
from asyncrl.core.config.rules.recorded_experts import count_expert_bytes
from asyncrl.core.config.tree import Config
from asyncrl.core.staleness import max_open_tickets
from asyncrl.core.variants import engine_facts


@dataclass(frozen=True)
class Derived:
    """A value that nobody wrote: its name, and the rule that gives it."""

    name: str
    value: int | float | str
    rule: str


@dataclass(frozen=True)
class InFlight:
    """Most work that is generated or stored and not trained yet.

    Attributes:
        groups: Open tickets.
        trajectories: Of these groups.
        tokens: Sampled ones of these trajectories.
        sequences: That all engines work on at once.
        rule: Rule that sets the number of groups.
    """

    groups: int
    trajectories: int
    tokens: int
    sequences: int
    rule: str


def count_in_flight(config: Config, max_group_bytes: int, replicas: int) -> InFlight:
    """Return what may be open at once: what the bound on lag admits, or what fits into the buffer.

    Args:
        max_group_bytes: Of the largest group that a replica may push.
    """
    rollout, learner, max_lag = config.rollout, config.learner, config.staleness.max_lag
    groups = max_open_tickets(learner.groups_per_step, max_lag)
    rule = f"(staleness.max_lag {max_lag} + 1) x learner.groups_per_step {learner.groups_per_step}"
    fitting = config.buffer.memory_bytes // max_group_bytes
    if fitting < groups:
        groups, rule = fitting, f"buffer.memory_bytes / {max_group_bytes} bytes of the largest group"
    rows = groups * rollout.group_size
    sequences = min(rows, rollout.max_sequences * replicas)
    return InFlight(groups, rows, rows * rollout.max_tokens, sequences, rule)


def derive(config: Config) -> list[Derived]:
    """Return what a reader of the configuration would otherwise work out."""
    learner, rollout = config.learner, config.rollout
    rows = learner.groups_per_step * rollout.group_size
    longest = config.data.max_prompt_tokens + rollout.max_tokens
    found = [
        Derived("rows of a step", rows, "learner.groups_per_step x rollout.group_size"),
        Derived(
            "groups of an update",
            learner.groups_per_step // learner.minibatches,
            "learner.groups_per_step / learner.minibatches",
        ),
        Derived(
            "optimizer updates", learner.steps * learner.minibatches, "learner.steps x learner.minibatches"
        ),
        Derived("learner ranks", learner.num_ranks, "learner.tp x pp x cp x dp"),
        Derived("tokens of a row", longest, "data.max_prompt_tokens + rollout.max_tokens, at most"),
        Derived(
            "prompts trained", learner.steps * learner.groups_per_step, "learner.steps x groups_per_step"
        ),
        Derived("checkpoints", _num_due(learner.steps, config.checkpoint.every_steps), _CHECKPOINTS),
    ]
    if config.data.eval is not None and config.eval.every_steps:
        num = 1 + _num_due(learner.steps, config.eval.every_steps)
        found.append(Derived("evaluations", num, "at step 0, every eval.every_steps, at the end"))
    if config.learner.min_lr_ratio != 1.0:
        last = learner.lr * learner.min_lr_ratio
        found.append(Derived("last learning rate", last, "learner.lr x the ratio of learner.lr_schedule"))
    if num_bytes := count_expert_bytes(config):
        rule = "rollout.router_replay: layers x experts of a token, before the column is packed"
        found.append(Derived("bytes of a token's experts", num_bytes, rule))
    if rollout.replicas.is_elastic or rollout.standby:
        found.append(Derived("rollout replicas", _range(config), "rollout.replicas, rollout.standby"))
    if rollout.num_nodes > 1:
        rule = "rollout.engine_args: nnodes; each has its part of rollout.gpus and rollout.cpus"
        found.append(Derived("nodes of a replica", rollout.num_nodes, rule))
    if len(config.by_engine) > 1:
        engines = ", ".join(rollout.engines)
        found.append(Derived("engines", engines, "rollout.engine: replica n takes the n-th, cyclically"))
    for name, one in config.by_engine.items():
        of_it, engine = (f" of {name}" if len(config.by_engine) > 1 else ""), engine_facts(name)
        is_shared, why = choose_prefix_caching(one)
        found.append(Derived(f"prefix caching{of_it}", "on" if is_shared else "off", why))
        if engine.logprob_tolerance:
            why = f"{engine.title} adds in another order in another batch: runs are not equal to the bit"
            found.append(Derived(f"log-probs{of_it}", f"within {engine.logprob_tolerance:g}", why))
    curve = "encrypted, with keys" if config.launcher.has_curve else "plain"
    found.append(Derived("connections", curve, "launcher.curve, launcher.host"))
    return found


def _range(config: Config) -> str:
    replicas, standby = config.rollout.replicas, config.rollout.standby
    serving = f"{replicas.min} to {replicas.max}" if replicas.is_elastic else str(replicas.start)
    return f"{serving}, and {standby} warm" if standby else serving


_CHECKPOINTS = "every checkpoint.every_steps, and at the end"


def _num_due(steps: int, every: int) -> int:
    return -(-steps // every)
