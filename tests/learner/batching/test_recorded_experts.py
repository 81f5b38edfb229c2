"""Recorded experts of a batch: they follow their tokens, and where none were recorded is -1."""

import dataclasses
import itertools

import torch

from learner.batching.batch import build_batch
from learner.batching.parts import join_batches, make_empty
from tests.learner.parts.samples import make_groups

LAYERS, ACTIVE = 3, 2


def make_batch():
    """Return a batch whose recorded experts name their place, -1 for the last token of each row."""
    batch = build_batch(make_groups(), 0, {1: 0})
    experts_N = torch.arange(batch.num_tokens * LAYERS * ACTIVE).view(-1, LAYERS, ACTIVE).to(torch.int16)
    experts_N[torch.tensor(batch.cu_seqlens[1:]) - 1] = -1
    return dataclasses.replace(batch, experts_N=experts_N)


def test_microbatches_and_selections_have_the_experts_of_their_tokens():
    batch = make_batch()
    parts = batch.balance_microbatches(64, min_parts=batch.num_rows + 2)
    assert sum(int(part.origin_N[0]) == -1 for part in parts) == 2
    for part in parts:
        wanted = (
            batch.experts_N[part.origin_N] if part.origin_N[0] >= 0 else torch.full_like(part.experts_N, -1)
        )
        assert part.experts_N.equal(wanted)
        assert part.experts_N.shape == (part.num_tokens, LAYERS, ACTIVE)
    ticket = batch.tickets_G[1]
    assert batch.select_groups([ticket]).experts_N.equal(
        batch.experts_N[(batch.group_R[batch.row_N] == 1).nonzero()[:, 0]]
    )
    assert batch.select_groups(()).experts_N.shape == (0, LAYERS, ACTIVE)


def test_a_joined_batch_has_no_experts_recorded_where_a_part_has_none():
    batch = make_batch()
    first, second = (batch.select_groups([ticket]) for ticket in batch.tickets_G[:2])
    joined = join_batches([first, make_empty(0), dataclasses.replace(second, experts_N=None)])
    assert joined.experts_N[: first.num_tokens].equal(first.experts_N)
    assert (joined.experts_N[first.num_tokens :] == -1).all()
    assert joined.experts_N.dtype == torch.int16
    assert len(joined.experts_N) == joined.num_tokens
    assert (
        join_batches([dataclasses.replace(one, experts_N=None) for one in (first, second)]).experts_N is None
    )


def test_shares_of_a_batch_have_the_experts_of_their_groups():
    batch = make_batch()
    shares = [batch.select_groups([ticket]) for ticket in batch.tickets_G]
    assert join_batches(shares).experts_N.equal(batch.experts_N)
    ends = list(itertools.accumulate(share.num_tokens for share in shares))
    assert ends[-1] == batch.num_tokens
