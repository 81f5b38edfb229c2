"""All models of a rank behind the guard: the same limits and the same retry for policy and critic.

Must never decide what a refused update means: it says which groups trained nothing. Invariant: a group
counts as refused only if neither the policy nor the critic learned from it.
"""

from __future__ import annotations

from typing import cast

from learner.backend import LearnerBackend, Models, ValueBackend
from learner.guard.guard import Limits
from learner.guard.memory import GuardedModel


class GuardedModels:
    """The guarded `models` of one rank, to be trained in place of the plain ones."""

    def __init__(self, plain: Models) -> None:
        self._policy = GuardedModel(plain.policy)
        self._critic = None if plain.critic is None else GuardedModel(plain.critic, "critic")
        self._reference = None if plain.reference is None else GuardedModel(plain.reference)
        # A guarded model passes on what it does not guard.
        self.models = Models(
            cast(LearnerBackend, self._policy),
            cast(ValueBackend | None, self._critic),
            cast(LearnerBackend | None, self._reference),
        )

    def begin_step(self, limits: Limits) -> None:
        """Begin a learner step with these limits of its updates."""
        for model in self._trained():
            model.begin_step(limits)

    @property
    def num_refused(self) -> int:
        """Updates of the step that were beyond the limits; the same on every rank."""
        return sum(model.gate.num_refused for model in self._trained())

    @property
    def refused_tickets(self) -> list[int]:
        """This rank's groups of the step that no model learned from, ascending."""
        return sorted(set.intersection(*(model.refused_tickets for model in self._trained())))

    @property
    def num_out_of_memory(self) -> int:
        """Times that memory ran out on this rank, since the start."""
        found = [*self._trained(), *([self._reference] if self._reference else [])]
        return sum(model.num_out_of_memory for model in found)

    def _trained(self) -> list[GuardedModel]:
        return [self._policy, *([self._critic] if self._critic else [])]
