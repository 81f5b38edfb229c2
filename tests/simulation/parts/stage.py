"""A seed of any scope, played: its world and its folder are made before it, and removed after it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from asyncrl.core.runtime.faults import set_hook
from tests.simulation.kernel.watchdog import watched
from tests.simulation.kernel.world import Stuck, World
from tests.simulation.outcome import Outcome
from weight_sync.memory.segments import SHM_DIR


class Judge(Protocol):
    """Has heard of the promises that were broken."""

    broken: list[str]

    def say(self, sentence: str) -> None:
        """Note a broken promise."""


class Stage(Protocol):
    """A world, its services and its faults."""

    @property
    def judge(self) -> Judge:
        """Of the world."""

    @property
    def num_starts(self) -> int:
        """Processes that were started."""

    def play(self) -> None:
        """Let everything happen, then judge."""


MakeStage = Callable[[World, str, Path], Stage]
"""Called with a world, the start of the names of its segments, and the run's folder beside them."""


def play_stage(seed: int, faults: str, world: World, make: MakeStage) -> Outcome:
    """Play a seed of a class of faults in a new world."""
    prefix = f"asyncrl-simulated-{os.getpid():08d}/"
    folder = SHM_DIR / prefix
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True, mode=0o700)
    before = set_hook(world.pass_point)
    stage = make(world, prefix, folder / "run")
    try:
        with watched(world):
            stage.play()
    except Stuck as error:
        stage.judge.say(f"bug: {error}")
    finally:
        world.end()
        set_hook(before)
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(
        seed=seed,
        faults=faults,
        broken=tuple(stage.judge.broken),
        trace=world.trace,
        virtual_s=world.now,
        num_events=world.num_events,
        num_starts=stage.num_starts,
        lines=tuple(world.lines or ()),
    )
