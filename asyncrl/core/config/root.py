"""The sections of a configuration, side by side: each is right by itself.

Owns their list. `core.config.tree` adds the check that they fit together; a rule of that check takes this.
"""

from __future__ import annotations

from typing import Literal, Self

from asyncrl.core.config.rules.format import FORMAT
from asyncrl.core.config.sections.algorithm import AlgorithmSection
from asyncrl.core.config.sections.data import DataSection
from asyncrl.core.config.sections.experience import BufferSection, StalenessSection
from asyncrl.core.config.sections.guard import GuardSection
from asyncrl.core.config.sections.launcher import LauncherSection, WeightSyncSection
from asyncrl.core.config.sections.learner import CriticSection, LearnerSection, ModelSection
from asyncrl.core.config.sections.reward import RewardSection
from asyncrl.core.config.sections.rollout import EvalSection, RolloutSection
from asyncrl.core.config.sections.run import CheckpointSection, MetricsSection, RunSection
from asyncrl.core.config.sections.section import Section


class Root(Section):
    """All sections of a run, and the `format` of its file."""

    format: Literal[3] = FORMAT
    """Number of the file's format; an older one is migrated, a newer one refused."""
    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    reward: RewardSection
    rollout: RolloutSection = RolloutSection()
    staleness: StalenessSection = StalenessSection()
    buffer: BufferSection = BufferSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    critic: CriticSection = CriticSection()
    learner: LearnerSection = LearnerSection()
    weight_sync: WeightSyncSection = WeightSyncSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    guard: GuardSection = GuardSection()
    metrics: MetricsSection = MetricsSection()
    launcher: LauncherSection = LauncherSection()

    def of_replica(self, index: int) -> Self:
        """Return the configuration of one replica: of the engines of a run it names that replica's."""
        return self.model_copy(update={"rollout": self.rollout.of_replica(index)})

    @property
    def by_engine(self) -> dict[str, Self]:
        """The configuration of a replica of each engine."""
        return {name: self.of_replica(index) for index, name in enumerate(self.rollout.engines)}
