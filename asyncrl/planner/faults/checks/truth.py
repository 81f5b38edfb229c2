"""Ancestry of weights: a tree by content, which knows no version numbers (pure).

Two sets of weights are the same node if the same tokens were trained in the same order from the same weights,
by whichever learner and however often. A token is sampled by a node, and its id says by which. The lag of a
token is the way from the weights being trained down to where both branches part, and up to those that sampled
it: what a ledger's numbers and lineages are to stand for.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

ROOT = 1


@dataclass(frozen=True)
class Weights:
    """One node. `tickets`, `prompts`: what the step that made it trained."""

    id: int
    parent: int
    step: int
    tickets: tuple[int, ...] = ()
    prompts: tuple[Hashable, ...] = ()


class WeightsTree:
    """All weights that any learner of the run ever made."""

    def __init__(self) -> None:
        self._nodes = {ROOT: Weights(ROOT, 0, 0)}
        self._ids: dict[Hashable, int] = {}

    def __getitem__(self, node: int) -> Weights:
        return self._nodes[node]

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def train(
        self, parent: int, content: Hashable, tickets: tuple[int, ...], prompts: tuple[Hashable, ...]
    ) -> Weights:
        """Return what training `content` on `parent` makes: the same node for the same content."""
        key = (parent, content)
        if key not in self._ids:
            node = self._ids[key] = len(self._nodes) + 1
            self._nodes[node] = Weights(node, parent, self._nodes[parent].step + 1, tickets, prompts)
        return self._nodes[self._ids[key]]

    def path(self, node: int) -> list[Weights]:
        """Return the nodes from the first weights to these, the root left out."""
        found = []
        while node != ROOT:
            found.append(self._nodes[node])
            node = self._nodes[node].parent
        return found[::-1]

    def lag(self, trained: int, sampled: int) -> int:
        """Return how many steps lie between two nodes, down and up."""
        steps = 0
        a, b = self._nodes[trained], self._nodes[sampled]
        while a.id != b.id:
            if a.step >= b.step:
                a = self._nodes[a.parent]
            else:
                b = self._nodes[b.parent]
            steps += 1
        return steps
