"""The real vLLM under versions of adapters alone, which it merges into the weights of its model each time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.core.config.tree import LoraSection
from asyncrl.core.errors import EngineError
from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.protocol import Completion, Sampling
from rollout_service.engine.vllm.engine import VllmEngine
from tests.rollout.engine.engine_parts import Change, LoopThread, logprobs_of, probe_of, stage
from tests.rollout.engine.families import Form, start_engine
from tests.rollout.replica.flight_parts import TOLERANCE, Flight
from weight_sync.encoding.low_rank import factor_shapes
from weight_sync.memory.manifest import Probe

pytestmark = pytest.mark.long
LORA = LoraSection(rank=3, alpha=5.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
FORM = Form("qwen3", is_tied=True, vocab_size=131)
PROMPT, NUM_TOKENS = [5, 60, 33, 86, 17, 2], 24
Factors = Mapping[str, torch.Tensor]


def factors_of(number: int) -> dict[str, torch.Tensor]:
    """Return the adapters of a version, random ones."""
    generator = torch.Generator().manual_seed(number)
    shapes = {name: tuple(one.shape) for name, one in FORM.build(0).named_parameters()}
    return {
        name: 0.2 * torch.randn(shape, generator=generator)
        for name, shape in factor_shapes(shapes, LORA).items()
    }


def merged(number: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model of a version, merged by hand."""
    model, factors = FORM.build(0), factors_of(number)
    with torch.no_grad():
        for name, factor in factors.items():
            if name.endswith("lora_B.weight"):
                stem = name.removesuffix(".lora_B.weight")
                delta = factor @ factors[f"{stem}.lora_A.weight"] * (LORA.alpha / LORA.rank)
                model.get_parameter(f"{stem}.weight").add_(delta)
    return model.to(dtype)


def sent(factors: Factors) -> Change:
    return lambda _: list(factors.items())


@dataclass
class Served:
    engine: VllmEngine
    loop: LoopThread

    def swap(self, factors: Factors | None, probe: Probe | None = None) -> None:
        number = self.engine.serving.number + 1
        change = list if factors is None else sent(factors)
        with stage(FORM.build(0), PolicyVersion(number, number), probe, change) as staged:
            self.loop.call(self.engine.swap(staged))

    def sample(self) -> Completion:
        sampling = Sampling(1.0, NUM_TOKENS, 1, ignores_eos=True)
        found: Completion = self.loop.call(self.engine.generate(PROMPT, sampling, f"{id(sampling)}"))
        return found

    def distance(self, model: PreTrainedModel) -> float:
        found = self.sample()
        wanted = logprobs_of(model, PROMPT, found.token_ids.tolist())
        return float((torch.tensor(found.logprobs) - wanted).abs().max())


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "two_workers"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loop, folder = LoopThread(), tmp_path_factory.mktemp("model")
    engine = start_engine(FORM.build(0), folder, loop, workers=request.param, lora=LORA)
    yield Served(engine, loop)
    loop.call(engine.shutdown())
    loop.close()


def test_every_token_in_flight_is_of_the_adapter_that_it_names(served: Served):
    first = served.engine.serving.number
    assert first == 0
    flight = Flight(
        served.engine,
        {0: FORM.build(0)},
        num_workers=6,
        max_tokens=80,
        make=merged,
        vocab_size=FORM.vocab_size,
        sent=lambda number: sent(factors_of(number)),
        differ_everywhere=False,
    )
    served.loop.call(flight.through(5), 240.0)
    assert min(flight.crossings[number] for number in range(1, 6)) >= 3, flight.crossings
    flight.check_spans()
    flight.check_logprobs()
    flight.check_greedy()


def test_an_adapter_that_comes_back_gives_the_same_bits(served: Served):
    """Deltas that were added to what was merged before would leave rounding errors."""
    served.swap(factors_of(1))
    first = served.sample()
    for number in range(2, 8):
        served.swap(factors_of(number))
        assert served.distance(merged(number)) < TOLERANCE
    assert served.sample().token_ids.tolist() != first.token_ids.tolist()
    served.swap(factors_of(1))
    again = served.sample()
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert list(again.logprobs) == list(first.logprobs)


def test_a_version_that_is_no_adapter_of_the_run_is_refused_and_changes_nothing(served: Served):
    served.swap(factors_of(1))
    before = served.sample()
    good = factors_of(2)
    name = next(iter(good))
    lacking = {key: factor for key, factor in good.items() if key != name}
    wide = good | {name: torch.zeros(LORA.rank + 1, good[name].shape[1])}
    for factors, told in ((None, "missing"), (lacking, "missing"), (wide, "of another shape")):
        with pytest.raises(EngineError, match=told):
            served.swap(factors)
    with pytest.raises(EngineError, match="of another dtype"):
        served.swap(good | {name: good[name].bfloat16()})
    served.swap(factors_of(1))
    assert list(served.sample().logprobs) == list(before.logprobs)


def test_a_factor_that_is_not_the_learner_s_is_found_by_the_probe(served: Served):
    served.swap(factors_of(1), probe_of(merged(1)))
    stale = {name: factors_of(1 if "o_proj.lora_B" in name else 2)[name] for name in factors_of(2)}
    with pytest.raises(EngineError, match="engine and learner hold different weights"):
        served.swap(stale, probe_of(merged(2)))
    served.swap(factors_of(2), probe_of(merged(2)))
    assert served.distance(merged(2)) < TOLERANCE


def test_in_bfloat16_merged_weights_are_rounded_once(tmp_path: Path):
    loop, model = LoopThread(), FORM.build(0)
    engine = start_engine(model, tmp_path / "model", loop, dtype="bfloat16", lora=LORA)
    served = Served(engine, loop)
    try:
        served.swap({name: factor.bfloat16() for name, factor in factors_of(1).items()})
        assert served.distance(merged(1, torch.bfloat16)) < served.distance(FORM.build(0).bfloat16()) / 10
    finally:
        loop.call(engine.shutdown())
        loop.close()
