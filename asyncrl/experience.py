"""Groups and trajectories, and their form on the wire.

A group travels as one msgpack header and columnar little-endian arrays. `decode_group` checks
everything that it reads: a group that comes out of it is well formed.

Shapes: P prompt tokens, T response tokens of one trajectory, N response tokens of the group,
G trajectories, S spans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.versions import Span, check_spans

FINISH_REASONS = ("stop", "length")
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Trajectory:
    """The record of one episode.

    Attributes:
        response_ids: Sampled and observed token ids, int32 [T].
        loss_mask: 1 on sampled tokens, 0 on observation and tool tokens, uint8 [T].
        logprobs: Behaviour log-probs at the sampling temperature, float32 [T].
        spans: Which version sampled which tokens, covering 0..T.
        reward: The episode's reward.
        finish_reason: `stop` (end of sequence) or `length` (cut at the token limit).
    """

    response_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[Span, ...]
    reward: float
    finish_reason: str

    @property
    def num_tokens(self) -> int:
        return len(self.response_ids)


@dataclass(frozen=True)
class Group:
    """The trajectories sampled for one prompt: the unit of accounting.

    Attributes:
        ticket: The ledger's id of the group.
        attempt: Which try at the ticket made it.
        prompt_ids: int32 [P].
        trajectories: G of them, in sample order.
        baseline_reward: Reward of a greedy answer to the same prompt, which is not among the trajectories;
            None if nobody asked for one.
    """

    ticket: int
    attempt: int
    prompt_ids: npt.NDArray[np.int32]
    trajectories: tuple[Trajectory, ...]
    baseline_reward: float | None = None

    @property
    def num_response_tokens(self) -> int:
        return sum(trajectory.num_tokens for trajectory in self.trajectories)

    @property
    def num_tokens(self) -> int:
        """Tokens that the learner computes on: the prompt counts once per trajectory."""
        return self.num_response_tokens + len(self.prompt_ids) * len(self.trajectories)

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def is_constant(self) -> bool:
        """Whether all rewards are equal, that of a greedy answer too: nothing is learned from the group."""
        baseline = [] if self.baseline_reward is None else [self.baseline_reward]
        return len({*self.rewards, *baseline}) == 1


def encode_group(group: Group) -> list[bytes]:
    """Return the frames of `group`: header, prompt ids, response ids, masks, log-probs, spans, rewards."""
    trajectories = group.trajectories
    spans = [
        (sample, span.version, span.start, span.end)
        for sample, trajectory in enumerate(trajectories)
        for span in trajectory.spans
    ]
    header = {
        "ticket": group.ticket,
        "attempt": group.attempt,
        "lengths": [trajectory.num_tokens for trajectory in trajectories],
        "num_spans": len(spans),
        "finish": [FINISH_REASONS.index(trajectory.finish_reason) for trajectory in trajectories],
    }
    if group.baseline_reward is not None:
        header["baseline_reward"] = group.baseline_reward
    return [
        wire.pack_header(header),
        group.prompt_ids.astype("<i4").tobytes(),
        b"".join(trajectory.response_ids.astype("<i4").tobytes() for trajectory in trajectories),
        b"".join(trajectory.loss_mask.astype("u1").tobytes() for trajectory in trajectories),
        b"".join(trajectory.logprobs.astype("<f4").tobytes() for trajectory in trajectories),
        np.asarray(spans, dtype="<i8").reshape(-1, 4).tobytes(),
        np.asarray(group.rewards, dtype="<f4").tobytes(),
    ]


def decode_group(frames: Sequence[wire.Frame]) -> Group:
    """Return the group in `frames`.

    Raises:
        WireError: Anything about the frames is not as `encode_group` makes it: a missing array, a
            length that does not fit, a span that leaves a gap, a log-prob or reward that is not finite.
    """
    if len(frames) != 7:
        raise WireError(f"a group has 7 frames, not {len(frames)}")
    header = wire.unpack_header(frames[0])
    lengths = _non_negative_ints(header, "lengths")
    finish = _non_negative_ints(header, "finish")
    if len(finish) != len(lengths) or any(code >= len(FINISH_REASONS) for code in finish):
        raise WireError("the finish reasons do not fit the trajectories")
    total = sum(lengths)
    prompt_ids = _array(frames[1], "<i4", None, "prompt_ids")
    response_ids = _array(frames[2], "<i4", total, "response_ids")
    masks = _array(frames[3], "u1", total, "loss_mask")
    logprobs = _array(frames[4], "<f4", total, "logprobs")
    spans = _array(frames[5], "<i8", 4 * wire.field(header, "num_spans", int), "spans").reshape(-1, 4)
    rewards = _array(frames[6], "<f4", len(lengths), "rewards")
    if not (np.isfinite(logprobs).all() and np.isfinite(rewards).all()):
        raise WireError("a log-prob or a reward is not finite")
    spans_of = _spans_by_sample(spans, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
    trajectories = tuple(
        Trajectory(
            response_ids=response_ids[start:end],
            loss_mask=masks[start:end],
            logprobs=logprobs[start:end],
            spans=spans_of[sample],
            reward=float(rewards[sample]),
            finish_reason=FINISH_REASONS[finish[sample]],
        )
        for sample, (start, end) in enumerate(itertools.pairwise(offsets))
    )
    ticket, attempt = wire.field(header, "ticket", int), wire.field(header, "attempt", int)
    return Group(
        ticket=ticket,
        attempt=attempt,
        prompt_ids=prompt_ids,
        trajectories=trajectories,
        baseline_reward=_baseline_reward(header),
    )


def _baseline_reward(header: dict[str, Any]) -> float | None:
    """Return the reward of the greedy answer, if there is one, as float32 holds it: so are the others."""
    if "baseline_reward" not in header:
        return None
    value = wire.field(header, "baseline_reward", float)
    if not math.isfinite(value) or abs(value) > _FLOAT32_MAX:
        raise WireError("the reward of the greedy answer is not finite")
    return float(np.float32(value))


def _non_negative_ints(header: dict[str, Any], name: str) -> list[int]:
    values = wire.field(header, name, list)
    if not all(type(value) is int and value >= 0 for value in values):
        raise WireError(f"the field '{name}' must hold whole numbers from 0")
    return list(values)


def _array(frame: wire.Frame, dtype: str, length: int | None, name: str) -> npt.NDArray[Any]:
    item_bytes = np.dtype(dtype).itemsize
    if len(frame) % item_bytes or (length is not None and len(frame) != length * item_bytes):
        raise WireError(f"the array '{name}' has {len(frame)} bytes, wanted {length} items of {item_bytes}")
    return np.frombuffer(frame, dtype=dtype)


def _spans_by_sample(spans: npt.NDArray[np.int64], lengths: list[int]) -> list[tuple[Span, ...]]:
    by_sample: list[list[Span]] = [[] for _ in lengths]
    for sample, version, start, end in spans.tolist():
        if not 0 <= sample < len(lengths):
            raise WireError(f"a span names sample {sample} of {len(lengths)}")
        by_sample[sample].append(Span(version, start, end))
    for sample, (found, length) in enumerate(zip(by_sample, lengths, strict=True)):
        try:
            check_spans(tuple(found), length)
        except ValueError as error:
            raise WireError(f"sample {sample}: {error}") from error
    return [tuple(found) for found in by_sample]
