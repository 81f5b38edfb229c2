"""Routers of transformers' models on fsdp2: they replay recorded experts, and are measured, as Megatron's."""

import dataclasses
import functools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.core.errors import ConfigError, DataError
from learner.batching.routing import Recorded
from learner.fsdp2.model.routers import attach_routers, route_by
from tests.learner.backends.experts.test_router_replay import RATES, RECORDS, loss, make_batch
from tests.learner.parts.launching import run_ranks
from tests.learner.parts.samples import MIXTURES, save_model
from tests.learner.parts.training import open_backend, open_fsdp2, record_experts, train

OF_FOUR = {"num_layers": 2, "num_active": 2, "num_experts": 4}
SMALL = {"recompute": "full", "max_tokens_per_microbatch": 64}


def record(batch, kind):
    return record_experts(batch, **(RECORDS | {"num_layers": 2} if kind == "qwen3_moe" else OF_FOUR))


@pytest.fixture(scope="module", params=MIXTURES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def mixture(kind, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp(kind), kind)


def routers_of(backend):
    return [
        (int(name.split(".layers.")[1].split(".")[0]), module)
        for name, module in backend._engine._module.named_modules()
        if type(module).__name__.endswith("TopKRouter")
    ]


def read_routes(backend, batch, num_layers):
    """Return the batch with what its own routers choose, the last first."""
    experts_N = torch.full((batch.num_tokens, num_layers, 2), -1, dtype=torch.int16)

    def note(layer, _router, _inputs, output):
        experts_N[:, layer] = output[2].flip(-1).to(torch.int16)

    hooks = [
        router.register_forward_hook(functools.partial(note, layer)) for layer, router in routers_of(backend)
    ]
    backend.set_max_tokens_per_microbatch(batch.num_tokens)
    backend.logprobs(batch)
    for hook in hooks:
        hook.remove()
    experts_N[torch.tensor(batch.cu_seqlens[1:]) - 1] = -1
    return dataclasses.replace(batch, experts_N=experts_N)


def train_once(opener, model, make, **changes):
    backend = opener(model, **changes)
    batch = make(backend)
    backend.set_max_tokens_per_microbatch(changes.get("max_tokens_per_microbatch", 4096))
    before_N, metrics = backend.logprobs(batch)[0], backend.update(batch, loss)
    weights = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    backend.close()
    return before_N, metrics, weights


@pytest.mark.parametrize("changes", [{}, SMALL], ids=str)
def test_what_routers_would_choose_anyway_changes_no_bit(mixture, changes):
    lone_N, metrics, weights = train_once(open_fsdp2, mixture, lambda _: make_batch(), **changes)
    found_N, replayed, found = train_once(
        open_fsdp2, mixture, lambda one: read_routes(one, make_batch(), 2), **changes
    )
    assert found_N.equal(lone_N)
    assert [replayed.pop(name) for name in RATES] == [0.0, 0.0]
    assert replayed == metrics
    assert all(found[name].equal(tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("changes", [{}, SMALL], ids=str)
def test_routers_do_as_megatron_s_with_the_same_recorded_experts(mixture, kind, changes):
    make = lambda _: record(make_batch(), kind)  # noqa: E731
    wanted_N, wanted, weights = train_once(open_backend, mixture, make)
    found_N, metrics, found = train_once(open_fsdp2, mixture, make, **changes)
    free_N, _, _ = train_once(open_fsdp2, mixture, lambda _: make_batch())
    assert (found_N - free_N).abs().max() > 0.05
    torch.testing.assert_close(found_N, wanted_N, rtol=0, atol=1e-5)
    assert metrics == pytest.approx(wanted, rel=1e-5)
    assert metrics[RATES[0]] > 0.5
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4)


def test_positions_are_counted_exactly_in_bfloat16(mixture, kind):
    batch = record(make_batch(), kind)
    batch.experts_N[:] = -1
    batch.experts_N[: batch.cu_seqlens[1] - 1] = torch.tensor([1, 0], dtype=torch.int16)
    _, metrics, _ = train_once(open_fsdp2, mixture, lambda _: batch, dtype="bfloat16")
    num_read, num_recorded = batch.num_tokens - batch.num_rows, batch.cu_seqlens[1] - 1
    assert num_read > 256, "bfloat16 has no odd number above 256"
    assert metrics[RATES[1]] == pytest.approx(1 - num_recorded / num_read, rel=1e-6)


def test_rows_that_no_router_can_have_chosen_are_refused(mixture, kind):
    backend, batch = open_fsdp2(mixture), record(make_batch(), kind)
    batch.experts_N[3, 0] = 1
    with pytest.raises(DataError, match=r"token 3 of a row, layer 0: the recorded experts \[1, 1\]"):
        backend.logprobs(batch)
    backend.close()


def test_recorded_experts_are_refused_by_name_where_they_cannot_be_taken(mixture, kind, tmp_path):
    backend = open_fsdp2(mixture, compile=True)
    with pytest.raises(ConfigError, match=r"cannot be taken again on fsdp2: learner\.compile"):
        backend.logprobs(record(make_batch(), kind))
    backend.close()
    for opener in (open_fsdp2, open_backend):
        backend = opener(save_model(tmp_path / "dense"))
        with pytest.raises(DataError, match="experts were recorded, and the model has none"):
            backend.logprobs(record(make_batch(), kind))
        backend.close()


def test_routers_that_cannot_be_told_of_the_rows_are_refused_by_name(kind, tmp_path, monkeypatch):
    folder = save_model(tmp_path / "model", kind, num_layers=4)

    def attach(layers_of, is_packed=True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        return attach_routers(model, layers_of(model), is_packed=is_packed, is_compiled=False).problem

    assert attach(lambda model: model.model.layers) == ""
    assert "runs padded rows" in attach(lambda model: model.model.layers, is_packed=False)
    assert "a layer with several routers" in attach(lambda model: [model])
    built = type(AutoModelForCausalLM.from_pretrained(folder))
    monkeypatch.setattr(built, "_can_record_outputs", {}, raising=False)
    assert "does not say which module" in attach(lambda model: model.model.layers)


def test_a_router_that_ranks_its_experts_in_two_steps_is_refused():
    recorded = Recorded(torch.zeros(3, 2, dtype=torch.int16))
    with pytest.raises(ConfigError, match="ranks experts in 2 steps"):
        route_by(recorded, lambda: [torch.rand(3, 4).topk(2), torch.topk(torch.rand(3, 4), 2)])
    with pytest.raises(ConfigError, match="ranks experts in 0 steps"):
        route_by(recorded, lambda: torch.rand(3, 4).sort())


@pytest.mark.long
def test_two_ranks_of_fsdp2_replay_the_routes_of_one_process(tmp_path):
    model = save_model(tmp_path / "model", "qwen3_moe", num_layers=4)
    job = {"name": "fsdp2", "kind": "experts", "model": model, "records": RECORDS}
    run_ranks(2, [job | {"changes": {"dp": 2, **SMALL}}], tmp_path)
    backend = open_backend(model, grad_clip=0.02)
    wanted = train(backend, range(3), record=lambda batch: record_experts(batch, **RECORDS))
    backend.close()
    for rank in range(2):
        found = json.loads((tmp_path / f"fsdp2.{rank}.json").read_text())
        for ours, reference in zip(found["metrics"], wanted, strict=True):
            assert ours == pytest.approx(reference, rel=1e-5, abs=1e-5)
