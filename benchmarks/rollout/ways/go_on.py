"""An environment that answers every turn in two letters: what turns cost, and nothing else."""

from __future__ import annotations

from typing import Any

from rollout_service.environments import Environment, Step


class GoOn(Environment):
    """Lets the model speak until its turns are used up."""

    def __init__(self, prompt: Any, seed: int) -> None:
        pass

    async def step(self, answer: str) -> Step:
        """Ask for more."""
        return Step("go")
