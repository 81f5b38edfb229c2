"""Groups and trajectories, and their form on the wire.

A group travels as one msgpack header and columnar little-endian arrays. `outline_group` checks
everything about them, in whole columns; `decode_group` does too, and cuts them into trajectories.
Invariant: a group from either is well formed. Nothing is copied: arrays are read-only views of frames.

Shapes: P prompt tokens, T and N response tokens of a trajectory and of the group, G trajectories, S spans;
L layers, K experts of each (`asyncrl.core.experts`).
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.core import wire
from asyncrl.core.errors import WireError
from asyncrl.core.experts import FIELD, Column, Rows, encode, read_column
from asyncrl.core.staleness import Span, check_spans

GROUP_SCHEMA, FORKED_SCHEMA, ROUTED_SCHEMA = 3, 4, 5
"""Form of a group's frames: of one trajectory per sample, of samples that were forked, and of any with one
frame more, of experts. A header without the field is of schema 1; schema 2 had no turns and parts."""
FINISH_REASONS = ("stop", "length", "turns", "done")
CUT_REASONS = ("length", "turns")
"""Of episodes that a limit ended. With `rollout.truncated: mask` no token of them is trained."""
UNFINISHED = "unfinished"
"""Of the trajectories that a draining replica hands back. Partial groups alone may hold them."""
_FINISH_CODES = (*FINISH_REASONS, UNFINISHED)
NUM_FRAMES = 7
MAX_REWARD_PARTS = 32
"""Of one group. Each part is a family of metrics, so a stranger's group must not bring any number of them."""
MAX_PART_NAME_CHARS = MAX_REASON_CHARS = 64
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Trajectory:
    """The record of one episode.

    Attributes:
        response_ids: Sampled and observed token ids, int32 [T].
        loss_mask: 1 on sampled tokens, 0 on observation and tool tokens, uint8 [T].
        logprobs: Behaviour log-probs at the sampling temperature, float32 [T].
        spans: Version that sampled each range of tokens, covering 0..T.
        reward: The episode's reward.
        finish_reason: `stop` (end of sequence or a stop string), `length` (cut at the token limit), `turns`
            (at the limit of turns) or `done` (the environment ended it); `UNFINISHED` in partial rollouts.
        reward_parts: Parts of the reward by name, before weighting; empty if the reward has none.
        num_turns: Number of the model's turns, from 1.
        reason: Reason of a reward of 0 or less, as far as it is known: a `Reason`, or the reward's own words.
        experts: Of each token [T, L, K]; None if none are recorded.
        prompt_experts: Of the prompt's last tokens, as its own requests told them; its group has them all.
    """

    response_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[Span, ...]
    reward: float
    finish_reason: str
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    num_turns: int = 1
    reason: str = ""
    experts: Rows | None = None
    prompt_experts: Rows | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.response_ids)


@dataclass(frozen=True)
class Group:
    """The trajectories sampled for one prompt: the unit of accounting.

    Attributes:
        ticket: The ledger's id of the group.
        attempt: Number of the ticket's attempt that made it.
        prompt_ids: int32 [P].
        trajectories: G of them, in sample order.
        forked: Sample of each trajectory, empty if all have one: a fork has the tokens before it once more,
            with loss mask 0, and the reward of the episode.
        baseline_reward: Reward of a greedy answer to the prompt, which is no trajectory; None without one.
        prompt_experts: Of each token of the prompt [P, L, K]; None if none are recorded.
    """

    ticket: int
    attempt: int
    prompt_ids: npt.NDArray[np.int32]
    trajectories: tuple[Trajectory, ...]
    baseline_reward: float | None = None
    forked: tuple[int, ...] = ()
    prompt_experts: Rows | None = None

    @property
    def samples(self) -> Sequence[int]:
        """Sample of each trajectory."""
        return self.forked or range(len(self.trajectories))

    @property
    def num_response_tokens(self) -> int:
        return sum(trajectory.num_tokens for trajectory in self.trajectories)

    @property
    def num_tokens(self) -> int:
        """Tokens that the learner computes on: the prompt counts once per trajectory."""
        return self.num_response_tokens + len(self.prompt_ids) * len(self.trajectories)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest trajectory with its prompt."""
        return len(self.prompt_ids) + max(trajectory.num_tokens for trajectory in self.trajectories)

    @property
    def is_whole(self) -> bool:
        """Whether every trajectory has come to its end; only then may the group be pushed."""
        return all(trajectory.finish_reason != UNFINISHED for trajectory in self.trajectories)

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def episode_rewards(self) -> list[float]:
        return list(dict(zip(self.samples, self.rewards, strict=True)).values())

    @property
    def is_constant(self) -> bool:
        """Whether all rewards are equal, that of a greedy answer too: nothing is learned from the group."""
        return _is_constant(self.rewards, self.baseline_reward)


@dataclass(frozen=True)
class Outline:
    """Facts about a group that the buffer needs, from checked frames.

    Attributes:
        rewards: Float32 [G].
        baseline_reward, forked: As of `Group`.
        lengths: Response tokens of each trajectory.
        mask_max: Largest value of each trajectory's loss mask; 0 for one without a token.
        finish: Reason for the end of each trajectory.
        turns: Number of the model's turns in each.
        versions: Numbers of all policy versions that sampled a token.
        token_ids: The lowest and the highest id of prompt and responses.
        experts: Of all tokens, not read yet; None if none are recorded.
    """

    ticket: int
    attempt: int
    num_prompt_tokens: int
    lengths: tuple[int, ...]
    mask_max: tuple[int, ...]
    finish: tuple[str, ...]
    turns: tuple[int, ...]
    versions: frozenset[int]
    token_ids: tuple[int, int]
    rewards: npt.NDArray[np.float32]
    baseline_reward: float | None
    forked: tuple[int, ...]
    experts: Column | None

    @property
    def num_samples(self) -> int:
        """Episodes of the group."""
        return self.forked[-1] + 1 if self.forked else len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """As `Group.num_tokens`."""
        return sum(self.lengths) + self.num_prompt_tokens * len(self.lengths)

    @property
    def is_whole(self) -> bool:
        """As `Group.is_whole`."""
        return UNFINISHED not in self.finish

    @property
    def is_masked(self) -> bool:
        """Whether no token of the group may be trained."""
        return not any(self.mask_max)

    @property
    def is_constant(self) -> bool:
        """As `Group.is_constant`."""
        return _is_constant(self.rewards.tolist(), self.baseline_reward)


def _is_constant(rewards: Sequence[float], baseline_reward: float | None) -> bool:
    baseline = [] if baseline_reward is None else [baseline_reward]
    return len({*rewards, *baseline}) == 1


def encode_group(group: Group) -> list[wire.Frame]:
    """Return the frames of `group`: header, prompt ids, response ids, masks, log-probs, spans, rewards;
    and experts, if there are any.
    """
    trajectories = group.trajectories
    spans = [
        number
        for sample, trajectory in enumerate(trajectories)
        for span in trajectory.spans
        for number in (sample, span.version, span.start, span.end)
    ]
    header = {
        "schema": FORKED_SCHEMA if group.forked else GROUP_SCHEMA,
        "ticket": group.ticket,
        "attempt": group.attempt,
        "lengths": [trajectory.num_tokens for trajectory in trajectories],
        "num_spans": len(spans) // 4,
        "finish": [_FINISH_CODES.index(trajectory.finish_reason) for trajectory in trajectories],
        "turns": [trajectory.num_turns for trajectory in trajectories],
        "parts": _parts_by_name(trajectories),
    }
    header |= {"reasons": reasons} if any(reasons := [one.reason for one in trajectories]) else {}
    header |= {} if group.baseline_reward is None else {"baseline_reward": group.baseline_reward}
    if group.forked:
        header["samples"] = list(group.forked)
    rows = [(one.num_tokens, one.experts) for one in trajectories]
    routed = encode([(len(group.prompt_ids), group.prompt_experts), *rows])
    if routed is not None:
        header |= {"schema": ROUTED_SCHEMA, FIELD: routed[0]}
    return [
        wire.pack_header(header),
        _column([group.prompt_ids], "<i4"),
        _column([trajectory.response_ids for trajectory in trajectories], "<i4"),
        _column([trajectory.loss_mask for trajectory in trajectories], "u1"),
        _column([trajectory.logprobs for trajectory in trajectories], "<f4"),
        struct.pack(f"<{len(spans)}q", *spans),
        np.asarray(group.rewards, dtype="<f4").tobytes(),
        *([] if routed is None else [routed[1]]),
    ]


def check_reward(reward: float, parts: Mapping[str, float], names: Iterable[str] = ()) -> None:
    """Return if a trajectory with this reward and these parts of it can be pushed.

    Args:
        names: Of the parts that its siblings have: the limit holds for the group.

    Raises:
        WireError: A value is not finite in float32, or the parts' names or their number cannot be sent.
    """
    for name, value in (("reward", reward), *parts.items()):
        if not abs(value) <= _FLOAT32_MAX:  # nan neither
            raise WireError(f"{name!a:.80} is not finite in float32")
    _check_part_names({*parts, *names})


def _check_part_names(names: Collection[object]) -> None:
    if len(names) > MAX_REWARD_PARTS:
        raise WireError(f"a group has {len(names)} reward parts, over the limit of {MAX_REWARD_PARTS}")
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_PART_NAME_CHARS or not name.isprintable():
            raise WireError(f"a reward part's name is printable text of 1 to {MAX_PART_NAME_CHARS} chars")


def _parts_by_name(trajectories: Sequence[Trajectory]) -> dict[str, list[float | None]]:
    """Return each part's value per trajectory, None where a trajectory has no such part."""
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.reward_parts)
    parts: dict[str, list[float | None]] = {}
    for name in names:
        values = [trajectory.reward_parts.get(name) for trajectory in trajectories]
        parts[name] = [None if value is None else float(value) for value in values]
    return parts


def _column(arrays: Sequence[npt.NDArray[np.generic]], dtype: str) -> wire.Frame:
    """Return the arrays one after the other, copied once."""
    if not any(len(array) for array in arrays):
        return b""
    return np.concatenate(arrays, dtype=dtype, casting="unsafe").data.cast("B")


def decode_group(frames: Sequence[wire.Frame]) -> Group:
    """Return the group in `frames`, whose arrays are views of them.

    Raises:
        WireError: Anything about the frames is not as `encode_group` makes it: another schema, a
            missing array, a length that does not fit, a span that leaves a gap or comes before one of
            an earlier sample, a log-prob or reward that is not finite.
    """
    columns = _read_columns(frames)
    spans_of: list[list[Span]] = [[] for _ in columns.lengths]
    for sample, version, start, end in columns.spans:
        spans_of[sample].append(Span(version, start, end))
    bounds = itertools.pairwise(itertools.accumulate(columns.lengths, initial=0))
    rows = None if columns.experts is None else columns.experts.read()
    num_prompt = len(columns.prompt_ids)
    rewards: list[float] = columns.rewards.tolist()
    trajectories = tuple(
        Trajectory(
            response_ids=columns.response_ids[start:end],
            loss_mask=columns.masks[start:end],
            logprobs=columns.logprobs[start:end],
            spans=tuple(spans_of[sample]),
            reward=rewards[sample],
            finish_reason=_FINISH_CODES[columns.finish[sample]],
            reward_parts=_parts_of(columns.parts, sample),
            num_turns=columns.turns[sample],
            reason=columns.reasons[sample],
            experts=None if rows is None else rows[num_prompt + start : num_prompt + end],
        )
        for sample, (start, end) in enumerate(bounds)
    )
    identity = columns.ticket, columns.attempt, columns.prompt_ids
    prompt_experts = None if rows is None else rows[:num_prompt]
    return Group(*identity, trajectories, columns.baseline_reward, columns.forked, prompt_experts)


def _parts_of(parts: Mapping[str, list[float | None]], sample: int) -> dict[str, float]:
    return {name: value for name, values in parts.items() if (value := values[sample]) is not None}


def outline_group(frames: Sequence[wire.Frame]) -> Outline:
    """Check `frames` as `decode_group` does, and return what the buffer must know of them.

    Raises:
        WireError: As `decode_group`.
    """
    columns = _read_columns(frames)
    return Outline(
        ticket=columns.ticket,
        attempt=columns.attempt,
        num_prompt_tokens=len(columns.prompt_ids),
        lengths=tuple(columns.lengths),
        mask_max=_largest_by_sample(columns.masks, columns.lengths),
        finish=tuple(_FINISH_CODES[code] for code in columns.finish),
        turns=tuple(columns.turns),
        versions=frozenset(span[1] for span in columns.spans),
        token_ids=_range_of(columns.prompt_ids, columns.response_ids),
        rewards=columns.rewards,
        baseline_reward=columns.baseline_reward,
        forked=columns.forked,
        experts=columns.experts,
    )


def _range_of(*arrays: npt.NDArray[np.int32]) -> tuple[int, int]:
    full = [array for array in arrays if len(array)]
    if not full:
        return 0, 0
    return min(int(array.min()) for array in full), max(int(array.max()) for array in full)


def _largest_by_sample(masks: npt.NDArray[np.uint8], lengths: Sequence[int]) -> tuple[int, ...]:
    full = [length for length in lengths if length]
    if not full:
        return (0,) * len(lengths)
    starts = [0, *itertools.accumulate(full[:-1])]
    largest = iter(np.maximum.reduceat(masks, starts).tolist())
    return tuple(next(largest) if length else 0 for length in lengths)


@dataclass(frozen=True)
class _Columns:
    """A group as it lies in its frames. `spans`: (sample, version, start, end)."""

    ticket: int
    attempt: int
    lengths: list[int]
    finish: list[int]
    turns: list[int]
    parts: dict[str, list[float | None]]
    reasons: list[str]
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
    masks: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    spans: list[list[int]]
    rewards: npt.NDArray[np.float32]
    baseline_reward: float | None
    forked: tuple[int, ...]
    experts: Column | None


def _read_columns(frames: Sequence[wire.Frame]) -> _Columns:
    header = wire.unpack_header(frames[0]) if frames else {}
    is_routed = header.get("schema") == ROUTED_SCHEMA
    if len(frames) != NUM_FRAMES + is_routed:
        raise WireError(f"a group has {NUM_FRAMES + is_routed} frames, not {len(frames)}")
    _check_schema(header.get("schema", 1))
    lengths = _non_negative_ints(header, "lengths")
    finish = _non_negative_ints(header, "finish")
    if len(finish) != len(lengths) or any(code >= len(_FINISH_CODES) for code in finish):
        raise WireError("the finish reasons do not fit the trajectories")
    turns = _non_negative_ints(header, "turns")
    if len(turns) != len(lengths) or 0 in turns:
        raise WireError("the numbers of turns do not fit the trajectories")
    total = sum(lengths)
    logprobs = _array(frames[4], "<f4", total, "logprobs")
    rewards = _array(frames[6], "<f4", len(lengths), "rewards")
    if not (_is_finite(logprobs) and _is_finite(rewards)):
        raise WireError("a log-prob or a reward is not finite")
    flat = _array(frames[5], "<i8", 4 * wire.field(header, "num_spans", int), "spans")
    spans: list[list[int]] = flat.reshape(-1, 4).tolist()
    check_spans(spans, lengths)
    prompt_ids = _array(frames[1], "<i4", None, "prompt_ids")
    return _Columns(
        ticket=wire.field(header, "ticket", int),
        attempt=wire.field(header, "attempt", int),
        lengths=lengths,
        finish=finish,
        turns=turns,
        parts=_reward_parts(header, len(lengths)),
        reasons=wire.texts(header, "reasons", len(lengths), MAX_REASON_CHARS),
        prompt_ids=prompt_ids,
        response_ids=_array(frames[2], "<i4", total, "response_ids"),
        masks=_array(frames[3], "u1", total, "loss_mask"),
        logprobs=logprobs,
        spans=spans,
        rewards=rewards,
        baseline_reward=_baseline_reward(header),
        forked=_forked_samples(header, rewards),
        experts=read_column(header, frames[7], len(prompt_ids) + total) if is_routed else None,
    )


def _check_schema(schema: object) -> None:
    if type(schema) is int and GROUP_SCHEMA <= schema <= ROUTED_SCHEMA:
        return
    if type(schema) is not int or schema < 1:
        raise WireError("the schema of a group is a number from 1")
    if schema > ROUTED_SCHEMA:
        raise WireError(
            f"a group has schema {schema}, this process reads {ROUTED_SCHEMA}: its maker is newer",
            hint="Update asyncrl where the buffer and the learner run, then where groups are made",
        )
    raise WireError(
        f"a group has schema {schema}, this process reads {GROUP_SCHEMA}: its maker is older",
        hint="Update asyncrl where groups are made, and start a new run for a journal that holds old ones",
    )


def _forked_samples(header: Mapping[str, object], rewards: npt.NDArray[np.float32]) -> tuple[int, ...]:
    """Return the sample of each trajectory, empty where each has its own."""
    schema = header.get("schema")
    if schema != FORKED_SCHEMA and not (schema == ROUTED_SCHEMA and "samples" in header):
        return ()
    samples = _non_negative_ints(header, "samples")
    if len(samples) != len(rewards) or samples[:1] != [0]:
        raise WireError("the samples do not fit the trajectories")
    for row, (before, sample) in enumerate(itertools.pairwise(samples), 1):
        if sample - before not in (0, 1):
            raise WireError(
                f"sample {sample} comes after sample {before}: they stand in order, none left out"
            )
        if sample == before and rewards[row] != rewards[row - 1]:
            raise WireError(f"the trajectories of sample {sample} have different rewards: an episode has one")
    return tuple(samples)


def _baseline_reward(header: Mapping[str, object]) -> float | None:
    """Return the reward of the greedy answer, if there is one, as float32 holds it: so are the others."""
    if "baseline_reward" not in header:
        return None
    value = wire.field(header, "baseline_reward", float)
    if not math.isfinite(value) or abs(value) > _FLOAT32_MAX:
        raise WireError("the reward of the greedy answer is not finite")
    return float(np.float32(value))


def _reward_parts(header: Mapping[str, object], num_trajectories: int) -> dict[str, list[float | None]]:
    parts: dict[str, list[float | None]] = wire.field(header, "parts", dict)
    _check_part_names(parts)
    for name, values in parts.items():
        if not isinstance(values, list) or len(values) != num_trajectories:
            raise WireError(f"the reward part '{name}' does not fit {num_trajectories} trajectories")
        if not all(value is None or (type(value) is float and math.isfinite(value)) for value in values):
            raise WireError(f"the reward part '{name}' is not finite")
    return parts


def _non_negative_ints(header: Mapping[str, object], name: str) -> list[int]:
    values = wire.field(header, name, list)
    if not all(type(value) is int and value >= 0 for value in values):
        raise WireError(f"the field '{name}' must hold whole numbers from 0")
    return list(values)


def _array(frame: wire.Frame, dtype: str, length: int | None, name: str) -> npt.NDArray[Any]:
    item_bytes = np.dtype(dtype).itemsize
    if len(frame) % item_bytes or (length is not None and len(frame) != length * item_bytes):
        raise WireError(f"the array '{name}' has {len(frame)} bytes, wanted {length} items of {item_bytes}")
    return np.frombuffer(frame, dtype=dtype)


def _is_finite(values: npt.NDArray[np.float32]) -> bool:
    """Tell whether all are finite. The extremes say so (NaN is one), in half the time of asking each."""
    return math.isfinite(values.min(initial=0.0)) and math.isfinite(values.max(initial=0.0))
