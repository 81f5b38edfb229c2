"""A learner step on groups as they finish: each part adds its gradient, the last one ends in the update.

    part by part: fetch -> pack -> mask what is over age -> prox, reference -> advantages -> gradient
    at the end:   divide the gradient by what the whole batch counts -> update -> metrics of the whole batch

The weights do not change before the end, so each token has the lag, the prox log-prob and the advantage that
it would have in the whole batch: `core.config.rules.streaming` names what else is refused. Losses are sums
until the denominators are known. Invariant: the gradient is that of the whole batch up to the rounding of
float32 sums; the same parts in the same order give the same bits.

Shapes: N packed positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncrl.core.metrics import extreme_of
from learner.algorithms.aggregation import find_divisor
from learner.algorithms.objective import Objective
from learner.algorithms.validation import ONE_AGGREGATION
from learner.backend import Models
from learner.batch_fetcher import Source
from learner.batching.batch import PackedBatch, Totals, count_totals
from learner.batching.parts import join_batches
from learner.orders import Train, join_parts
from learner.report import Stopwatch, check_update, describe_engine_gap
from learner.step import Share, StepResult, ask_models, make_result, sum_over_shares, take_share

UNDIVIDED = Totals(1.0, 1.0, 1.0)
LOSSES = ("actor/loss", "actor/pg_loss", "actor/entropy_loss", "actor/kl_loss")
"""Metrics of an update that are divided as the loss is; the others are means over trained tokens."""


@dataclass(frozen=True)
class Part:
    """A computed part; `asked` has the models' outputs for it, `batch` is its trained batch."""

    order: Train
    share: Share
    asked: tuple[PackedBatch, torch.Tensor | None, torch.Tensor | None]
    batch: PackedBatch


class StreamedStep:
    """One step in progress: `add` its parts, the last one too, then `finish`. Collective."""

    def __init__(
        self,
        fetcher: Source,
        models: Models,
        objective: Objective,
        watch: Stopwatch,
        max_prompt_tokens: int,
        *,
        keeps_cache: bool = False,
    ) -> None:
        self._fetcher, self._models, self._objective = fetcher, models, objective
        self._watch, self._max_prompt_tokens = watch, max_prompt_tokens
        self._keeps_cache = keeps_cache
        self._parts: list[Part] = []
        self._sums: dict[str, float] = {}
        self._overlapped_s = 0.0

    def add(self, order: Train) -> None:
        """Fetch one part and add its gradient, undivided."""
        before_s = sum(self._watch.seconds.values())
        share = take_share(order, [order.tickets], self._fetcher, self._models, self._objective, self._watch)
        asked = ask_models(share.batch, self._models, self._objective, self._watch)
        with self._watch.time("adv"):
            batch, _ = self._objective.prepare(*asked)
        batch = dataclasses.replace(batch, totals=UNDIVIDED)
        self._parts.append(Part(order, share, asked, batch))
        with self._watch.time("update_actor"):
            found = self._models.policy.accumulate(
                [part.batch for part in self._parts], self._objective.loss, is_last=order.is_last
            )
        self._sums = _add_metrics(self._sums, found)
        if not order.is_last:  # the rest of the batch was still being generated
            self._overlapped_s += sum(self._watch.seconds.values()) - before_s

    def finish(self) -> tuple[Train, StepResult]:
        """Divide the gradient and update; return the order of the whole batch and its result."""
        order = join_parts([part.order for part in self._parts])
        share = _join_shares([part.share for part in self._parts])
        over_ranks = sum_over_shares(self._models.policy)
        with self._watch.time("adv"):
            batch, prepared = self._objective.prepare(*_join_asked(self._parts), over_ranks)
        counts = torch.tensor(dataclasses.astuple(count_totals(batch)), dtype=torch.float64)
        totals = Totals(*over_ranks(counts).round().tolist())
        with self._watch.time("update_actor"):
            divisor, batches = self._find_divisor(totals), [part.batch for part in self._parts]
            updated = dict(self._models.policy.apply(batches, _divide(self._sums, divisor, totals), divisor))
        with self._watch.time("check"):
            updated |= check_update(batch, self._models.policy)
        found = {
            "actor/num_updates": 1.0,
            "stream/parts": float(len(self._parts)),
            "stream/overlapped_s": self._overlapped_s,
        }
        gap = describe_engine_gap(batch, share.batch.loss_mask_N, keeps_cache=self._keeps_cache)
        found |= prepared | gap | updated
        return order, make_result(order, share, batch, self._objective, self._max_prompt_tokens, found)

    def _find_divisor(self, totals: Totals) -> float:
        section = self._objective.section
        return find_divisor(
            ONE_AGGREGATION.get(section.loss, section.aggregation),
            num_tokens=totals.num_trained if section.verl_compat else totals.num_tokens,
            num_rows=totals.num_rows,
        )


def _join_shares(shares: Sequence[Share]) -> Share:
    shards = [[*map(list, parts)] for parts in zip(*(share.shards for share in shares), strict=True)]
    return Share(
        [sorted(ticket for part in shard for ticket in part) for shard in shards],
        [group for share in shares for group in share.groups],
        join_batches([share.whole for share in shares]),
        join_batches([share.batch for share in shares]),
        shares[0].shares_prompts,
    )


def _join_asked(parts: Sequence[Part]) -> tuple[PackedBatch, torch.Tensor | None, torch.Tensor | None]:
    batches, prox, entropies = zip(*(part.asked for part in parts), strict=True)
    prox_N, entropy_N = (None if values[0] is None else torch.cat(values) for values in (prox, entropies))
    return join_batches(batches), prox_N, entropy_N


def _add_metrics(sums: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
    return {name: _combine(name, sums[name], value) if sums else value for name, value in found.items()}


def _combine(name: str, one: float, other: float) -> float:
    rule = extreme_of(name)
    if rule is None:
        return one + other
    return max(one, other) if rule == "max" else min(one, other)


def _divide(sums: Mapping[str, float], divisor: float, totals: Totals) -> dict[str, float]:
    """Return the metrics of the update, which were summed as the loss was."""
    num_trained = max(totals.num_trained, 1.0)
    return {
        name: value if extreme_of(name) else value / (divisor if name in LOSSES else num_trained)
        for name, value in sums.items()
    }
