"""The backend alone in one process: exactness of cuts, resume, determinism, guards."""

import dataclasses
import json
import math

import pytest
import torch

from asyncrl.errors import CheckpointError, DataError, LedgerError
from learner.batch import build_batch
from tests.learner.samples import make_groups, save_model
from tests.learner.training import open_backend, open_objective, prepare_step, train


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def weights_of(backend):
    return {name: tensor.clone() for name, tensor in backend.named_tensors()}


def is_bit_equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def run(model, steps, **changes):
    backend = open_backend(model, **changes)
    metrics = train(backend, steps)
    weights = weights_of(backend)
    backend.close()
    return metrics, weights


def test_two_identical_runs_are_bit_equal(model):
    first, second = run(model, range(2)), run(model, range(2))
    assert first[0] == second[0]
    assert is_bit_equal(first[1], second[1])


@pytest.mark.parametrize("max_tokens", [32, 50, 200])
def test_the_cut_into_microbatches_does_not_change_the_update(model, max_tokens):
    whole, cut = run(model, range(2)), run(model, range(2), max_tokens_per_microbatch=max_tokens)
    for ours, reference in zip(cut[0], whole[0], strict=True):
        assert ours == pytest.approx(reference, abs=1e-5)
    assert all(torch.allclose(cut[1][name], whole[1][name], rtol=0, atol=1e-5) for name in whole[1])


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_every_aggregation_is_the_same_for_any_cut(model, mode):
    found = []
    for max_tokens in (16384, 40):
        backend = open_backend(model, max_tokens_per_microbatch=max_tokens)
        found.append(train(backend, range(1), open_objective(aggregation=mode)))
        backend.close()
    for ours, reference in zip(*found, strict=True):
        assert ours == pytest.approx(reference, rel=1e-4, abs=1e-6)


def test_a_row_over_the_budget_is_refused_by_ticket(model):
    backend = open_backend(model, max_tokens_per_microbatch=10)
    with pytest.raises(DataError, match="ticket 1"):
        backend.logprobs(build_batch(make_groups(), 0, {1: 0}))
    backend.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resume_is_bit_exact(model, tmp_path, dtype):
    backend = open_backend(model, dtype=dtype)
    train(backend, range(2))
    backend.set_lr(3e-3)
    torch.rand(5)  # the generator is no longer where its seed put it
    backend.save_state(tmp_path)
    drawn = torch.rand(3)
    straight, straight_on = train(backend, range(2, 4)), weights_of(backend)
    backend.close()
    resumed = open_backend(model, dtype=dtype, seed=9)
    resumed.load_state(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    assert resumed.num_updates == 4
    assert train(resumed, range(2, 4)) == straight
    assert is_bit_equal(weights_of(resumed), straight_on)
    assert straight[0]["actor/lr"] == 3e-3
    resumed.close()


def test_an_optimizer_that_never_stepped_resumes_too(model, tmp_path):
    backend = open_backend(model)
    backend.save_state(tmp_path)
    straight = train(backend, range(2))
    backend.load_state(tmp_path)
    assert train(backend, range(2)) == straight
    backend.close()


def test_every_parameter_keeps_its_own_step_counter_after_a_resume(model, tmp_path):
    backend = open_backend(model)
    train(backend, range(1))
    backend.save_state(tmp_path)
    backend.load_state(tmp_path)
    steps = [state["step"] for state in backend._optimizer.optimizer.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps) > 10
    assert {float(step) for step in steps} == {2.0}
    backend.close()


def test_a_state_of_another_layout_or_a_torn_one_is_refused(model, tmp_path):
    backend = open_backend(model)
    with pytest.raises(CheckpointError, match="incomplete"):
        backend.load_state(tmp_path)
    backend.save_state(tmp_path)
    record = tmp_path / "rank-00000.json"
    text = record.read_text()
    table = json.loads(text)
    record.write_text(json.dumps(table | {"layout": table["layout"] | {"tp": 2}}))
    with pytest.raises(CheckpointError, match="layout"):
        backend.load_state(tmp_path)
    record.write_text(text)
    tensors = tmp_path / "rank-00000.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        backend.load_state(tmp_path)
    backend.close()


def test_warm_up_counts_steps_not_updates(model):
    backend = open_backend(model, warmup_steps=3)
    rates = [metrics["actor/lr"] for metrics in train(backend, range(4))]
    assert rates == pytest.approx([lr * 1e-3 / 3 for lr in (1, 1, 2, 2, 3, 3, 3, 3)])
    backend.close()


def test_an_update_whose_gradient_is_not_finite_is_skipped_and_counted(model):
    backend = open_backend(model)
    before = weights_of(backend)
    batch = build_batch(make_groups(), 0, {1: 0})
    metrics = backend.update(batch, lambda lp, h, part: (lp.sum() * math.inf, {}))
    assert metrics["actor/skipped_updates"] == 1.0
    assert is_bit_equal(weights_of(backend), before)
    backend.close()


def test_a_token_over_max_lag_never_enters_a_loss(model):
    backend = open_backend(model)
    objective = dataclasses.replace(open_objective(), max_lag=1)
    batch = build_batch(make_groups(versions=(1, 2)), 3, {1: 1, 2: 2})
    prox_N, _ = backend.logprobs(batch)
    unmasked, _ = objective.prepare(batch, prox_N)
    with pytest.raises(LedgerError, match="max_lag 1"):
        backend.update(unmasked, objective.loss)
    masked, metrics = objective.prepare(batch.mask_over_age(1), prox_N)
    assert backend.update(masked, objective.loss)["actor/skipped_updates"] == 0.0
    assert metrics["staleness/lag_max_trained"] == 1.0
    backend.close()


def test_on_policy_data_gives_weights_of_one_and_no_clipping(model):
    backend, objective = open_backend(model), open_objective()
    batch = build_batch(make_groups(), 0, {1: 0})
    prox_N, entropy_N = backend.logprobs(batch)
    batch, metrics = objective.prepare(dataclasses.replace(batch, behaviour_N=prox_N), prox_N, entropy_N)
    assert metrics["rollout_corr/kl"] == 0.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0)
    assert torch.equal(batch.weights_N, batch.loss_mask_N)
    assert backend.update(batch, objective.loss)["actor/pg_clipfrac"] == 0.0
    backend.close()


def test_a_step_without_a_trainable_token_changes_nothing_but_the_decay(model):
    backend, objective = open_backend(model, weight_decay=0.0), open_objective()
    before = weights_of(backend)
    for minibatch in prepare_step(backend, objective, 0):
        metrics = backend.update(minibatch.with_mask(minibatch.loss_mask_N * 0), objective.loss)
        assert metrics["actor/grad_norm"] == 0.0
    assert is_bit_equal(weights_of(backend), before)
    backend.close()
