"""The configuration tree: every knob of a run, at most three levels deep; some are null or a small map.

Owns what spans several sections; `sections/` holds each by itself, and their list. A field stands
there because something reads it. Values are checked as they enter.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from asyncrl.core.config.conflicts import CONFLICT, find_conflicts
from asyncrl.core.config.root import Root
from asyncrl.core.config.sections.algorithm import AdaptiveKlSection, AlgorithmSection, KlSection
from asyncrl.core.config.sections.data import DataSection, SourceSection
from asyncrl.core.config.sections.experience import BufferSection, StalenessSection
from asyncrl.core.config.sections.guard import GuardSection, LimitSection
from asyncrl.core.config.sections.launcher import LauncherSection, WeightSyncSection
from asyncrl.core.config.sections.learner import CriticSection, LearnerSection, LoraSection, ModelSection
from asyncrl.core.config.sections.reward import OverlongSection, RewardPart, RewardSection
from asyncrl.core.config.sections.rollout import (
    EnvironmentSection,
    EvalSection,
    GatewaySection,
    ReplicasSection,
    RolloutSection,
    as_environment,
)
from asyncrl.core.config.sections.run import CheckpointSection, MetricsSection, RunSection, SinkSection

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
    "LoraSection",
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


class Config(Root):
    """A run, whole. `format` numbers the form of the file; without it a file is in the newest."""

    @model_validator(mode="after")
    def check_sections_fit(self) -> Self:
        """Check what no section can know alone."""
        conflicts = find_conflicts(self)
        if conflicts:
            text = "; ".join(conflict.what for conflict in conflicts)
            raise PydanticCustomError(CONFLICT, "{text}", {"text": text, "conflicts": conflicts})
        return self
