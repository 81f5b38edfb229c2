"""Two fsdp2 ranks in processes of their own, over gloo, against one process and against Megatron."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.learner.backends.fsdp2.fsdp2_ways import SHORT_WAYS, WAYS
from tests.learner.parts.launching import run_ranks
from tests.learner.parts.samples import KINDS, save_model
from tests.learner.parts.training import open_backend, open_fsdp2, train

SMALL_SHARE = 0.5
"""Of the distance that bfloat16's training moves a tensor, by which two ranks may differ from one."""


def run_two(model, out, ways):
    run_ranks(2, [{"name": "resume", "kind": "fsdp2", "model": model, "ways": list(ways)}], out)


def run_alone(model, out, opener, **changes):
    """Train one process; return its metrics and weights. Its state after the first step is left in `out`."""
    backend = opener(model, **changes)
    metrics = train(backend, range(1))
    backend.save_state(out / "state_alone")
    metrics += train(backend, range(1, 3))
    backend.save_hf(out / "alone")
    backend.close()
    return metrics, load_file(out / "alone" / "model.safetensors")


def assert_equal_training(found, wanted, weights, wanted_weights):
    assert len(found) == len(wanted) == 6
    for ours, reference in zip(found, wanted, strict=True):
        assert ours == pytest.approx(reference, rel=1e-5, abs=1e-5)
    assert weights.keys() == wanted_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, wanted_weights[name], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(model, out):
    return run_alone(model, out, open_fsdp2)


@pytest.fixture(scope="module")
def ranks(model, out, alone):
    run_two(model, out, SHORT_WAYS)
    return out


@pytest.mark.parametrize("way", SHORT_WAYS)
def test_two_ranks_train_as_one_process_does(way, ranks, alone):
    weights = load_file(ranks / way / "model.safetensors")
    for rank in range(2):
        assert_equal_training(
            json.loads((ranks / f"{way}.{rank}.json").read_text()), alone[0], weights, alone[1]
        )


def test_one_process_trains_as_megatron_does(model, alone, tmp_path):
    metrics, weights = run_alone(model, tmp_path, open_backend)
    assert_equal_training(alone[0], metrics, alone[1], weights)


def test_training_moves_the_weights_far_beyond_the_tolerance(model, alone):
    start = load_file(model / "model.safetensors")
    assert max((tensor - start[name]).abs().max().item() for name, tensor in alone[1].items()) > 2e-3


def test_a_resume_of_two_ranks_is_bit_exact_and_empty_shares_are_fine(ranks):
    results = [json.loads((ranks / f"resume.{rank}.json").read_text()) for rank in range(2)]
    assert all(result["is_equal"] for result in results)
    assert results[0]["few"] == results[1]["few"]
    assert all(update["actor/skipped_updates"] == 0 for update in results[0]["few"])
    assert results[0]["reduced"] == pytest.approx({"a": 1.75, "a_max": 1.0})


def test_one_process_state_is_read_by_two_and_two_by_one(model, ranks, alone):
    result = json.loads((ranks / "resume.0.json").read_text())
    for found in (result["resharded"], result["straight"]):
        for ours, reference in zip(found, alone[0][2:4], strict=True):
            assert ours == pytest.approx(reference, rel=1e-5, abs=1e-5)
    backend = open_fsdp2(model)
    backend.load_state(ranks / "state")
    for ours, reference in zip(train(backend, range(1, 2)), result["straight"], strict=True):
        assert ours == pytest.approx(reference, rel=1e-5, abs=1e-5)
    backend.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_trains_alike_on_two_ranks_one_and_megatron(kind, tmp_path):
    folder = save_model(tmp_path / "model", kind)
    metrics, weights = run_alone(folder, tmp_path, open_fsdp2)
    run_two(folder, tmp_path, WAYS)
    for way in SHORT_WAYS:
        found = json.loads((tmp_path / f"{way}.0.json").read_text())
        assert_equal_training(found, metrics, load_file(tmp_path / way / "model.safetensors"), weights)
    (tmp_path / "megatron").mkdir()
    by_megatron = run_alone(folder, tmp_path / "megatron", open_backend)
    assert_equal_training(metrics, by_megatron[0], weights, by_megatron[1])


@pytest.mark.long
def test_bfloat16_on_two_ranks_is_bfloat16_on_one(model, tmp_path):
    metrics, weights = run_alone(model, tmp_path, open_fsdp2, dtype="bfloat16")
    run_two(model, tmp_path, ["bfloat16"])
    found = json.loads((tmp_path / "bfloat16.0.json").read_text())
    for ours, reference in zip(found, metrics, strict=True):
        assert ours["actor/grad_norm"] == pytest.approx(reference["actor/grad_norm"], rel=2e-2)
    start = load_file(model / "model.safetensors")
    for name, tensor in load_file(tmp_path / "bfloat16" / "model.safetensors").items():
        assert tensor.dtype is torch.bfloat16
        # Where a gradient is about zero AdamW steps by the sign of its noise: so by their distances.
        moved, apart = (weights[name] - start[name]).norm(), (tensor.float() - weights[name].float()).norm()
        assert apart < SMALL_SHARE * moved, f"'{name}': {float(apart):.3g} apart, {float(moved):.3g} moved"
