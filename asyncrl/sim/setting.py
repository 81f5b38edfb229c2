"""Setting of a simulation: the keys of a run's configuration that decide its speed and its lags.

Owns the reading of a configuration for a simulation. `Pace` is the interval of the actors' idle messages:
`REAL` is that of the services, for simulations with faults; `COARSE` is as long as the computing time of a
fleet of thousands demands. Neither changes the decisions of the state machines while nothing fails.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.buffer.composition import ledger_settings
from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.config.conflicts import WITH_GREEDY
from asyncrl.config.tree import Config

ASSUMED_SIGMA = 1.0
ASSUMED_FILL = 0.25
"""Of `rollout.max_tokens`: the median length where nobody has said which lengths to expect."""
MAX_MEMBERS = 32
"""Beyond so many, replicas share members of the weight-sync protocol, whose work grows with the square."""
NEVER = float("inf")
UNLIMITED = 1 << 30
"""Requests at once: a scripted engine has no queue."""


@dataclass(frozen=True)
class LengthsModel:
    """Log-normal response lengths, cut at `max_tokens`; `is_assumed`: nobody has said so."""

    sigma: float
    median_tokens: float
    is_assumed: bool = False

    def draw_tokens(self, dice: random.Random, max_tokens: int) -> int:
        """Return a length; `dice` freshly seeded with a sample's seed gives that of the live run."""
        drawn = self.median_tokens * math.exp(self.sigma * dice.gauss(0.0, 1.0))
        return min(max(1, round(drawn)), max_tokens)


@dataclass(frozen=True)
class Pace:
    """Intervals in seconds, as the services have them. Infinite deadlines set no timers.

    Attributes:
        lease_wait_s: How long a lease call lies at the buffer. call_deadline_s: Of a call besides its wait.
        heartbeat_s: Of members and publisher. silence_s, dead_s: Of `weight_sync.protocol.rounds.Timing`.
        tick_s: Of coordinator, buffer. watch_s: Of the supervisor's looks.
        fleet_silence_s: After which the supervisor takes a service for dead; infinite: it hears only news.
    """

    lease_wait_s: float = 1.0
    call_deadline_s: float = 10.0
    heartbeat_s: float = 1.0
    silence_s: float = 3.0
    dead_s: float = 30.0
    tick_s: float = 0.25
    watch_s: float = 0.5
    fleet_silence_s: float = 20.0


REAL = Pace()
COARSE = Pace(
    lease_wait_s=NEVER,
    call_deadline_s=NEVER,
    heartbeat_s=60.0,
    silence_s=180.0,
    dead_s=1800.0,
    tick_s=2.0,
    watch_s=300.0,
    fleet_silence_s=NEVER,
)


@dataclass(frozen=True)
class Setting:
    """What the actors know of the run.

    Attributes:
        ledger: The rules of the real ledger.
        num_samples: Requests of a group; `trained_samples` of them are trained.
        max_groups: That a replica works on, counted in unfinished samples.
        parallelism: Replicas that swap at once.
        cohort: Replicas that share a member of the weight-sync protocol.
        tightened_to: Another bound that is admitted under, as `asyncrl`'s control API sets it.
        uniform_share: Of the groups, those dropped at the buffer for equal rewards.
        keeps_journal: What the buffer writes down; only a simulation with crashes needs it.
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
    num_buffers: int
    checkpoint_every: int
    checkpoints_kept: int
    cohort: int = 1
    standby: int = 0
    max_restarts: int = 5
    uniform_share: float = 0.0
    keeps_journal: bool = False
    tightened_to: int | None = None
    streams: bool = False
    least_part: int = 1
    max_stall_s: float = 30.0
    eval_every: int = 0
    eval_prompts: int = 0
    eval_samples: int = 1
    eval_at_once: int = UNLIMITED
    pace: Pace = field(default=REAL)

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
        full = max(1, rollout.max_sequences // num_samples)
        return Setting(
            ledger=ledger_settings(config),
            run_seed=config.run.seed,
            replicas=replicas,
            num_samples=num_samples,
            trained_samples=trained,
            max_groups=full + max(1, full // 4),
            max_sequences=rollout.max_sequences if rollout.engine == "vllm" else UNLIMITED,
            max_tokens=rollout.max_tokens,
            prompt_tokens=prompt_tokens or config.data.max_prompt_tokens / 2,
            lengths=forced_lengths(config) or lengths or assumed_lengths(config),
            num_prompts=num_prompts,
            parallelism=config.weight_sync.parallelism,
            sync_deadline_s=config.weight_sync.deadline_s,
            num_buffers=3,
            checkpoint_every=config.checkpoint.every_steps,
            checkpoints_kept=config.checkpoint.keep,
            standby=rollout.standby,
            max_restarts=config.launcher.max_restarts,
            streams=config.learner.stream,
            least_part=config.learner.dp,
            max_stall_s=config.checkpoint.max_stall_s,
            eval_every=config.eval.every_steps,
            eval_prompts=count_held_out(config) if config.eval.every_steps else 0,
            eval_samples=config.eval.samples,
            eval_at_once=rollout.max_sequences,
        ).at_pace()

    def at_pace(self) -> Setting:
        """Return the same at the coarse pace, and with cohorts if the fleet is large."""
        cohort = -(-self.replicas // MAX_MEMBERS)
        return replace(self, cohort=max(1, cohort), pace=COARSE)

    def draw_lengths(self, ticket: int, dice: random.Random) -> list[int]:
        """Return the response lengths of a group: those of the live run where it forces lengths."""
        lengths = []
        for sample in range(self.num_samples):
            dice.seed(sample_seed(self.run_seed, ticket, sample))
            lengths.append(self.lengths.draw_tokens(dice, self.max_tokens))
        return lengths


def count_held_out(config: Config) -> int:
    """Return how many prompts an evaluation has; as many as it may have of a source that cannot be read."""
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_metadata

    root, counts = Path(config.run.dir) / "builtin", []
    for source in config.data.eval or ():
        name = source.path.removeprefix("builtin:")
        path = Path(source.path) if name == source.path else root / name / "eval.parquet"
        try:
            counts.append(min(config.eval.prompts, read_metadata(path).num_rows))
        except (OSError, ArrowInvalid):  # it is not here yet, or of another kind
            counts.append(config.eval.prompts)
    return sum(counts)


def forced_lengths(config: Config) -> LengthsModel | None:
    """Return what `rollout.response_tokens` forces, None if it forces nothing that can be read."""
    try:
        kind, sigma, median_tokens = (config.rollout.response_tokens or "").split(":")
        return LengthsModel(float(sigma), float(median_tokens)) if kind == "lognormal" else None
    except ValueError:
        return None


def assumed_lengths(config: Config) -> LengthsModel:
    """Return lengths for a run of which nobody has said any."""
    median = max(1.0, ASSUMED_FILL * config.rollout.max_tokens)
    return LengthsModel(ASSUMED_SIGMA, median, is_assumed=True)
