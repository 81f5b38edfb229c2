"""The probe that a version brings: what the learner's model says about a fixed sequence."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError
from learner.batching.probe import NUM_TOKENS, build_probe_batch, is_probe_due, measure_probe
from learner.fsdp2.backend import Fsdp2Backend
from learner.megatron.backend import MegatronBackend
from tests.learner.parts.samples import save_model
from tests.learner.parts.training import open_backend


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("make", [MegatronBackend, Fsdp2Backend])
def test_a_probe_holds_the_models_log_probs_at_the_sampling_temperature(model, make):
    backend = open_backend(model, make=make, temperature=0.7)
    probe = measure_probe(backend, build_probe_batch(model, seed=0), 0.7)
    backend.close()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.tensor([probe.tokens])
    with torch.no_grad():
        logprobs = (network(tokens).logits[0, :-1] / 0.7).log_softmax(-1)
    wanted = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(probe.logprobs), wanted, atol=1e-5, rtol=0)
    assert probe.temperature == 0.7


def test_the_sequence_depends_on_the_seed_and_the_vocabulary_alone(model):
    first, again, other = (build_probe_batch(model, seed).tokens_N.tolist() for seed in (3, 3, 4))
    assert first == again != other
    assert len(first) == NUM_TOKENS
    assert build_probe_batch(model, 3, max_tokens=5).num_tokens == 5


def test_a_probe_is_due_with_the_first_version_and_after_every_so_many_steps():
    published = [-1, 0, 3, 4, 9, 10, 11]
    steps = [0, 3, 4, 9, 10, 11, 31]
    due = [is_probe_due(step, before, 10) for step, before in zip(steps, published, strict=True)]
    assert due == [True, False, False, False, True, False, True]
    assert not any(is_probe_due(step, -1, 0) for step in range(20))


def test_a_model_that_does_not_tell_its_vocabulary_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "odd"}))
    with pytest.raises(ConfigError, match="names no vocab_size"):
        build_probe_batch(tmp_path, 0)
