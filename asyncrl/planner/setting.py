"""Setting of a simulation: the keys of a run's configuration that decide its speed and its lags.

Owns the reading of a configuration for a simulation, and the intervals of the actors' idle messages: as long
as the computing time of a fleet of thousands demands. They change no decision of the state machines.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.buffer.composition import ledger_settings
from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.rules.replica import count_max_groups
from asyncrl.control.fleet.machine import FleetRules
from asyncrl.control.fleet.rules import make_rules
from asyncrl.core.config.conflicts import WITH_GREEDY
from asyncrl.core.config.lengths import Lengths, parse_lengths
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import engine_facts
from asyncrl.planner.plan.prepare import BUILTIN, builtin_root, is_builtin

ASSUMED_SIGMA = 1.0
ASSUMED_FILL = 0.25
"""Of `rollout.max_tokens`: the median length where nobody has said which lengths to expect."""
MAX_MEMBERS = 32
"""Beyond so many, replicas share members of the weight-sync protocol, whose work grows with the square."""
NEVER = float("inf")
UNLIMITED = 1 << 30
"""Requests at once: a scripted engine has no queue."""
LEASE_WAIT_S = 600.0
"""Time that a lease call waits at the buffer; a call for a batch waits until there is one."""
HEARTBEAT_S, SILENCE_S, DEAD_S = 60.0, 180.0, 1800.0
"""Of members of weight sync and the publisher; as of `weight_sync.protocol.rounds.Timing`."""
TICK_S, WATCH_S = 2.0, 300.0
"""Of coordinator and buffer; of the supervisor's looks."""


@dataclass(frozen=True)
class LengthsModel(Lengths):
    """Lengths of a run; `is_assumed`: nobody has said so."""

    is_assumed: bool = False


@dataclass(frozen=True)
class Setting:
    """Settings of the run that the actors use.

    Attributes:
        ledger, fleet: The rules of the real ledger, and of the real fleet machine.
        num_samples: Requests of a group; `trained_samples` of them are trained.
        max_groups: That a replica works on, counted in unfinished samples.
        parallelism: Replicas that swap at once; max_unavailable: or a share of them, if that is less.
        tightened_to: Another bound that is admitted under, as `asyncrl`'s control API sets it.
        zero_variance_share: Of the groups, those dropped at the buffer for equal rewards.
        streams: The learner takes a batch in parts of `least_part` groups and more.
        max_stall_s: That training waits for the checkpoint before.
        eval_every: Steps between evaluations, of `eval_prompts` x `eval_samples` answers, of which a replica
            works on `eval_at_once`; 0 for none.
    """

    ledger: LedgerSettings
    run_seed: int
    replicas: int
    num_samples: int
    trained_samples: int
    max_groups: int
    max_sequences: int
    max_tokens: int
    prompt_tokens: float
    lengths: LengthsModel
    num_prompts: int
    parallelism: int
    sync_deadline_s: float
    checkpoint_every: int
    checkpoints_kept: int
    max_unavailable: float | None = None
    standby: int = 0
    fleet: FleetRules = field(default_factory=FleetRules)
    zero_variance_share: float = 0.0
    tightened_to: int | None = None
    streams: bool = False
    least_part: int = 1
    max_stall_s: float = 30.0
    eval_every: int = 0
    eval_prompts: int = 0
    eval_samples: int = 1
    eval_at_once: int = UNLIMITED

    @property
    def cohort(self) -> int:
        """Replicas that share a member of the weight-sync protocol."""
        return max(1, -(-self.replicas // MAX_MEMBERS))

    @property
    def num_members(self) -> int:
        return -(-self.replicas // self.cohort)

    @staticmethod
    def of(
        config: Config,
        lengths: LengthsModel | None = None,
        *,
        prompt_tokens: float | None = None,
        num_prompts: int = 1_000_003,
    ) -> Setting:
        """Return the setting of a run.

        Args:
            lengths: To expect, where `rollout.response_tokens` forces none.
            prompt_tokens: Mean length of a prompt; half of `data.max_prompt_tokens` where nobody knows.

        Raises:
            ConfigError: The buffer's memory cannot hold two batches.
        """
        rollout = config.rollout
        replicas = rollout.replicas.start
        trained, num_samples = rollout.group_size, rollout.group_size
        num_samples += config.algorithm.advantage in WITH_GREEDY
        has_rates = all(engine_facts(name).tokens_per_s for name in rollout.engines)
        return Setting(
            ledger=ledger_settings(config),
            run_seed=config.run.seed,
            replicas=replicas,
            num_samples=num_samples,
            trained_samples=trained,
            max_groups=count_max_groups(rollout.max_sequences, num_samples),
            max_sequences=UNLIMITED if has_rates else rollout.max_sequences,
            max_tokens=rollout.max_tokens,
            prompt_tokens=prompt_tokens or config.data.max_prompt_tokens / 2,
            lengths=forced_lengths(config) or lengths or assumed_lengths(config),
            num_prompts=num_prompts,
            parallelism=config.weight_sync.parallelism,
            max_unavailable=config.weight_sync.max_unavailable,
            sync_deadline_s=config.weight_sync.deadline_s,
            checkpoint_every=config.checkpoint.every_steps,
            checkpoints_kept=config.checkpoint.keep,
            standby=rollout.standby,
            fleet=make_rules(config, num_ranks=1),
            streams=config.learner.stream,
            least_part=config.learner.dp,
            max_stall_s=config.checkpoint.max_stall_s,
            eval_every=config.eval.every_steps,
            eval_prompts=count_held_out(config) if config.eval.every_steps else 0,
            eval_samples=config.eval.samples,
            eval_at_once=rollout.max_sequences,
        )

    def draw_lengths(self, ticket: int, dice: random.Random) -> list[int]:
        """Return the response lengths of a group: those of the live run where it forces lengths."""
        lengths = []
        for sample in range(self.num_samples):
            dice.seed(sample_seed(self.run_seed, ticket, sample))
            lengths.append(self.lengths.draw(dice, self.max_tokens))
        return lengths


def count_held_out(config: Config) -> int:
    """Return how many prompts an evaluation has; as many as it may have of a source that cannot be read."""
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_metadata

    counts = []
    for source in config.data.eval or ():
        path = Path(source.path)
        if is_builtin(source.path):
            path = builtin_root(config) / source.path.removeprefix(BUILTIN) / "eval.parquet"
        try:
            counts.append(min(config.eval.prompts, read_metadata(path).num_rows))
        except (OSError, ArrowInvalid):  # it is not here yet, or of another kind
            counts.append(config.eval.prompts)
    return sum(counts)


def forced_lengths(config: Config) -> LengthsModel | None:
    """Return what `rollout.response_tokens` forces, None if it forces nothing that can be read."""
    try:
        forced = parse_lengths(config.rollout.response_tokens)
    except ConfigError:
        return None
    return None if forced is None else LengthsModel(forced.sigma, forced.median_tokens)


def assumed_lengths(config: Config) -> LengthsModel:
    """Return lengths for a run of which nobody has said any."""
    median = max(1.0, ASSUMED_FILL * config.rollout.max_tokens)
    return LengthsModel(ASSUMED_SIGMA, median, is_assumed=True)
