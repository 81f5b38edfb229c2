"""Bounds of a group that a replica pushes: the limits that the run's configuration implies (pure).

The learner, the page and the command line read what passed here for as long as the journal keeps it, so
what a run cannot train is refused to its sender and never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.core.errors import WireError
from asyncrl.core.experience import Outline

UNTOLD = 1 << 31
"""Value of a bound that was not set."""


@dataclass(frozen=True)
class GroupBounds:
    """Largest sizes of a group.

    Attributes:
        prompt_tokens: Of the prompt.
        answer_tokens: Of each trajectory after its prompt, observations included.
        turns: Of each trajectory.
        vocab_size: Token ids are below it; an id that the model lacks would end the learner at every start.
        experts: Layers, experts chosen by each, experts in all of what is recorded; None if nothing is.
    """

    prompt_tokens: int = UNTOLD
    answer_tokens: int = UNTOLD
    turns: int = UNTOLD
    vocab_size: int = UNTOLD
    experts: tuple[int, int, int] | None = None

    def check(self, group: Outline) -> None:
        """Raise WireError if the group is beyond a bound."""
        if not 0 < group.num_prompt_tokens <= self.prompt_tokens:
            raise WireError(
                f"ticket {group.ticket}: a prompt of {group.num_prompt_tokens} tokens, allowed are 1 to "
                f"{self.prompt_tokens}",
                hint="data.max_prompt_tokens is the limit",
            )
        if max(group.lengths) > self.answer_tokens:
            raise WireError(
                f"ticket {group.ticket}: an answer of {max(group.lengths)} tokens is over the limit of "
                f"{self.answer_tokens}",
                hint="rollout.max_tokens is the limit of all turns and observations together",
            )
        if max(group.turns) > self.turns:
            raise WireError(
                f"ticket {group.ticket}: {max(group.turns)} turns are over the limit of {self.turns}"
            )
        if group.token_ids[0] < 0 or group.token_ids[1] >= self.vocab_size:
            raise WireError(
                f"ticket {group.ticket}: token ids from {group.token_ids[0]} to {group.token_ids[1]} are not "
                f"those of a vocabulary of {self.vocab_size}",
                hint="Use the tokenizer of the run's model",
            )
        if group.experts is not None:
            if self.experts is None:
                raise WireError(f"ticket {group.ticket}: this run records no experts")
            group.experts.check(*self.experts)


UNBOUNDED = GroupBounds()
