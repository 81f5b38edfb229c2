"""The backends alone in one process: exactness of cuts, resume, determinism, guards."""

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.core.errors import CheckpointError, ConfigError, DataError, LedgerError
from learner.batching.batch import build_batch
from learner.megatron.backend import MegatronValueBackend
from tests.learner.parts.contract import (
    assert_export_gives_back_every_bit,
    assert_resume_is_bit_exact,
    is_bit_equal,
    weights_of,
)
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import (
    open_backend,
    open_fsdp2,
    open_objective,
    prepare_step,
    train,
    train_values,
)


@pytest.fixture(params=[open_backend, open_fsdp2], ids=["megatron", "fsdp2"])
def opener(request):
    """Each of the backends, for what both must do."""
    return request.param


def plain_loss(logprobs_N, entropy_N, microbatch):
    return (logprobs_N + entropy_N).sum(), {}


def run(model, steps, opener=open_backend, **changes):
    backend = opener(model, **changes)
    metrics = train(backend, steps)
    weights = weights_of(backend)
    backend.close()
    return metrics, weights


def test_two_identical_runs_are_bit_equal(model, opener):
    first, second = run(model, range(2), opener), run(model, range(2), opener)
    assert first[0] == second[0]
    assert is_bit_equal(first[1], second[1])


@pytest.mark.parametrize("max_tokens", [32, 50, 200])
def test_the_cut_into_microbatches_does_not_change_the_update(model, max_tokens):
    whole, cut = run(model, range(2)), run(model, range(2), max_tokens_per_microbatch=max_tokens)
    for ours, reference in zip(cut[0], whole[0], strict=True):
        assert ours == pytest.approx(reference, abs=1e-5)
    # Adam divides by the gradient's size: where that is all but 0, its last bits decide; so a few may differ.
    differences = torch.cat([(cut[1][name] - whole[1][name]).abs().flatten() for name in whole[1]])
    assert differences.max() < 0.2 * whole[0][0]["actor/lr"]
    assert (differences > 2e-6).sum() <= 1e-4 * len(differences)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_every_aggregation_is_the_same_for_any_cut(model, mode):
    found = []
    for max_tokens in (16384, 40):
        backend = open_backend(model, max_tokens_per_microbatch=max_tokens)
        found.append(train(backend, range(1), open_objective(aggregation=mode)))
        backend.close()
    for ours, reference in zip(*found, strict=True):
        assert ours == pytest.approx(reference, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_are_the_same_bits(model, recompute):
    plain, again = run(model, range(1)), run(model, range(1), recompute=recompute)
    assert plain[0] == again[0]
    assert is_bit_equal(plain[1], again[1])


@pytest.mark.parametrize(("recompute", "num_calls"), [("none", 2), ("full", 4)])
def test_recompute_full_runs_every_layer_again(model, recompute, num_calls):
    calls = []
    backend = open_backend(model, recompute=recompute)
    for layer in backend._chunks[0].decoder.layers:
        layer.mlp.register_forward_hook(lambda *_: calls.append(1))
    backend.update(build_batch(make_groups(), 0, {1: 0}), plain_loss)
    backend.close()
    assert len(calls) == num_calls


def test_the_optimizer_of_a_learner_on_the_cpu_is_on_the_host_already(model):
    backend = open_backend(model, offload=True)
    assert type(backend._updates.optimizers[0].optimizer) is torch.optim.AdamW
    assert backend.raise_offload() == ""
    backend.close()


def test_a_frozen_model_has_no_gradients_and_no_state(model):
    backend = open_backend(model, is_frozen=True)
    batch = build_batch(make_groups(), 0, {1: 0})
    backend.logprobs(batch)
    assert not any(p.requires_grad or hasattr(p, "main_grad") for p in backend._chunks[0].parameters())
    with pytest.raises(AssertionError, match="frozen"):
        backend.update(batch, plain_loss)
    with pytest.raises(AssertionError, match="frozen"):
        backend.snapshot_state()
    backend.close()


def test_models_of_one_process_must_be_cut_alike(model):
    backend = open_backend(model)
    with pytest.raises(ConfigError, match="cannot join"):
        open_backend(model, pp=2)
    assert backend.logprobs(build_batch(make_groups(), 0, {1: 0}))[0].isfinite().all()
    backend.close()


def test_a_new_critic_starts_at_zero_learns_and_resumes_bit_by_bit(model, tmp_path):
    critic = open_backend(model, make=MegatronValueBackend)
    batch = build_batch(make_groups(), 0, {1: 0})
    assert torch.equal(critic.values(batch), torch.zeros(batch.num_tokens))
    metrics = train_values(critic, range(4))
    assert metrics[-1]["critic/vf_loss"] < metrics[0]["critic/vf_loss"]
    critic.save_state(tmp_path / "state")
    critic.save_hf(tmp_path / "critic")
    straight, values = train_values(critic, range(4, 5)), critic.values(batch)
    critic.load_state(tmp_path / "state")
    assert train_values(critic, range(4, 5)) == straight
    assert torch.equal(critic.values(batch), values)
    critic.close()
    again = open_backend(tmp_path / "critic", make=MegatronValueBackend)
    assert again.values(batch).abs().max() > 1e-2
    again.close()


def test_a_row_over_the_budget_is_refused_by_ticket(model, opener):
    backend = opener(model, max_tokens_per_microbatch=10)
    with pytest.raises(DataError, match="ticket 1"):
        backend.logprobs(build_batch(make_groups(), 0, {1: 0}))
    backend.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resume_is_bit_exact(model, opener, tmp_path, dtype):
    assert_resume_is_bit_exact(opener, model, tmp_path, dtype)


def test_an_export_gives_back_every_bit(model, opener, tmp_path):
    assert_export_gives_back_every_bit(model, tmp_path, opener)


def test_an_export_in_bfloat16_says_so_and_rounds_once(model, opener, tmp_path):
    backend = opener(model, dtype="bfloat16")
    backend.save_hf(tmp_path)
    backend.close()
    source, found = load_file(model / "model.safetensors"), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found.dtype is torch.bfloat16
    assert all(torch.equal(source[name].bfloat16(), tensor) for name, tensor in found.state_dict().items())


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
    steps = [state["step"] for state in backend._updates.optimizers[0].optimizer.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps) > 10
    assert {float(step) for step in steps} == {2.0}
    backend.close()


def test_a_state_that_is_missing_or_torn_is_refused(model, tmp_path):
    backend = open_backend(model)
    with pytest.raises(CheckpointError, match="incomplete"):
        backend.load_state(tmp_path)
    backend.save_state(tmp_path)
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


def test_both_backends_go_down_a_cosine_from_the_rate_that_was_set(model, opener):
    changes = {"lr_schedule": "cosine:0.1", "steps": 4}
    backend = opener(model, warmup_steps=1, **changes)
    backend.set_lr(5e-4)
    rates = [metrics["actor/lr"] for metrics in train(backend, range(4))]
    assert rates == pytest.approx([lr * 5e-4 for lr in (1, 1, 1, 1, 0.775, 0.775, 0.325, 0.325)])
    backend.close()


def test_an_update_whose_gradient_is_not_finite_is_skipped_and_counted(model, opener):
    backend = opener(model)
    before = weights_of(backend)
    batch = build_batch(make_groups(), 0, {1: 0})
    metrics = backend.update(batch, lambda lp, h, part: (lp.sum() * math.inf, {}))
    assert metrics["actor/skipped_updates"] == 1.0
    assert is_bit_equal(weights_of(backend), before)
    assert backend.num_updates == 1
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
    assert (metrics["staleness/lag_share/0"], metrics["staleness/lag_share/1"]) == (0.0, 1.0)
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


@pytest.mark.parametrize("grad_clip", [0.01, 1e9])
def test_the_optimizer_gets_a_gradient_that_is_clipped_to_its_norm(model, opener, grad_clip):
    backend = opener(model, grad_clip=grad_clip, betas=(0.9, 0.999))
    metrics = backend.update(build_batch(make_groups(), 0, {1: 0}), plain_loss)
    pieces = backend.snapshot_state().pieces
    # After one step the first moment is a tenth of the gradient that the optimizer was given.
    given = math.sqrt(sum(float(one.values["exp_avg"].double().square().sum()) for one in pieces)) / 0.1
    backend.close()
    norm = metrics["actor/grad_norm"]
    assert norm > 0.1 and given == pytest.approx(min(norm, grad_clip), rel=1e-3)
