"""The fsdp2 backend in one process: against Hugging Face, packing, cuts, resume, guards."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.core.errors import CheckpointError, ConfigError
from learner.backend import Placement
from learner.batching.batch import build_batch
from learner.fsdp2.backend import Fsdp2ValueBackend
from learner.fsdp2.groups import join_group
from learner.guard.memory import GuardedModel
from tests.learner.parts.contract import (
    assert_equals_hugging_face,
    is_bit_equal,
    weights_of,
)
from tests.learner.parts.samples import KINDS, make_groups, save_model
from tests.learner.parts.training import (
    open_backend,
    open_fsdp2,
    open_objective,
    prepare_step,
    train,
    train_values,
)


def save_other(folder, kind):
    """Write a tiny model of a kind that the Megatron backend does not know."""
    from transformers import Gemma2Config, GPT2Config, MistralConfig

    config = {
        "mistral_window": lambda: MistralConfig(**SIZES, sliding_window=8),
        "gemma2": lambda: Gemma2Config(**SIZES, head_dim=16, sliding_window=8, final_logit_softcapping=0.5),
        "gpt2": lambda: GPT2Config(vocab_size=131, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    }[kind]()
    torch.manual_seed(0)
    found = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    found.save_pretrained(folder)
    return folder


ROOT = Path(__file__).resolve().parents[4]
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def ways_to_hugging_face(folder):
    """Compare with Hugging Face; return the ways in which the layers were computed."""
    backend = assert_equals_hugging_face(folder, open_fsdp2)
    ways = backend._engine._module.ways
    backend.close()
    return ways


def run(model, steps, **changes):
    backend = open_fsdp2(model, **changes)
    metrics, weights = train(backend, steps), weights_of(backend)
    backend.close()
    return metrics, weights


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_gradients_are_hugging_faces_on_packed_rows(kind, tmp_path):
    ways = ways_to_hugging_face(save_model(tmp_path, kind))
    assert ways.is_packed
    assert ways.is_plain_head


@pytest.mark.parametrize(
    ("kind", "is_packed", "is_plain_head"),
    [("mistral_window", True, True), ("gemma2", False, False), ("gpt2", True, True)],
)
def test_models_with_windows_caps_or_learned_positions_are_right_too(
    kind, is_packed, is_plain_head, tmp_path
):
    ways = ways_to_hugging_face(save_other(tmp_path, kind))
    assert (ways.is_packed, ways.is_plain_head) == (is_packed, is_plain_head)


def test_rows_never_see_one_another(model):
    backend = open_fsdp2(model)
    batch = build_batch(make_groups(), 0, {1: 0})
    before, _ = backend.logprobs(batch)
    start, end = batch.cu_seqlens[3], batch.cu_seqlens[4]
    batch.tokens_N[start:end] = (batch.tokens_N[start:end] + 1) % 131
    after, _ = backend.logprobs(batch)
    changed = (before != after).nonzero()[:, 0]
    assert changed.min() >= start
    assert changed.max() < end
    backend.close()


@pytest.mark.parametrize(
    "changes", [{"max_tokens_per_microbatch": 40}, {"recompute": "full"}, {"offload": True}]
)
def test_no_way_to_save_memory_changes_the_update(model, changes):
    plain, other = run(model, range(2)), run(model, range(2), **changes)
    for ours, reference in zip(other[0], plain[0], strict=True):
        assert ours == pytest.approx(reference, abs=1e-5)
    assert all(torch.allclose(other[1][name], plain[1][name], rtol=0, atol=1e-5) for name in plain[1])


def test_a_snapshot_does_not_change_while_training_goes_on(model, tmp_path):
    backend = open_fsdp2(model)
    snapshot, before = backend.snapshot_state(), weights_of(backend)
    straight = train(backend, range(1))
    snapshot.write(tmp_path)
    backend.load_state(tmp_path)
    assert is_bit_equal(weights_of(backend), before)
    assert train(backend, range(1)) == straight
    backend.close()


def test_the_state_of_another_model_is_refused(model, tmp_path):
    backend = open_fsdp2(save_model(tmp_path / "other", "llama", vocab_size=97))
    backend.save_state(tmp_path / "state")
    backend.close()
    backend = open_fsdp2(model)
    with pytest.raises(CheckpointError, match="another model"):
        backend.load_state(tmp_path / "state")
    backend.close()


def test_a_reference_beside_the_policy_shares_its_group_and_stays_as_it_is(model):
    policy = open_fsdp2(model)
    reference = open_fsdp2(model, is_frozen=True)
    batch = build_batch(make_groups(), 0, {1: 0})
    before, _ = reference.logprobs(batch)
    train(policy, range(1))
    after, _ = reference.logprobs(batch)
    assert torch.equal(before, after)
    assert not torch.equal(policy.logprobs(batch)[0], after)
    with pytest.raises(AssertionError, match="frozen"):
        reference.update(batch, lambda lp, h, part: (lp.sum(), {}))
    reference.close()
    assert torch.distributed.is_initialized()
    policy.close()
    assert not torch.distributed.is_initialized()


def test_a_process_is_one_rank_and_its_group_has_the_deadline_of_the_placement():
    group = join_group(Placement(timeout_s=7.0), gpus=0, seed=0)
    assert group.mesh.get_group() is torch.distributed.group.WORLD
    options = torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options
    assert options._timeout.total_seconds() == 7.0
    with pytest.raises(ConfigError, match="rank 0 of 1 already"):
        join_group(Placement(rank=1, world_size=2, rendezvous="127.0.0.1:1"), gpus=0, seed=0)
    group.stop()


def test_a_model_that_cannot_be_built_or_filled_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_fsdp2(tmp_path / "nothing")
    folder = save_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match="q_norm"):
        open_fsdp2(folder)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ConfigError, match="is stored as"):
        open_fsdp2(folder)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no_such_model"}))
    with pytest.raises(ConfigError, match="no_such_model"):
        open_fsdp2(folder)
    assert not torch.distributed.is_initialized()


def test_a_critic_starts_at_zero_and_learns_as_megatron_s_does(model, tmp_path):
    """Beside a policy, in its group; its export and its state come back."""
    from learner.megatron.backend import MegatronValueBackend

    policy, critic = open_fsdp2(model), open_fsdp2(model, make=Fsdp2ValueBackend)
    batch = build_batch(make_groups(), 0, {1: 0})
    assert torch.equal(critic.values(batch), torch.zeros(batch.num_tokens))
    found = train_values(critic, range(2))
    weights, values = weights_of(critic), critic.values(batch)
    assert values.abs().max() > 0
    critic.save_hf(tmp_path / "critic")
    critic.save_state(tmp_path / "state")
    critic.close()
    again = open_fsdp2(tmp_path / "critic", make=Fsdp2ValueBackend)
    torch.testing.assert_close(again.values(batch), values, rtol=0, atol=1e-6)
    again.load_state(tmp_path / "state")
    assert is_bit_equal(weights_of(again), weights)
    again.close()
    policy.close()
    megatron = open_backend(model, make=MegatronValueBackend)
    for ours, reference in zip(found, train_values(megatron, range(2)), strict=True):
        assert ours == pytest.approx(reference, rel=1e-5, abs=1e-5)
    exported = weights_of(megatron)
    assert weights.keys() == exported.keys()
    assert all(torch.allclose(weights[name], exported[name], rtol=0, atol=1e-4) for name in weights)
    megatron.close()


def test_a_gate_refuses_a_step_before_anything_of_the_optimizer_changes(model):
    backend, asked = open_fsdp2(model), []
    before = weights_of(backend)
    backend.set_step_gate(lambda norm, metrics: bool(asked.append((norm, metrics))))
    metrics = train(backend, range(1))
    assert is_bit_equal(weights_of(backend), before)
    assert [update["actor/skipped_updates"] for update in metrics] == [1.0, 1.0]
    assert asked[0][0] == metrics[0]["actor/grad_norm"] > 0
    assert "actor/pg_loss" in asked[0][1]
    backend.close()


def test_an_update_that_ran_out_of_memory_is_tried_again_with_smaller_microbatches(model):
    wanted, objective = run(model, range(1)), open_objective()
    backend = open_fsdp2(model)
    first, second = prepare_step(backend, objective, 0)

    def run_out(*_):
        raise MemoryError

    with pytest.raises(MemoryError):
        backend.update(first, run_out)
    assert backend.max_tokens_per_microbatch > 64
    backend.set_max_tokens_per_microbatch(64)
    found = [backend.update(part, objective.loss) for part in (first, second)]
    for ours, reference in zip(found, wanted[0], strict=True):
        assert ours == pytest.approx(reference, abs=1e-5)
    backend.close()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_torch_compile_changes_nothing_but_the_rounding(model, tmp_path):
    """In a process of its own: here TORCHDYNAMO_DISABLE=1 is set, for Megatron."""
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "0"}
    command = [sys.executable, "-m", "tests.learner.backends.fsdp2.fsdp2_compiled", str(model), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / "compiled.json").read_text())
    assert results["num_graphs"] > 0
    for ours, reference in zip(results["compiled"], results["plain"], strict=True):
        assert ours == pytest.approx(reference, rel=1e-4, abs=1e-5)


class _Breaking(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory once, after `arm`."""

    is_armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if _Breaking.is_armed:
            _Breaking.is_armed = False
            raise MemoryError
        return gradient


def test_a_backward_pass_that_ran_out_of_memory_is_repeated_and_later_ones_lose_no_gradient(model):
    objective = open_objective()
    found = []
    for is_broken in (False, True):
        backend = open_fsdp2(model)
        guarded = GuardedModel(backend)
        layer = backend._engine._module.model.model.layers[0]
        layer.register_forward_hook(
            lambda _module, _inputs, out: (
                _Breaking.apply(out) if isinstance(out, torch.Tensor) else (_Breaking.apply(out[0]), *out[1:])
            )
        )
        metrics = []
        for step in range(3):
            first, _ = prepare_step(backend, objective, step)
            _Breaking.is_armed = is_broken and step == 1
            metrics.append(guarded.update(first, objective.loss))
        assert guarded.num_out_of_memory == is_broken
        found.append([update["actor/grad_norm"] for update in metrics])
        backend.close()
    assert found[1] == pytest.approx(found[0], rel=1e-4)
