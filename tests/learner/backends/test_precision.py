"""The loss scale: alone, and under both backends; float16 itself, slow as it is on a CPU."""

from dataclasses import replace

import pytest
import torch

from asyncrl.core.config.tree import Config
from learner.batching.batch import build_batch
from learner.numerics.precision import GROWTH_UPDATES, LARGEST_SCALE, LossScale
from tests.learner.parts.contract import weights_of
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import open_backend, open_fsdp2, train

OPENERS = {"megatron": open_backend, "fsdp2": open_fsdp2}


def scale_of(backend):
    return getattr(backend, "_engine", backend)._loss_scale


def force_scale(backend):
    """Scale losses as float16 does, whatever the format is."""
    getattr(backend, "_engine", backend)._loss_scale = LossScale(torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_formats_have_one_try_and_nothing_to_save(dtype):
    scale = LossScale(dtype)
    assert list(scale.attempts()) == [1.0]
    for _ in range(GROWTH_UPDATES + 1):
        scale.accept(1.0)
    assert (list(scale.attempts()), scale.state()) == ([1.0], {})
    scale.restore({"loss_scale": 64.0, "loss_scale_updates": 1})
    assert list(scale.attempts()) == [1.0]


def test_the_scale_shrinks_to_what_fitted_and_stays_if_nothing_did():
    scale = LossScale(torch.float16)
    assert list(scale.attempts()) == [2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0]
    assert next(scale.attempts()) == 2.0**16
    scale.accept(2.0**8)
    assert next(scale.attempts()) == 2.0**8


def test_the_scale_doubles_after_so_many_updates_in_a_row_and_up_to_a_limit():
    scale = LossScale(torch.float16)
    for _ in range(GROWTH_UPDATES - 1):
        scale.accept(2.0**16)
    scale.accept(2.0**12)  # the row is broken
    for _ in range(GROWTH_UPDATES - 1):
        scale.accept(2.0**12)
    resumed = LossScale(torch.float16)
    resumed.restore(scale.state())
    for one in (scale, resumed):
        one.accept(2.0**12)
        assert next(one.attempts()) == 2.0**13
        for _ in range(20 * GROWTH_UPDATES):
            one.accept(next(one.attempts()))
        assert next(one.attempts()) == LARGEST_SCALE


@pytest.mark.parametrize("name", OPENERS)
def test_a_scaled_loss_gives_the_same_bits(model, name):
    found = []
    for is_scaled in (False, True):
        backend = OPENERS[name](model)
        if is_scaled:
            force_scale(backend)
        found.append((train(backend, range(2)), weights_of(backend)))
        backend.close()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][tensor], found[1][1][tensor]) for tensor in found[0][1])


NUM_SMALL = 32


@pytest.mark.parametrize("name", OPENERS)
def test_gradients_of_many_microbatches_in_bfloat16_are_added_in_float32(model, name):
    """32 times the 512th part of a gradient would each be lost beside it in bfloat16, which has 8 bits."""
    (row,) = make_groups(1, 1)
    batch = build_batch([replace(row, trajectories=row.trajectories * (1 + NUM_SMALL))], 0, {1: 0})
    num_tokens, norms = row.num_tokens, []
    for small in (0.0, 2.0**-9):
        backend, weights = (
            OPENERS[name](model, dtype="bfloat16", max_tokens_per_microbatch=num_tokens, shared_prompt="off"),
            [],
        )

        def loss(logprobs_N, entropy_N, microbatch, weights=weights, small=small):
            weights.append(small if weights else 1.0)
            return logprobs_N.sum() * weights[-1], {"actor/pg_loss": logprobs_N.detach().sum()}

        metrics = backend.accumulate([batch], loss, is_last=True)
        norms.append(backend.apply([batch], metrics, 1.0)["actor/grad_norm"])
        backend.close()
        assert len(weights) == 1 + NUM_SMALL
    assert norms[1] / norms[0] == pytest.approx(1 + NUM_SMALL * 2.0**-9, rel=1e-3)


@pytest.mark.parametrize("name", OPENERS)
def test_an_update_whose_gradient_overflows_is_computed_again_and_not_skipped(model, name):
    backend, calls = OPENERS[name](model, dtype="float16"), []

    def huge(logprobs_N, entropy_N, microbatch):
        calls.append(1)
        return logprobs_N.sum() * 300.0, {"actor/pg_loss": logprobs_N.detach().sum()}

    before, batch = weights_of(backend), build_batch(make_groups(), 0, {1: 0})
    metrics = backend.update(batch, huge)
    assert metrics["actor/skipped_updates"] == 0.0
    assert 300 < metrics["actor/grad_norm"] < 1e6
    assert len(calls) > 1 and next(scale_of(backend).attempts()) < 2.0**16
    assert any(not torch.equal(tensor, before[key]) for key, tensor in weights_of(backend).items())
    assert backend.num_updates == 1
    fitting = next(scale_of(backend).attempts())
    metrics = backend.update(batch, lambda lp, h, part: (lp.sum() * float("nan"), {}))
    assert metrics["actor/skipped_updates"] == 1.0
    assert (backend.num_updates, next(scale_of(backend).attempts())) == (2, fitting)
    backend.close()


@pytest.mark.parametrize("name", OPENERS)
def test_float16_trains_as_float32_does_but_for_its_rounding_and_resumes_its_scale(model, name, tmp_path):
    exact, backend = OPENERS[name](model), OPENERS[name](model, dtype="float16")
    wanted, found = train(exact, range(2)), train(backend, range(2))
    for ours, reference in zip(found, wanted, strict=True):
        assert ours["actor/grad_norm"] == pytest.approx(reference["actor/grad_norm"], rel=2e-2)
        assert ours["actor/skipped_updates"] == 0.0
    scale_of(backend).accept(2.0**8)
    backend.save_state(tmp_path)
    straight = train(backend, range(2, 3))
    scale_of(backend).accept(2.0**4)
    backend.load_state(tmp_path)
    assert next(scale_of(backend).attempts()) == 2.0**8
    assert train(backend, range(2, 3)) == straight
    exact.load_state(tmp_path)  # what has no scale takes none
    assert {tensor.dtype for _, tensor in backend.named_tensors()} == {torch.float16}
    backend.close()
    exact.close()


def test_float16_is_refused_on_a_cpu():
    required = {"data": {"train": "t"}, "reward": {"fn": "f"}}
    with pytest.raises(ValueError, match="float16 needs GPUs"):
        Config(**required, model={"path": "m", "dtype": "float16"})
    on_gpus = {"learner": {"gpus": 1}, "rollout": {"gpus": 1}}
    assert Config(**required, **on_gpus, model={"path": "m", "dtype": "float16"})
