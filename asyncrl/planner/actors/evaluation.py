"""A part of an evaluation on a replica: which of its answers run, and which wait for a place (pure).

Owns no engine and no time. Invariant: at most `at_once` answers run, and each is given out once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from asyncrl.buffer.ledger.orders import evaluation_seed, prompts_of_part
from asyncrl.buffer.ledger.tickets import Part
from asyncrl.core.metrics.tallies import Tally

if TYPE_CHECKING:
    import random

    from asyncrl.planner.setting import Setting

TALLIES = {"accuracy": Tally(1, 0.0)}
"""Of a simulated part: nobody looks at what was answered."""


def draw_answers(setting: Setting, part: Part, dice: random.Random) -> list[int]:
    """Return the lengths of a part's answers, drawn as those of groups; a live run forces none of them."""
    lengths = []
    for prompt in prompts_of_part(setting.eval_prompts, part.part, part.num_parts):
        for sample in range(setting.eval_samples):
            dice.seed(evaluation_seed(setting.run_seed, prompt, sample))
            lengths.append(setting.lengths.draw(dice, setting.max_tokens))
    return lengths


class PinnedWork:
    """See the module.

    Attributes:
        part: The part handed out by the ledger. version: The version that answers it.
        key: Of its requests in the engine; no ticket has such a one.
    """

    def __init__(self, part: Part, version: int, lengths: list[int], at_once: int) -> None:
        self.part, self.version = part, version
        self.key = (-part.id, part.part)
        self._waiting = deque(enumerate(lengths))
        self._at_once = at_once
        self.num_running = 0

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self.num_running

    def take_next(self) -> list[tuple[int, int]]:
        """Return (sample, tokens) of the answers that begin."""
        taken = []
        while self._waiting and self.num_running < self._at_once:
            taken.append(self._waiting.popleft())
            self.num_running += 1
        return taken

    def end_one(self) -> None:
        """An answer has ended."""
        self.num_running -= 1
