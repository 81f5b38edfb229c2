"""Weights from either learner into the real vLLM, over families, vocabularies, widths and layouts.

Each row: a learner trains twenty versions, an engine is given one after another, and every sampled token
has Hugging Face's log-prob under the version that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from learner.backend import LossFn
from learner.batching.batch import PackedBatch, build_batch
from rollout_service.engine.protocol import Sampling
from tests.different import assert_all_differ
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import open_backend, open_fsdp2
from tests.rollout.engine.engine_parts import LoopThread, logprobs_of
from tests.rollout.engine.families import Form, start_engine, swap
from tests.rollout.replica.flight_parts import TOLERANCE, Flight
from tests.system.parts.weight_table import Row, cover, pairs_of, pairwise_rows, possible_pairs

NUM_SWAPS = 20
LARGE_VOCABULARY = 10_000
LEARNING_RATE = 4e-3
"""Neighbours differ by 0.03 nats or more. At 1e-2 the widest models became so steep that float32 alone was
1.4e-4 from float64 after twenty updates; at this rate it is 3.5e-5."""
OPENERS = {"megatron": open_backend, "fsdp2": open_fsdp2}


def test_the_table_has_every_pair_that_is_possible():
    seen = set().union(*(pairs_of(row) for row in cover()))
    assert seen == possible_pairs()
    assert len(seen) > 150


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", pairwise_rows(), ids=str)
def test_an_engine_holds_what_the_learner_has_at_every_version(row: Row, tmp_path: Path):
    models = dict(enumerate(train_versions(row, tmp_path / "learner")))
    assert len(models) == NUM_SWAPS + 1
    assert_all_differ(models.values(), in_every_tensor=True)
    loop = LoopThread()
    engine = start_engine(models[0], tmp_path / "engine", loop, row.workers)
    try:
        if row.is_in_flight:
            fly(engine, loop, models, row.form)
        else:
            rest(engine, loop, models, row.form)
    finally:
        loop.call(engine.shutdown())
        loop.close()


def train_versions(row: Row, folder: Path) -> Iterator[PreTrainedModel]:
    """Yield the model of the start, then what the learner exports after each of its updates."""
    start = row.form.build(0)
    start.save_pretrained(folder)
    options = {"lr": LEARNING_RATE, "warmup_steps": 0, "minibatches": 1}
    backend = OPENERS[row.backend](folder, **options)
    try:
        yield start
        for number in range(1, NUM_SWAPS + 1):
            groups = make_groups(seed=number, vocab_size=row.form.vocab_size)
            batch = build_batch(groups, 0, {1: 0}).select_groups([group.ticket for group in groups])
            backend.update(batch, pushing(number))
            yield load(row.form, dict(backend.named_tensors()))
    finally:
        backend.close()


def pushing(number: int) -> LossFn:
    """Return a loss that moves every tensor: some log-probs go up and others down, others in each version."""
    generator = torch.Generator().manual_seed(number)

    def loss(logprobs_N: torch.Tensor, _: torch.Tensor, part: PackedBatch) -> tuple[torch.Tensor, Any]:
        signs_N = torch.randn(len(logprobs_N), generator=generator).sign()
        return (logprobs_N * signs_N * part.loss_mask_N).sum() / part.totals.num_tokens, {}

    return loss


def load(form: Form, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Return Hugging Face's model with the exported tensors, which must be all of its parameters."""
    model = form.build(0)
    parameters = dict(model.named_parameters())
    assert tensors.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return model


def fly(engine: Any, loop: LoopThread, models: dict[int, PreTrainedModel], form: Form) -> None:
    is_large = form.vocab_size > LARGE_VOCABULARY
    flight = Flight(
        engine,
        {0: models[0]},
        num_workers=3 if is_large else 8,
        max_tokens=60 if is_large else 120,
        make=models.__getitem__,
        vocab_size=form.vocab_size,
    )
    loop.call(flight.through(NUM_SWAPS), 1500.0)
    assert min(flight.crossings[number] for number in range(1, NUM_SWAPS + 1)) >= 2, flight.crossings
    flight.check_spans()
    assert flight.check_logprobs() > 500
    flight.check_greedy()


def rest(engine: Any, loop: LoopThread, models: dict[int, PreTrainedModel], form: Form) -> None:
    prompts = torch.randint(form.vocab_size, (4, 6), generator=torch.Generator().manual_seed(0)).tolist()
    for number, model in models.items():
        if number:
            swap(engine, loop, number, model)
        for index, prompt in enumerate(prompts):
            sampling = Sampling(1.0, 16, index, ignores_eos=True)
            found = loop.call(engine.generate(prompt, sampling, f"{number}.{index}"))
            ids, said = found.token_ids.tolist(), torch.tensor(found.logprobs)
            assert (said - logprobs_of(model, prompt, ids)).abs().max() < TOLERANCE, f"version {number}"
            if number:
                before = logprobs_of(models[number - 1], prompt, ids)
                assert (said - before).abs().max() > 100 * TOLERANCE, f"{number} is as the one before"
