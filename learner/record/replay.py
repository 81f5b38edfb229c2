"""`asyncrl replay`: trains recorded steps again, without rollouts and without a run.

  consumes: a checkpoint (or the model of the start), the recorded batches after it
  waits for: nobody, but the other ranks     produces: a comparison with what the run recorded
Owns the order: find where to begin, load, then adjust, train and compare, step by step, by the same
`Trainer` as the live learner, each interval of the run under the settings that were recorded with its steps.
Must never write into the run's folder. Invariant: with the configuration of the run, on the packages and the
processor it ran on, every metric, every published weight and what its checkpoints hold is equal bit by bit.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from asyncrl.core.config.load import find_run_folder, load_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import CheckpointError, ConfigError, DataError
from asyncrl.core.experience import Group
from learner.algorithms.objective import Objective, make_objective
from learner.backend import LearnerBackend, Models, Placement
from learner.checkpoint.store import CheckpointStore
from learner.composition import open_models
from learner.numerics.device import claim_device
from learner.ranks import Ranks
from learner.record.batch_store import FOLDER, BatchStore, RecordedStep, RecordedWeights, name_steps
from learner.record.comparison import WEIGHTS, ComparedStep, Comparison, Difference, compare
from learner.record.intervals import (
    SettingsInterval,
    cut_intervals,
    describe_intervals,
    find_intervals,
    leave_state,
    take_up_state,
)
from learner.record.plan import CHECKPOINTS, Plan, cut_plan, make_plan
from learner.record.processes import replay_on_ranks
from learner.record.recorder import repeatable
from learner.record.settings import configure
from learner.record.state import compare_state
from learner.report import Stopwatch
from learner.trainer import Trainer
from weight_sync.memory.writer import Bytes, SegmentWriter, digest_of

OpenModels = Callable[[Config, Objective, Placement], Models]


class RecordedIntake:
    """Hands out the groups of one recorded step."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    def put(self, groups: Sequence[Group]) -> None:
        """Take the groups of the next step in place of those before."""
        self._groups = {group.ticket: group for group in groups}

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        """Return the groups of `tickets`.

        Raises:
            DataError: One is not in the record.
        """
        missing = [ticket for ticket in tickets if ticket not in self._groups]
        if missing:
            raise DataError(f"the record has no group of ticket {missing[0]}")
        return [self._groups[ticket] for ticket in tickets]


def replay_run(
    run: str,
    runs_dir: str,
    first: int | None = None,
    num_steps: int | None = None,
    *,
    overrides: Sequence[str] = (),
    stops: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
) -> Comparison:
    """Train steps `first` to `first + num_steps - 1` of a run again and compare them with its record.

    Each is trained under the settings recorded with it; from `first` on `overrides` change them.

    Args:
        run: Name below `runs_dir`, or a path.
        first: Without it, the earliest from which all recorded steps can be reached.
        num_steps: Without it, all that follow in the record.
        overrides: As of `--set`: what is to be another way than in the run.
        stops: Whether to end at the first step from `first` on that differs.
        say: Is told of each step as it is done.

    Raises:
        ConfigError: There is no such run, or it recorded nothing; or the overrides are wrong.
        DataError: A step is not in the record, or there is nothing to begin with.
        CheckpointError: The record is torn or altered.
    """
    folder = find_run_folder(run, runs_dir)
    config = load_resolved(folder, overrides)
    plan = replace(make_plan(folder, config, first, num_steps, say), stops=stops)
    batch_store = BatchStore(folder / FOLDER)
    intervals = find_intervals(batch_store, plan.began_at, plan.end)
    for sentence in describe_intervals(batch_store, intervals):
        say(sentence)
    if overrides and plan.began_at < plan.first:
        intervals = list(cut_intervals(intervals, plan.first))
        say(f"{name_steps(range(plan.began_at, plan.first))} as in the run, then {', '.join(overrides)}")
    _check_overrides(plan, intervals, batch_store, overrides)
    compared: list[ComparedStep] = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-replay-") as between:
        for part in cut_plan(plan, intervals, Path(between)):
            given = overrides if part.began_at >= plan.first else ()
            compared += _replay_interval(part, batch_store, given, say).steps
            if stops and any(_ends_at(plan, step) for step in compared):
                break
            if part.taken_from:
                shutil.rmtree(part.taken_from)
    return Comparison(plan.began_at, plan.first, compared)


def _check_overrides(
    plan: Plan, intervals: Sequence[SettingsInterval], batch_store: BatchStore, overrides: Sequence[str]
) -> None:
    """Raise ConfigError if `overrides` do not fit an interval, before the steps before it are trained."""
    for interval in intervals:
        if interval.first >= plan.first:
            configure(plan.folder, batch_store.read_settings(interval.settings), overrides)


def _ends_at(plan: Plan, step: ComparedStep) -> bool:
    """Tell whether a replay that stops does so here: what only leads to the first step is gone through."""
    return step.step >= plan.first and bool(step.differences)


def _replay_interval(
    plan: Plan, batch_store: BatchStore, overrides: Sequence[str], say: Callable[[str], None]
) -> Comparison:
    settings = batch_store.read_settings(plan.settings)
    config, recorded = (configure(plan.folder, settings, given) for given in (overrides, ()))
    plan = replace(plan, sets_rate=_has_other_rate(config, recorded))
    ranks = num_ranks(config)
    if ranks > 1:
        return replay_on_ranks(plan, overrides, ranks, say)
    return replay(plan, config, Placement(), tell=lambda step: say(str(step)))


def _has_other_rate(config: Config, base: Config) -> bool:
    return (config.learner.lr, config.critic.lr) != (base.learner.lr, base.critic.lr)


def num_ranks(config: Config) -> int:
    """Return how many processes the run's learner had: sums depend on it."""
    learner = config.learner
    return learner.tp * learner.pp * learner.cp * learner.dp


def replay(
    plan: Plan,
    config: Config,
    placement: Placement,
    *,
    make_models: OpenModels = open_models,
    tell: Callable[[ComparedStep], None] = lambda step: None,
) -> Comparison:
    """Train the steps of `plan` on this rank, and `tell` each as it is done. Collective.

    Returns:
        The same comparison on every rank.
    """
    learner = config.learner
    device = claim_device(learner.gpus, placement.rank, is_deterministic=learner.deterministic)
    if device.type == "cpu":
        torch.set_num_threads(1)
    objective = make_objective(
        config.algorithm, max_lag=config.staleness.max_lag, max_response_tokens=config.rollout.max_tokens
    )
    with closing(make_models(config, objective, placement)) as models:
        ranks, fetcher = Ranks(placement.rank, placement.world_size, device), RecordedIntake()
        trainer = Trainer(config, ranks, models, objective, fetcher, Stopwatch())
        _restore(trainer, plan, config)
        compared = []
        for step in _train(plan, config, trainer, fetcher, models, objective, ranks):
            compared.append(step)
            tell(step)
            if plan.stops and ranks.largest([_ends_at(plan, step)])[0]:
                break
        if plan.left_in:
            leave_state(Path(plan.left_in), models, objective, placement.rank)
    return Comparison(plan.began_at, plan.first, compared)


def _restore(trainer: Trainer, plan: Plan, config: Config) -> None:
    if plan.taken_from:
        take_up_state(Path(plan.taken_from), trainer)
        return
    if not plan.has_checkpoint:
        trainer.restore(None, {})
        return
    store = CheckpointStore(plan.folder / CHECKPOINTS, config.checkpoint.keep, config.checkpoint.keep_best)
    controllers = store.cut(plan.began_at).controllers
    trainer.restore(store.folder(plan.began_at), controllers.get("objective", {}))


def _train(
    plan: Plan,
    config: Config,
    trainer: Trainer,
    fetcher: RecordedIntake,
    models: Models,
    objective: Objective,
    ranks: Ranks,
) -> Iterator[ComparedStep]:
    """Yield each step, trained and compared."""
    batch_store, root, policy = BatchStore(plan.folder / FOLDER), plan.folder / CHECKPOINTS, models.policy
    store = CheckpointStore(root, config.checkpoint.keep) if root.is_dir() else None
    if not plan.taken_from:  # else it is what was trained before, under overrides perhaps
        _check_start(batch_store.read_weights(plan.began_at), policy, plan)
    for step in range(plan.began_at, plan.end):
        recorded = batch_store.read(step, policy.dp_rank)
        _check(recorded, config, policy)
        fetcher.put(recorded.groups)
        if recorded.adjustment != trainer.adjustment or (plan.sets_rate and step == plan.began_at):
            trainer.adjust(recorded.adjustment)
        metrics = repeatable(trainer.train(recorded.order).metrics)
        weights = batch_store.read_weights(step + 1)
        different = compare(recorded.metrics, metrics)
        others = _compare_weights(weights, policy)
        token, state = recorded.order.token, None
        if store is not None:
            state = compare_state(store, step + 1, token, models, objective, ranks)
        others += state or ()
        num_metrics, found = len({*recorded.metrics, *metrics}), (weights is not None, state is not None)
        yield ComparedStep(step, num_metrics, len(different), different + others, *found)


def _check(recorded: RecordedStep, config: Config, policy: LearnerBackend) -> None:
    if recorded.num_shares != policy.dp_size:
        raise ConfigError(
            f"step {recorded.step} was recorded in {recorded.num_shares} shares, not {policy.dp_size}",
            hint="A replay has the data-parallel size of the run",
        )
    if recorded.seed != config.run.seed:
        raise ConfigError(f"step {recorded.step} was recorded with run.seed {recorded.seed}")


def _check_start(weights: RecordedWeights | None, policy: LearnerBackend, plan: Plan) -> None:
    """Raise CheckpointError if the run published other weights at that step than those loaded."""
    if _compare_weights(weights, policy):
        what = f"the checkpoint of step {plan.began_at}" if plan.has_checkpoint else "the model of the start"
        raise CheckpointError(
            f"{what} does not hold the weights that the recorded run had there",
            hint="It is of a branch that the run has abandoned, or the configuration differs: "
            "begin at another checkpoint with --from",
        )


def _compare_weights(weights: RecordedWeights | None, policy: LearnerBackend) -> tuple[Difference, ...]:
    """Return the difference between recorded and present weights, if there is one. Collective."""
    if weights is None:
        return ()
    digest = digest_weights(policy, weights.bucket_bytes)
    return () if digest == weights.digest else (Difference(WEIGHTS, weights.digest, digest),)


class _Nowhere:
    """A place that keeps nothing: the bytes are digested only."""

    def put(self, offset: int, piece: Bytes) -> None:
        pass


def digest_weights(policy: LearnerBackend, bucket_bytes: int) -> str:
    """Return the digest that a publish of the present weights has. Collective."""
    writer = SegmentWriter(_Nowhere(), bucket_bytes)
    for _, tensor in policy.named_tensors():
        writer.write(tensor)
    return digest_of(writer.finish())
