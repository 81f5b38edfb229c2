"""Packed batches: groups of trajectories as one row of tokens after another.

Owns the alignment (position j predicts token j+1 of its row, so masks, labels, log-probs and versions
sit at the predicting position), the lag of every token, and the cutting into minibatches and
microbatches. It must never reorder groups: batches are built in ticket order. Microbatches take rows as they
fill the token budget best, and `restore_order` undoes it. Invariant: a token that is masked for its
age or otherwise keeps its place in the denominator of the loss.

Shapes: N packed positions, R rows (trajectories), G groups.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.core.errors import DataError, LedgerError
from asyncrl.core.experience import Group
from asyncrl.core.staleness import UNLOADED
from learner.algorithms.rows import Rows, sum_episodes
from learner.batching.balance import karmarkar_karp, plan_microbatches
from learner.numerics.transfer import send, send_fields

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Totals:
    """Denominators of one minibatch, over all its microbatches and data-parallel ranks.

    Attributes:
        num_tokens: Tokens of the loss before any was masked for its age or rejected.
        num_rows: Episodes with at least one such token: rows, where none was forked.
        num_trained: Tokens whose mask is 1.
        num_positions: All tokens, of prompts too.
        num_packed_rows: All rows.
    """

    num_tokens: float
    num_rows: float
    num_trained: float
    num_positions: float = 0.0
    num_packed_rows: float = 0.0


@dataclass(frozen=True)
class PackedBatch:
    """Rows packed one after another. Every `_N` field has N entries, every `_R` field R, `_G` field G.

    Attributes:
        step: The learner step that trains this batch.
        tokens_N: Token ids, int64.
        labels_N: The next token of the row; 0 at its last position.
        loss_mask_N: 1 where the label is a sampled token that is trained, float32.
        counted_N: `loss_mask_N` as it was built: what the denominators count, float32.
        behaviour_N: The sampler's log-prob of the label; 0 where nothing was sampled.
        version_N: Number of the version that sampled the label; 0 on prompt positions.
        lag_N: `step` minus that version's step; 0 on prompt positions.
        row_N: Row of each position.
        cu_seqlens: R + 1 positions at which rows start and end.
        group_R: Group of each row, 0..G-1.
        episode_R: Episode of each row, numbered from 0; an episode that was forked has several rows.
        share_R: The row's share of its episode's trained tokens, as they are counted, float32: 1 if it has no
            other row. It is the row's weight in a mean over rows.
        rewards_R: float32; once the objective has prepared the batch, less the KL that it takes off them.
        baseline_R: Reward of a greedy answer to the row's prompt, NaN where its group brought none; None if
            no group did.
        tickets_G: Ascending; of a batch that was joined of parts, as they came.
        totals: Of the minibatch that this batch is, or is a microbatch of.
        prox_N: Log-probs under the weights at the start of the step, once computed.
        advantages_N, weights_N: Per token, once computed.
        sum_pi_squared_N: Sum of squared probabilities over the vocabulary, of the same pass as `prox_N`,
            where the advantage asks for it.
        reference_N: Log-probs under the reference policy, where the objective has one.
        values_N, returns_N: A critic's value before each label at the start of the step, and its target.
        origin_N: Of a microbatch: where each position lies in the batch that was cut, -1 in a filler. On the
            CPU.
        experts_N: Experts that the sampler's routers chose for the token at each position, int16 [N, layers,
            active experts], -1 where none were recorded; None if nowhere. The last token of a row, which the
            sampler never read, has none.
        oldest_trained: Of a batch on a GPU: the largest lag of its trained tokens, found before it was sent.
    """

    step: int
    tokens_N: torch.Tensor
    labels_N: torch.Tensor
    loss_mask_N: torch.Tensor
    counted_N: torch.Tensor
    behaviour_N: torch.Tensor
    version_N: torch.Tensor
    lag_N: torch.Tensor
    row_N: torch.Tensor
    cu_seqlens: tuple[int, ...]
    group_R: torch.Tensor
    episode_R: torch.Tensor
    share_R: torch.Tensor
    rewards_R: torch.Tensor
    tickets_G: tuple[int, ...]
    totals: Totals
    baseline_R: torch.Tensor | None = None
    prox_N: torch.Tensor | None = None
    sum_pi_squared_N: torch.Tensor | None = None
    advantages_N: torch.Tensor | None = None
    weights_N: torch.Tensor | None = None
    reference_N: torch.Tensor | None = None
    values_N: torch.Tensor | None = None
    returns_N: torch.Tensor | None = None
    origin_N: torch.Tensor | None = None
    experts_N: torch.Tensor | None = None
    oldest_trained: int | None = None

    @property
    def num_tokens(self) -> int:
        """N, prompts included."""
        return self.cu_seqlens[-1]

    @property
    def num_rows(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def row_lengths(self) -> list[int]:
        """Tokens of each row."""
        return [end - start for start, end in itertools.pairwise(self.cu_seqlens)]

    def trainable_tokens_G(self) -> list[int]:
        """Return how many tokens of each group have mask 1."""
        per_group = torch.zeros(len(self.tickets_G)).index_add_(0, self.group_R[self.row_N], self.loss_mask_N)
        return [int(count) for count in per_group.tolist()]

    def mask_over_age(self, max_lag: int) -> PackedBatch:
        """Return the batch with mask 0 on tokens older than `max_lag`; the denominators stay."""
        return self.with_mask(self.loss_mask_N * (self.lag_N <= max_lag))

    def with_mask(self, loss_mask_N: torch.Tensor) -> PackedBatch:
        """Return the batch with another loss mask; `counted_N`, and so the loss denominators, stay."""
        batch = dataclasses.replace(self, loss_mask_N=loss_mask_N, oldest_trained=None)
        return dataclasses.replace(batch, totals=count_totals(batch))

    def check_lag(self, max_lag: int) -> None:
        """Raise LedgerError if a token that would be trained is older than `max_lag` (invariant S3)."""
        oldest = self.oldest_trained if self.oldest_trained is not None else self._find_oldest_trained()
        if oldest > max_lag:
            over_age = (self.lag_N > max_lag) & (self.loss_mask_N > 0)
            raise LedgerError(
                f"step {self.step}: {int(over_age.sum())} tokens over max_lag {max_lag} "
                f"(oldest {oldest}) reached the loss",
                hint="This is a bug: mask_over_age must run before training",
            )

    def _find_oldest_trained(self) -> int:
        lag_N = self.lag_N[self.loss_mask_N > 0]
        return int(lag_N.max()) if len(lag_N) else 0

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch with its tensors on `device`; values that the host reads are computed before."""
        if device.type == "cpu":
            return self
        sent = send_fields(self, device)
        return dataclasses.replace(sent, origin_N=self.origin_N, oldest_trained=self._find_oldest_trained())

    def select_groups(self, tickets: Iterable[int]) -> PackedBatch:
        """Return the batch of those groups among `tickets` that are here, with totals of its own."""
        wanted = set(tickets)
        kept = [group for group, ticket in enumerate(self.tickets_G) if ticket in wanted]
        is_kept = torch.zeros(len(self.tickets_G), dtype=torch.bool)
        is_kept[kept] = True
        batch = self._select_rows(is_kept[self.group_R].nonzero()[:, 0].tolist())
        new_index = is_kept.long().cumsum(0) - 1
        batch = dataclasses.replace(
            batch, group_R=new_index[batch.group_R], tickets_G=tuple(self.tickets_G[group] for group in kept)
        )
        return dataclasses.replace(batch, totals=count_totals(batch))

    def balance_microbatches(
        self,
        max_tokens: int,
        *,
        min_parts: int = 0,
        multiple_of: int = 1,
        plan_rows: Callable[[PackedBatch, int, int, int], list[list[int]]] | None = None,
    ) -> list[PackedBatch]:
        """Cut into microbatches of whole rows and of about the same work; `totals` stay those of this batch.

        As few as `max_tokens` allows, or more where ranks must agree on the number: see
        `learner.batching.balance.plan_microbatches`. Where rows run out, a filler follows: one position
        with mask 0.
        `restore_order` puts what was computed per position back into the order of this batch.
        `plan_rows` plans otherwise than by rows: `learner.batching.shared_prompts.plan_shared`.

        Raises:
            DataError: A row is longer than `max_tokens`.
        """
        self._check_budget(max_tokens)
        if plan_rows is not None:
            plan = plan_rows(self, max_tokens, min_parts, multiple_of)
        else:
            lengths = self.row_lengths
            plan = plan_microbatches(lengths, max_tokens, min_parts=min_parts, multiple_of=multiple_of)
        if len(plan) == 1 and self.num_rows:
            return [self]
        whole = dataclasses.replace(self, origin_N=torch.arange(self.num_tokens))
        return [whole._select_rows(rows) if rows else whole._make_filler() for rows in plan]

    def _check_budget(self, max_tokens: int) -> None:
        for row, length in enumerate(self.row_lengths):
            if length > max_tokens:
                raise DataError(
                    f"ticket {self.tickets_G[int(self.group_R[row])]}: a row of {length} tokens does "
                    f"not fit a microbatch of {max_tokens}",
                    hint="Raise learner.max_tokens_per_microbatch",
                )

    def _select_rows(self, rows: Sequence[int]) -> PackedBatch:
        lengths = [self.cu_seqlens[row + 1] - self.cu_seqlens[row] for row in rows]
        starts = [self.cu_seqlens[row] for row in rows]
        is_run = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1
        rows_R = torch.tensor(list(rows), dtype=torch.long)
        if is_run:  # a slice is a view: no copy of the token tensors
            index_N: slice | torch.Tensor = slice(self.cu_seqlens[rows[0]], self.cu_seqlens[rows[-1] + 1])
        else:
            runs = [torch.arange(start, start + size) for start, size in zip(starts, lengths, strict=True)]
            index_N = torch.cat(runs) if runs else rows_R
        columns = {name: value[index_N] for name, value in self._columns("_N")}
        columns |= {name: value[rows_R] for name, value in self._columns("_R")}
        columns["row_N"] = torch.repeat_interleave(
            torch.arange(len(rows)), torch.tensor(lengths, dtype=torch.long)
        )
        columns["episode_R"] = columns["episode_R"].unique(return_inverse=True)[1]
        return self._of(columns, lengths)

    def _of(self, columns: dict[str, Any], lengths: Sequence[int]) -> PackedBatch:
        """Return the batch of other rows, whose columns those are."""
        return dataclasses.replace(self, **columns, cu_seqlens=_cumulate(lengths))

    def _columns(self, suffix: str) -> list[tuple[str, torch.Tensor]]:
        """Return the columns that are there, by name."""
        named = [field.name for field in dataclasses.fields(self) if field.name.endswith(suffix)]
        return [(name, value) for name in named if (value := getattr(self, name)) is not None]

    def _make_filler(self) -> PackedBatch:
        """Return one position that trains nothing, with every column that this batch has."""
        found = self._columns("_N") + self._columns("_R")
        columns = {name: value.new_zeros(1, *value.shape[1:]) for name, value in found}
        columns["origin_N"] = torch.tensor([-1])
        if "experts_N" in columns:
            columns["experts_N"] -= 1
        return self._of(columns, [1])


def restore_order(microbatches: Sequence[PackedBatch], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return per-position values of the microbatches of one batch, in the order of that batch.

    Args:
        microbatches: All that `balance_microbatches` returned, at least one.
        values: One tensor per microbatch, with an entry per position in its last dimension.
    """
    joined = torch.cat(list(values), dim=-1)
    origins = [part.origin_N for part in microbatches if part.origin_N is not None]
    if not origins:  # the batch was not cut
        return joined
    origin_M = torch.cat(origins)
    source_N = origin_M.argsort()[int((origin_M < 0).sum()) :]  # fillers come first
    return joined.index_select(-1, send(source_N, joined.device))


def build_batch(groups: Sequence[Group], step: int, step_of_version: Mapping[int, int]) -> PackedBatch:
    """Pack `groups` for learner step `step`, sorted by ticket.

    Args:
        groups: At least one; every prompt has at least one token.
        step: The learner step that will train them.
        step_of_version: Step of the weights of every version number that may occur.

    Raises:
        DataError: No groups, a group without prompt tokens, or two groups with one ticket.
        LedgerError: A token's version is unknown, or newer than the weights being trained.
    """
    ordered = sorted(groups, key=lambda group: group.ticket)
    _check_groups(ordered)
    lengths = [len(g.prompt_ids) + trajectory.num_tokens for g in ordered for trajectory in g.trajectories]
    cu_seqlens = _cumulate(lengths)
    last_positions = np.asarray(cu_seqlens[1:]) - 1
    columns = _concatenate_tokens(ordered)
    versions, steps = _spread_versions(ordered, step, step_of_version)
    mask_N = _shift(columns[1], last_positions, np.float32)
    sizes = [len(group.trajectories) for group in ordered]
    row_N = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    episode_R = torch.tensor(_number_episodes(ordered))
    batch = PackedBatch(
        step=step,
        tokens_N=torch.from_numpy(columns[0].astype(np.int64)),
        labels_N=_shift(columns[0], last_positions, np.int64),
        loss_mask_N=mask_N,
        counted_N=mask_N,
        behaviour_N=_shift(columns[2], last_positions, np.float32),
        version_N=_shift(versions, last_positions, np.int64),
        lag_N=_shift(step - steps, last_positions, np.int64),
        row_N=row_N,
        cu_seqlens=cu_seqlens,
        group_R=torch.from_numpy(np.repeat(np.arange(len(ordered)), sizes)),
        episode_R=episode_R,
        share_R=_share_episodes(mask_N, row_N, episode_R),
        rewards_R=torch.tensor(
            [reward for group in ordered for reward in group.rewards], dtype=torch.float32
        ),
        tickets_G=tuple(group.ticket for group in ordered),
        totals=Totals(0.0, 0.0, 0.0),
        baseline_R=_spread_baselines(ordered),
        experts_N=_spread_experts(ordered),
    )
    return dataclasses.replace(batch, totals=count_totals(batch))


def _concatenate_tokens(ordered: Sequence[Group]) -> tuple[Array, Array, Array]:
    """Return token ids, loss mask and log-probs of all rows; mask and log-prob are 0 on prompts."""
    tokens, masks, logprobs = [], [], []
    for group in ordered:
        num_prompt = len(group.prompt_ids)
        no_mask, no_logprobs = np.zeros(num_prompt, np.uint8), np.zeros(num_prompt, np.float32)
        for trajectory in group.trajectories:
            tokens += [group.prompt_ids, trajectory.response_ids]
            masks += [no_mask, trajectory.loss_mask]
            logprobs += [no_logprobs, trajectory.logprobs]
    return np.concatenate(tokens), np.concatenate(masks), np.concatenate(logprobs)


def _spread_versions(
    ordered: Sequence[Group], step: int, step_of_version: Mapping[int, int]
) -> tuple[Array, Array]:
    """Return for every token the number of its version and that version's step; prompts have 0 and `step`."""
    versions, steps, run_lengths = [], [], []
    for group in ordered:
        for trajectory in group.trajectories:
            versions.append(UNLOADED)
            steps.append(step)
            run_lengths.append(len(group.prompt_ids))
            for span in trajectory.spans:
                versions.append(span.version)
                steps.append(_step_of(span.version, step, step_of_version))
                run_lengths.append(span.end - span.start)
    return np.repeat(versions, run_lengths), np.repeat(steps, run_lengths)


def _number_episodes(ordered: Sequence[Group]) -> list[int]:
    """Return the episode of each row."""
    found: list[int] = []
    for group in ordered:
        first = found[-1] + 1 if found else 0
        found += [first + sample for sample in group.samples]
    return found


def _share_episodes(mask_N: torch.Tensor, row_N: torch.Tensor, episode_R: torch.Tensor) -> torch.Tensor:
    """Return the share of each row in the masked-in tokens of its episode; 0 of none."""
    count_R = Rows(row_N, len(episode_R)).count(mask_N)
    return count_R / sum_episodes(count_R, episode_R).clamp(min=1)


def _spread_baselines(ordered: Sequence[Group]) -> torch.Tensor | None:
    """Return the reward of each row's greedy answer [R], NaN where there is none; None if nowhere."""
    if all(group.baseline_reward is None for group in ordered):
        return None
    per_group = [math.nan if (found := group.baseline_reward) is None else found for group in ordered]
    sizes = [len(group.trajectories) for group in ordered]
    return torch.from_numpy(np.repeat(np.asarray(per_group, np.float32), sizes))


def _spread_experts(ordered: Sequence[Group]) -> torch.Tensor | None:
    """Return the recorded experts, see `PackedBatch.experts_N`. Raises DataError: they are of two models."""
    parts = [
        (length, rows)
        for group in ordered
        for one in group.trajectories
        for length, rows in ((len(group.prompt_ids), group.prompt_experts), (one.num_tokens, one.experts))
    ]
    forms = {(rows.dtype, *rows.shape[1:]) for _, rows in parts if rows is not None}
    if not forms:
        return None
    if len(forms) > 1:
        raise DataError(f"a batch has recorded experts of several forms: {sorted(map(str, forms))}")
    ((dtype, *sizes),) = forms
    experts_N, start = np.full((sum(length for length, _ in parts), *sizes), -1, np.int16), 0
    for length, rows in parts:
        if rows is not None:
            experts_N[start : start + length] = np.where(rows == np.iinfo(dtype).max, np.int16(-1), rows)
        start += length
    return torch.from_numpy(experts_N)


def plan_minibatches(tickets: Sequence[int], num_minibatches: int) -> list[tuple[int, ...]]:
    """Return the tickets of each minibatch: contiguous in ticket order, sizes equal to within one.

    With several data-parallel ranks plan over all tickets of the step, then let every rank select
    its own groups of each minibatch: that is the single-process minibatch, cut.
    """
    ordered = sorted(tickets)
    bounds = [len(ordered) * part // num_minibatches for part in range(num_minibatches + 1)]
    return [tuple(ordered[start:end]) for start, end in itertools.pairwise(bounds)]


def assign_shards(
    num_tokens_of: Mapping[int, int], plan: Sequence[Sequence[int]], num_shards: int
) -> list[list[int]]:
    """Return the tickets of each data-parallel rank: every minibatch is balanced by tokens.

    Within a minibatch by Karmarkar-Karp, ties to the lower ticket. Its heaviest part goes to the shard
    with the fewest tokens so far. A minibatch of fewer groups than shards leaves some with nothing.
    """
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    for tickets in plan:
        ordered = sorted(tickets)
        num_tokens = [num_tokens_of[ticket] for ticket in ordered]
        parts = karmarkar_karp(num_tokens, min(num_shards, len(ordered)), equal_size=False) if ordered else []
        lightest_first = sorted(range(num_shards), key=lambda shard: (load[shard], shard))
        for shard, part in zip(lightest_first, parts, strict=False):
            shards[shard] += [ordered[index] for index in part]
            load[shard] += sum(num_tokens[index] for index in part)
    return [sorted(shard) for shard in shards]


def count_totals(batch: PackedBatch) -> Totals:
    """Return the denominators of `batch` on this rank alone; the rows of an episode count as one."""
    per_row = torch.zeros(batch.num_rows).index_add_(0, batch.row_N, batch.counted_N)
    return Totals(
        num_tokens=float(batch.counted_N.sum()),
        num_rows=float(len(batch.episode_R[per_row > 0].unique())),
        num_trained=float(batch.loss_mask_N.sum()),
        num_positions=float(batch.num_tokens),
        num_packed_rows=float(batch.num_rows),
    )


def _check_groups(ordered: Sequence[Group]) -> None:
    if not ordered:
        raise DataError("a batch needs at least one group")
    for group in ordered:
        if not len(group.prompt_ids):
            raise DataError(
                f"ticket {group.ticket}: the prompt has no tokens, so nothing predicts the first answer token"
            )
        for trajectory in group.trajectories:
            if not len(trajectory.loss_mask) == len(trajectory.logprobs) == trajectory.num_tokens:
                raise DataError(
                    f"ticket {group.ticket}: mask, log-probs and tokens of a trajectory differ in length"
                )
    for before, after in itertools.pairwise(ordered):
        if before.ticket == after.ticket:
            raise DataError(f"ticket {after.ticket} occurs twice in one batch")


def _step_of(version: int, step: int, step_of_version: Mapping[int, int]) -> int:
    if version not in step_of_version:
        raise LedgerError(
            f"step {step}: a token was sampled by version {version}, which the ledger does not know"
        )
    if step_of_version[version] > step:
        raise LedgerError(
            f"step {step}: a token was sampled by version {version} of step {step_of_version[version]}"
        )
    return step_of_version[version]


def _shift(values: Array, last_positions: Array, dtype: type) -> torch.Tensor:
    """Move values of tokens to the positions that predict them; 0 at the last position of each row."""
    shifted: Array = np.zeros(len(values), dtype)
    shifted[:-1] = values[1:]
    shifted[last_positions] = 0
    return torch.from_numpy(shifted)


def _cumulate(lengths: Sequence[int]) -> tuple[int, ...]:
    return (0, *np.cumsum(lengths, dtype=np.int64).tolist())
