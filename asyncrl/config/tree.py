"""The configuration tree: every knob of a run, at most three levels deep; some are null or a small map.

Owns the list of sections and what spans several of them; `sections/` holds each by itself. A field stands
there because something reads it. Values are checked as they enter.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from asyncrl.config.conflicts import CONFLICT, find_conflicts
from asyncrl.config.rules.format import FORMAT
from asyncrl.config.sections.algorithm import AdaptiveKlSection, AlgorithmSection, KlSection
from asyncrl.config.sections.data import DataSection, SourceSection
from asyncrl.config.sections.experience import BufferSection, StalenessSection
from asyncrl.config.sections.guard import GuardSection, LimitSection
from asyncrl.config.sections.launcher import LauncherSection, WeightSyncSection
from asyncrl.config.sections.learner import CriticSection, LearnerSection, ModelSection
from asyncrl.config.sections.reward import OverlongSection, RewardPart, RewardSection
from asyncrl.config.sections.rollout import (
    EnvironmentSection,
    EvalSection,
    GatewaySection,
    ReplicasSection,
    RolloutSection,
    as_environment,
)
from asyncrl.config.sections.run import CheckpointSection, MetricsSection, RunSection, SinkSection
from asyncrl.config.sections.section import Section

__all__ = [
    "AdaptiveKlSection",
    "AlgorithmSection",
    "BufferSection",
    "CheckpointSection",
    "Config",
    "CriticSection",
    "DataSection",
    "EnvironmentSection",
    "EvalSection",
    "GatewaySection",
    "GuardSection",
    "KlSection",
    "LauncherSection",
    "LearnerSection",
    "LimitSection",
    "MetricsSection",
    "ModelSection",
    "OverlongSection",
    "ReplicasSection",
    "RewardPart",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "SinkSection",
    "SourceSection",
    "StalenessSection",
    "WeightSyncSection",
    "as_environment",
]


class Config(Section):
    """A run, whole. `format` numbers the form of the file; without it a file is in the newest."""

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

    @model_validator(mode="after")
    def check_sections_fit(self) -> Self:
        """Check what no section can know alone."""
        conflicts = find_conflicts(self)
        if conflicts:
            text = "; ".join(conflict.what for conflict in conflicts)
            raise PydanticCustomError(CONFLICT, "{text}", {"text": text, "conflicts": conflicts})
        return self
