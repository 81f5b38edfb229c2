"""INT8 weights in the real vLLM on CPU: quantised from each version, with nothing of an older one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.core.errors import EngineError
from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.protocol import Sampling
from rollout_service.engine.vllm.engine import VllmEngine
from rollout_service.engine.vllm.quantized import quantize
from tests.different import assert_all_differ
from tests.rollout.engine.engine_parts import LoopThread, logprobs_of, stage
from tests.rollout.engine.families import WIDTHS, Form, start_engine, swap
from tests.rollout.trained_steps import probe_rows_of

FORMS = (
    Form("qwen3", is_tied=True, vocab_size=131),
    Form("llama", is_tied=False, vocab_size=87, width=WIDTHS[3]),
    Form("qwen2", is_tied=True, vocab_size=96, width=WIDTHS[2]),
)
CASES = [
    (FORMS[0], 1),
    *(pytest.param(form, 1, marks=pytest.mark.long) for form in FORMS[1:]),
    pytest.param(FORMS[1], 2, marks=pytest.mark.long),
]
"""With the number of workers that share the model."""
PROMPT = [5, 60, 33, 86, 17, 2]
ROUNDING, WRONG = 1e-3, 0.5
"""[nats] More than float32 rounds; less than another model's log-probs are off."""


@contextmanager
def started(model: PreTrainedModel, folder: Path, workers: int) -> Iterator[tuple[VllmEngine, LoopThread]]:
    loop = LoopThread()
    engine = start_engine(model, folder, loop, workers, quantization="int8")
    try:
        yield engine, loop
    finally:
        loop.call(engine.shutdown())
        loop.close()


def sample(engine: VllmEngine, loop: LoopThread) -> tuple[list[int], torch.Tensor]:
    found = loop.call(engine.generate(PROMPT, Sampling(1.0, 24, 7, ignores_eos=True), "sample"))
    return found.token_ids.tolist(), torch.tensor(found.logprobs)


def gap(model: PreTrainedModel, said: tuple[Sequence[int], torch.Tensor]) -> float:
    ids, logprobs = said
    return float((logprobs - logprobs_of(model, PROMPT, ids)).abs().mean())


@pytest.mark.parametrize(("form", "workers"), CASES, ids=str)
def test_each_version_is_quantised_as_a_start_with_it_would(form: Form, workers: int, tmp_path: Path):
    """Packed weights of an older version, or scales of one, would show in the last digit."""
    first, second = models = [form.build(seed) for seed in range(2)]
    assert_all_differ(models, in_every_tensor=True)
    with started(first, tmp_path / "first", workers) as (engine, loop):
        by_first = sample(engine, loop)
        swap(engine, loop, 1, second, probe_rows_of(second, tmp_path))
        by_second = sample(engine, loop)
        with (
            stage(first, PolicyVersion(2, 2), probe_rows_of(second, tmp_path)) as staged,
            pytest.raises(EngineError, match="engine and learner hold different weights"),
        ):
            loop.call(engine.swap(staged))
        swap(engine, loop, 3, first)
        assert torch.equal(sample(engine, loop)[1], by_first[1])
    with started(second, tmp_path / "second", workers) as (engine, loop):
        assert torch.equal(sample(engine, loop)[1], by_second[1])
    for model, other, said in ((first, second, by_first), (second, first, by_second)):
        assert ROUNDING < gap(model, said) < WRONG < gap(other, said)


def test_experts_are_refused_by_name(tmp_path: Path):
    model = Form("qwen3_moe", is_tied=False, vocab_size=131).build(0)
    told = "has experts, which asyncrl_int8 leaves whole"
    with pytest.raises(EngineError, match=told), started(model, tmp_path, 1):
        pass


def test_a_weight_is_rounded_to_the_nearest_of_255_steps_of_its_channel():
    weight_OI = torch.tensor([[1.27, -0.634, 0.0], [0.0, 0.0, 0.0], [-2.54, 0.021, 2.0]])
    found_OI, scale_O1 = quantize(weight_OI)
    assert found_OI.tolist() == [[127, -63, 0], [0, 0, 0], [-127, 1, 100]]
    torch.testing.assert_close(scale_O1, torch.tensor([[0.01], [1.0], [0.02]]))
