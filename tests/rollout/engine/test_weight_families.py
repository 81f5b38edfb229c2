"""The real vLLM under swaps, for tied and untied models of three families: nothing keeps an older weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.core.errors import EngineError
from asyncrl.core.runtime.faults import VARIABLE
from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.protocol import Sampling
from rollout_service.engine.vllm.engine import VllmEngine
from tests.different import assert_all_differ
from tests.rollout.engine.engine_parts import Change, LoopThread, logprobs_of, probe_of, sent_tensors, stage
from tests.rollout.engine.families import GROUPED, WIDTHS, Form, start_engine, swap
from tests.rollout.replica.flight_parts import TOLERANCE, Flight
from tests.rollout.trained_steps import probe_rows_of, train
from weight_sync.memory.manifest import Probe

FORMS = (
    Form("qwen3", is_tied=True, vocab_size=131),
    Form("llama", is_tied=False, vocab_size=87, width=WIDTHS[3]),
    Form("qwen2", is_tied=True, vocab_size=96, width=WIDTHS[2]),
    Form("qwen3_moe", is_tied=True, vocab_size=96),
    Form("mixtral", is_tied=False, vocab_size=87),
    Form("olmoe", is_tied=False, vocab_size=96, width=WIDTHS[0]),
    *(Form(family, is_tied=False, vocab_size=96) for family in GROUPED if family.startswith("deepseek")),
)
OTHERS = [pytest.param(form, marks=pytest.mark.long) for form in FORMS[1:]]
NUM_SWAPS = 20
NUM_TOKENS = 24
SEEN = 100 * TOLERANCE
CORRECTION = "mlp.gate.e_score_correction_bias"
"""Of a router; no loss trains it."""
PROMPT = [5, 60, 33, 86, 17, 2]
GREEDY = Sampling(1e-3, NUM_TOKENS, 1, ignores_eos=True)


@dataclass
class Served:
    form: Form
    base: PreTrainedModel
    engine: VllmEngine
    loop: LoopThread
    newest: int = 0

    def difference(self, model: PreTrainedModel, others: PreTrainedModel) -> tuple[float, float]:
        """Sample, and return how far the engine is from `model`, and how far `others` is from it."""
        number = self.engine.serving.number
        sampling = Sampling(1.0, NUM_TOKENS, number, ignores_eos=True)
        found = self.loop.call(self.engine.generate(PROMPT, sampling, f"sample-{number}"))
        ids = found.token_ids.tolist()
        wanted, other = logprobs_of(model, PROMPT, ids), logprobs_of(others, PROMPT, ids)
        engine = torch.tensor(found.logprobs)
        return float((engine - wanted).abs().max()), float((wanted - other).abs().max())

    def swap(self, model: PreTrainedModel, probe: Probe, change: Change = list) -> None:
        """Load `model`, changed on its way, under the next version that nothing was loaded as."""
        self.newest = max(self.newest, self.engine.serving.number) + 1
        with stage(model, PolicyVersion(self.newest, self.newest), probe, change) as staged:
            self.loop.call(self.engine.swap(staged))

    def step_of_refusal(self, steps: list[PreTrainedModel], probes: list[Probe], stale: str) -> int:
        """Send each step, with the first one's tensor `stale` if it names one.

        Returns the step that is refused, 0 for none.
        """
        old = sent_tensors(steps[0])[stale] if stale else None
        for step in range(1, len(steps)):
            try:
                self.swap(
                    steps[step],
                    probes[step],
                    lambda sent: [(name, old if name == stale else tensor) for name, tensor in sent],
                )
            except EngineError as error:
                return step if "engine and learner hold different weights" in str(error) else 0
        return 0


@contextmanager
def opened(form: Form, base: PreTrainedModel, folder: Path, **options: Any) -> Iterator[Served]:
    """Yield an engine that was started with `base`; see `start_engine` for `options`."""
    loop = LoopThread()
    engine = start_engine(base, folder, loop, **options)
    try:
        yield Served(form, base, engine, loop)
    finally:
        loop.call(engine.shutdown())
        loop.close()


@pytest.fixture(scope="module", params=[FORMS[0], *OTHERS], ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    form: Form = request.param
    with opened(form, form.build(0), tmp_path_factory.mktemp("model")) as found:
        yield found


@pytest.mark.long
def test_every_token_in_flight_through_twenty_versions_is_of_the_version_that_it_names(served: Served):
    form = served.form
    flight = Flight(
        served.engine,
        {0: served.base},
        num_workers=6,
        max_tokens=80,
        make=form.build,
        vocab_size=form.vocab_size,
    )
    served.loop.call(flight.through(NUM_SWAPS), 240.0)
    assert len(flight.models) == NUM_SWAPS + 1
    assert min(flight.crossings[number] for number in range(1, NUM_SWAPS + 1)) >= 3, flight.crossings
    flight.check_spans()
    flight.check_logprobs()
    flight.check_greedy()


def test_a_change_of_each_tensor_alone_reaches_the_engine_s_log_probs(served: Served):
    names = list(sent_tensors(served.base))
    assert len(names) >= 20
    versions: list[Any] = [served.base]
    first = served.engine.serving.number + 1
    for number, name in enumerate(names, first):
        model = with_another(served.form, name, number)
        versions.append(model)
        swap(served.engine, served.loop, number, model)
        from_model, from_base = served.difference(model, served.base)
        assert from_base > SEEN, f"the learner's log-probs do not depend on '{name}': this shows nothing"
        assert from_model < TOLERANCE, f"the engine did not follow '{name}'"
    assert_all_differ(map(sent_tensors, versions))


def test_each_tensor_that_an_engine_kept_is_found_by_the_probe_within_two_steps(
    served: Served, tmp_path: Path
):
    steps = [served.base, *train(served.base, 2)]
    assert_all_differ(steps, in_every_tensor=True)
    probes = [probe_rows_of(model, tmp_path) for model in steps]
    for model, probe in zip(steps, probes, strict=True):
        served.swap(model, probe)
    trained = [name for name in sent_tensors(served.base) if not name.endswith(CORRECTION)]
    found = {name: served.step_of_refusal(steps, probes, name) for name in trained}
    assert set(found.values()) <= {1, 2}, {name: step for name, step in found.items() if not step}
    served.swap(steps[2], probes[2])
    assert served.difference(steps[2], served.base)[0] < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("form", [FORMS[0], OTHERS[1]], ids=str)
def test_a_tied_head_that_vllm_s_own_reload_leaves_packed_is_found_by_the_probe_within_two_steps(
    form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its embedding is the new one: two tensors that are one in the checkpoint differ."""
    base = form.build(0)
    steps = [base, *train(base, 2)]
    probes = [probe_rows_of(model, tmp_path) for model in steps]
    monkeypatch.setenv(VARIABLE, "engine.unrepeated")
    with opened(form, base, tmp_path / "model") as served:
        served.swap(steps[0], probes[0])
        assert served.step_of_refusal(steps, probes, stale="") in (1, 2)


@pytest.mark.long
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_in_bfloat16_each_probe_passes_and_a_kept_tensor_is_refused_in_the_end(tmp_path: Path, is_tied: bool):
    form = Form("qwen3", is_tied=is_tied, vocab_size=131)
    base = form.build(0)
    steps = [model.bfloat16() for model in (base, *train(base, NUM_SWAPS))]
    assert_all_differ(steps)
    probes = [probe_rows_of(model, tmp_path) for model in steps]
    with opened(form, steps[0], tmp_path / "model", dtype="bfloat16") as served:
        for model, probe in zip(steps, probes, strict=True):
            served.swap(model, probe)
        assert served.step_of_refusal(steps, probes, "model.embed_tokens.weight")


def with_another(form: Form, name: str, seed: int) -> PreTrainedModel:
    """Return the model of seed 0 with the tensor `name` drawn anew."""
    model = form.build(0)
    parameter = sent_tensors(model)[name]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(parameter.shape, generator=generator)
    with torch.no_grad():
        parameter.copy_((1.0 if "norm" in name else 0.0) + 0.5 * noise)
    return model


def test_a_tied_head_that_comes_beside_the_embedding_is_refused(served: Served):
    """Two tensors for one parameter could differ."""
    if not served.form.is_tied:
        pytest.skip("its head is a tensor of its own")
    model, number = served.form.build(900), served.engine.serving.number + 1
    head = model.get_output_embeddings().weight.detach()
    with (
        stage(
            model, PolicyVersion(number, number), change=lambda sent: [*sent, ("lm_head.weight", head)]
        ) as staged,
        pytest.raises(EngineError, match=r"unexpected \['lm_head.weight'\]"),
    ):
        served.loop.call(served.engine.swap(staged))
    swap(served.engine, served.loop, number + 1, model, probe_of(model))
    assert served.difference(model, served.base)[0] < TOLERANCE


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
LOST = {
    "qwen3_moe": (EXPERT,),
    "glm4_moe": (EXPERT, f"model.layers.1.{CORRECTION}"),
    "deepseek_v2": (EXPERT, "model.layers.1.mlp.shared_experts.up_proj.weight"),
    "deepseek_v3": (f"model.layers.1.{CORRECTION}", "model.layers.1.self_attn.kv_b_proj.weight"),
}


@pytest.mark.long
@pytest.mark.parametrize("family", LOST)
def test_experts_follow_two_loads_and_come_back_bit_by_bit(family: str, tmp_path: Path):
    form = Form(family, is_tied=family == "qwen3_moe", vocab_size=96)
    models = [form.build(seed) for seed in range(3)]
    assert_all_differ(models, in_every_tensor=True)
    with opened(form, models[0], tmp_path) as served:
        first = served.loop.call(served.engine.generate(PROMPT, GREEDY, "first"))
        for model in (*models[1:], models[0]):
            served.swap(model, probe_of(model))
            assert served.difference(model, models[0])[0] < TOLERANCE
        again = served.loop.call(served.engine.generate(PROMPT, GREEDY, "again"))
        assert again.token_ids.tolist() == first.token_ids.tolist()
        assert again.logprobs.tolist() == first.logprobs.tolist()
        for missing in LOST[family]:
            with pytest.raises(EngineError, match=rf"missing \['{missing}'\]"):
                served.swap(
                    models[1],
                    probe_of(models[1]),
                    lambda sent, missing=missing: [x for x in sent if x[0] != missing],  # type: ignore[misc]
                )
