"""The probe that a version brings: what the learner's model says about some rows of tokens."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.core.errors import ConfigError
from learner.batching.probe import (
    NUM_ROWS,
    ROW_TOKENS,
    ProbeRows,
    choose_seen,
    measure_probe,
)
from learner.fsdp2.backend import Fsdp2Backend
from learner.megatron.backend import MegatronBackend
from tests.learner.parts.samples import save_model
from tests.learner.parts.training import open_backend

VOCABULARY = 131


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY)


@pytest.mark.parametrize("make", [MegatronBackend, Fsdp2Backend])
def test_a_probe_holds_the_models_log_probs_of_each_row_at_the_sampling_temperature(model, make):
    backend = open_backend(model, make=make, temperature=0.7)
    probe = measure_probe(backend, ProbeRows(model, seed=0).build([5, 9, 2]), 0.7, every=3)
    backend.close()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows, found = zip(*probe.rows(), strict=True)
    tokens_RL = torch.tensor(rows)
    with torch.no_grad():
        logprobs = (network(tokens_RL).logits[:, :-1] / 0.7).log_softmax(-1)
    wanted = logprobs.gather(2, tokens_RL[:, 1:, None])[..., 0]
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-5, rtol=0)
    assert probe.temperature == 0.7 and probe.every == 3
    assert probe.num_rows == 2 * NUM_ROWS and probe.row_tokens == ROW_TOKENS


def test_the_fixed_rows_depend_on_the_seed_and_the_vocabulary_alone_and_touch_many_of_its_rows(model):
    first, again, other = (ProbeRows(model, seed).build().tokens_N.tolist() for seed in (3, 3, 4))
    assert first == again != other
    assert len(first) == NUM_ROWS * ROW_TOKENS == len(set(first)), "no id twice while others are left"
    assert ProbeRows(model, 3, max_tokens=5).build().row_lengths == [5] * NUM_ROWS


def test_half_of_the_rows_are_of_tokens_that_were_trained(model):
    rows = ProbeRows(model, 3)
    seen = choose_seen(torch.tensor([7, 11, 7, 90]))
    tokens = rows.build(seen).tokens_N
    assert tokens[: NUM_ROWS * ROW_TOKENS].tolist() == rows.build().tokens_N.tolist()
    assert set(tokens[NUM_ROWS * ROW_TOKENS :].tolist()) == {7, 11, 90}
    many = choose_seen(torch.arange(50_000))
    assert len(many) <= NUM_ROWS * ROW_TOKENS and max(many) > 4000, "spread over all that are looked through"


def test_a_model_that_does_not_tell_its_vocabulary_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "odd"}))
    with pytest.raises(ConfigError, match="names no vocab_size"):
        ProbeRows(tmp_path, 0)
