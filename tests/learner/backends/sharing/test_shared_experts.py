"""Shared prompts of a mixture of experts: what it computes, trains and counts is that of packed rows."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.batching.batch import PackedBatch
from learner.batching.shared_prompts import find_units, measure_work, share_prompts
from tests.learner.backends.sharing.test_shared_prompt import (
    OPENERS,
    assert_gradients_alike,
    compute,
    make_batch,
)
from tests.learner.parts.samples import MIXTURES, save_model

RATES = ("actor/router_flip_rate", "actor/router_unrecorded")
ROUTERS = ("actor/expert_load_max", "actor/expert_load_min", "actor/router_entropy")


def record(batch: PackedBatch, num_experts: int = 4) -> PackedBatch:
    """Return the batch with random experts recorded of two layers: the same behind the same tokens."""
    experts_N = torch.full((batch.num_tokens, 2, 2), -1, dtype=torch.int16)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        data = batch.tokens_N[start:end].numpy().tobytes()
        for position in range(start, end - 1):
            seed = zlib.crc32(data[: 8 * (position - start + 1)])
            scores = torch.rand(2, num_experts, generator=torch.Generator().manual_seed(seed))
            experts_N[position] = scores.topk(2, -1).indices
    return replace(batch, experts_N=experts_N)


def reroute(batch: PackedBatch) -> PackedBatch:
    """Return the batch with one expert of the first row's fourth token exchanged for another one."""
    assert batch.experts_N is not None
    row = batch.experts_N[3, 0]
    row[0] = min(set(range(4)) - set(row.tolist()))
    return batch


@pytest.fixture(scope="module", params=MIXTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("backend", OPENERS)
@pytest.mark.parametrize(
    "make", [lambda: make_batch(), lambda: record(make_batch()), lambda: reroute(record(make_batch()))]
)
def test_what_comes_out_is_that_of_packed_rows(
    backend: str, make: Callable[[], PackedBatch], model: Path
) -> None:
    batch = make()
    wanted, wanted_gradients, counted, num_tokens = compute(
        OPENERS[backend], model, batch, shared_prompt="off"
    )
    columns, gradients, metrics, num_computed = compute(OPENERS[backend], model, batch)
    assert num_tokens == batch.num_tokens
    assert num_computed == measure_work(batch, is_shared=True).num_tokens < 0.7 * num_tokens
    for ours, theirs in zip(columns, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert_gradients_alike(gradients, wanted_gradients)
    names = (*ROUTERS, *(RATES if batch.experts_N is not None else ()))
    assert {name: metrics[name] for name in names} == pytest.approx(
        {name: counted[name] for name in names}, rel=1e-5
    )


def test_small_microbatches_that_are_recomputed_share_too(model: Path) -> None:
    batch = record(make_batch())
    for opener in OPENERS.values():
        _, wanted, _, num_tokens = compute(opener, model, batch, shared_prompt="off")
        changes = {"max_tokens_per_microbatch": 330, "recompute": "full"}
        _, gradients, metrics, num_computed = compute(opener, model, batch, **changes)
        assert num_computed < 0.8 * num_tokens
        assert_gradients_alike(gradients, wanted)
        assert metrics[RATES[1]] == pytest.approx(0.0, abs=1e-6)


def test_rows_that_are_routed_apart_share_no_token_from_there_on() -> None:
    same, batch = record(make_batch()), reroute(record(make_batch()))
    num_shared, num_left = (measure_work(one, is_shared=True).num_tokens for one in (same, batch))
    # A row that another goes on behind has a last token of its own: nothing is recorded of it.
    assert num_shared == measure_work(make_batch(), is_shared=True).num_tokens + 1
    assert num_shared < num_left < batch.num_tokens
    shared = share_prompts(batch)
    assert shared is not None
    assert shared.tree.num_tokens == num_left == sum(unit.num_tokens for unit in find_units(batch, 4096, 0))
    own_N, others_N = shared.tree.tree_from_N[3:20], shared.tree.tree_from_N[batch.cu_seqlens[1] :]
    assert not torch.isin(own_N, others_N).any()
    shared = share_prompts(same)
    assert shared is not None
    assert torch.equal(shared.tree.tree_from_N[:30], shared.tree.tree_from_N[same.cu_seqlens[1] :][:30])
