"""State written at one layout of ranks and read at another: nothing of it changes."""

import json

import pytest
import torch
from safetensors.torch import load_file

from learner.checkpoint.reader import StateReader
from learner.checkpoint.snapshot import KINDS
from tests.learner.checkpoint.resharding import FIRST, SECOND
from tests.learner.parts.launching import run_ranks
from tests.learner.parts.samples import save_model
from tests.learner.parts.training import open_backend, train

TWO_RANKS = {
    "tp": {"tp": 2, "sequence_parallel": True},
    "dp": {"dp": 2},
    "pp": {"pp": 2},
}
MORE_RANKS = {
    "qwen2_tied": {"tp_pp": (4, {"tp": 2, "pp": 2}), "tp_dp": (4, {"tp": 2, "dp": 2})},
    "qwen2": {"dp3": (3, {"dp": 3}), "cp": (2, {"cp": 2})},
    "phi3": {"tp_pp": (4, {"tp": 2, "pp": 2})},
}


def run_layouts(world_size, layouts, model, state, out):
    """Let `world_size` processes go on from `state` at each layout, then from what they saved there."""
    jobs = []
    for name, changes in layouts.items():
        same = {"kind": "resharded", "model": model, "changes": changes}
        jobs.append(same | {"name": name, "state": state, "seed": 3})
        jobs.append(same | {"name": f"{name}-again", "state": out / name / "state", "seed": 9})
    run_ranks(world_size, jobs, out)


def train_alone(model, folder):
    """Train in one process, save half way; return the metrics and weights of the second half."""
    backend = open_backend(model)
    train(backend, FIRST)
    backend.save_state(folder / "state")
    metrics = train(backend, SECOND)
    backend.save_hf(folder / "weights")
    backend.close()
    return metrics, load_file(folder / "weights" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, *train_alone(model, folder)


@pytest.fixture(scope="module")
def two_ranks(model, alone, tmp_path_factory):
    out = tmp_path_factory.mktemp("two_ranks")
    run_layouts(2, TWO_RANKS, model, alone[0] / "state", out)
    return out


def check_same_state(ours, theirs):
    with StateReader(ours) as one, StateReader(theirs) as other:
        assert one.shapes == other.shapes
        assert one.extra == other.extra
        for name in one.shapes:
            for kind in KINDS:
                assert torch.equal(one.read_whole(name, kind), other.read_whole(name, kind)), (name, kind)


def check_went_on_the_same(out, layout, world_size, metrics, weights):
    for rank in range(world_size):
        resharded, resumed = (
            json.loads((out / f"{name}.{rank}.json").read_text()) for name in (layout, f"{layout}-again")
        )
        assert resumed == resharded, "a resume at the same layout is bit-exact"
        for ours, reference in zip(resharded, metrics, strict=True):
            assert ours == pytest.approx(reference, abs=1e-5)
    first, second = (
        load_file(out / name / "weights" / "model.safetensors") for name in (layout, f"{layout}-again")
    )
    for name, tensor in weights.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_state_goes_through_another_layout_without_a_changed_bit(layout, two_ranks, alone):
    check_same_state(two_ranks / layout / "state", alone[0] / "state")


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_training_goes_on_at_another_layout_as_it_would_have(layout, two_ranks, alone):
    check_went_on_the_same(two_ranks, layout, 2, *alone[1:])


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_one_process_goes_on_from_the_state_of_two(layout, model, two_ranks, alone):
    _, metrics, weights = alone
    backend = open_backend(model, seed=5)
    backend.load_state(two_ranks / layout / "state")
    assert train(backend, SECOND) == metrics, "the state has not changed a bit, so nothing that follows has"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in backend.named_tensors())
    backend.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", MORE_RANKS)
def test_many_ranks_and_other_models_go_on_too(kind, tmp_path):
    model = save_model(tmp_path / "model", kind)
    metrics, weights = train_alone(model, tmp_path)
    for name, (world_size, changes) in MORE_RANKS[kind].items():
        run_layouts(world_size, {name: changes}, model, tmp_path / "state", tmp_path)
        check_same_state(tmp_path / name / "state", tmp_path / "state")
        check_went_on_the_same(tmp_path, name, world_size, metrics, weights)
