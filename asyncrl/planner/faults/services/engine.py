"""An engine whose tokens say which weights sampled them.

Owns the weights that are loaded, bucket by bucket, and the label. A token's id is the node of the weights
that sampled it; its span is the label of that moment. A swap pauses the requests in flight and reads the copy
in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from asyncrl.core.experience import UNFINISHED, Group, Trajectory
from asyncrl.core.staleness import UNLOADED, Span
from asyncrl.planner.faults.sync.content import NUM_BUCKETS

PROMPT_IDS = np.asarray([1, 2], np.int32)
HELD_OUT_IDS = np.asarray([3], np.int32)
"""Of the prompts of evaluations, which no training data has."""


@dataclass
class Writing:
    """A group being sampled.

    Attributes:
        lengths: Tokens that each trajectory will have.
        tokens: (label, node) of every token of each trajectory so far.
        prompt_ids: Of the prompt.
    """

    ticket: int
    attempt: int
    lengths: tuple[int, ...]
    tokens: list[list[tuple[int, int]]] = field(default_factory=list)
    prompt_ids: npt.NDArray[np.int32] = field(default_factory=lambda: PROMPT_IDS)

    def __post_init__(self) -> None:
        self.tokens = self.tokens or [[] for _ in self.lengths]

    @property
    def is_done(self) -> bool:
        return all(len(have) >= want for have, want in zip(self.tokens, self.lengths, strict=True))

    @property
    def has_begun(self) -> bool:
        return any(self.tokens)

    def grow(self, num_tokens: int, label: int, node: int) -> None:
        """Sample up to so many tokens more for each trajectory."""
        for have, want in zip(self.tokens, self.lengths, strict=True):
            have += [(label, node)] * min(num_tokens, want - len(have))

    def as_group(self) -> Group:
        """Return the group, whole or not."""
        trajectories = tuple(map(self._trajectory, range(len(self.lengths))))
        return Group(self.ticket, self.attempt, self.prompt_ids, trajectories)

    def _trajectory(self, sample: int) -> Trajectory:
        tokens, want = self.tokens[sample], self.lengths[sample]
        num = len(tokens)
        spans, start = [], 0
        for label, run in groupby(label for label, _ in tokens):
            end = start + len(list(run))
            spans.append(Span(label, start, end))
            start = end
        nodes = np.asarray([node for _, node in tokens], np.int32)
        reason = "stop" if num >= want else UNFINISHED
        ones = np.ones(num, np.uint8)
        return Trajectory(nodes, ones, np.zeros(num, np.float32), tuple(spans), float(sample), reason)

    @staticmethod
    def resume(group: Group, attempt: int, lengths: tuple[int, ...]) -> Writing:
        """Return what goes on from carried work."""
        tokens = []
        for one in group.trajectories:
            labels = [span.version for span in one.spans for _ in range(span.end - span.start)]
            tokens.append(list(zip(labels, one.response_ids.tolist(), strict=True)))
        return Writing(group.ticket, attempt, lengths, tokens)


@dataclass
class Engine:
    """See the module.

    Attributes:
        nodes: Whose weights each bucket is.
        label: The version number that it stamps.
        is_paused: It samples nothing: a swap is under way, or the last one failed.
    """

    nodes: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)
    label: int = UNLOADED
    is_paused: bool = True

    @property
    def is_loaded(self) -> bool:
        return not self.is_paused

    @property
    def node(self) -> int:
        """Whose weights these are; a mix is nobody's."""
        return self.nodes[0] if len(set(self.nodes)) == 1 else -2
