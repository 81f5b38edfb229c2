"""The Megatron model against Hugging Face's, and conversion between them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError
from learner.batch import build_batch
from learner.megatron.packing import bucket_length, describe_rows
from tests.learner.samples import KINDS, make_groups, save_model
from tests.learner.training import open_backend


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


def by_hugging_face(folder, batch, temperature):
    """Return log-probs and entropies row by row, each row alone and unpadded."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logprobs, entropies = [], []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        logits = model(batch.tokens_N[None, start:end]).logits[0].float() / temperature
        table = logits.log_softmax(-1)
        logprobs.append(table.gather(-1, batch.labels_N[start:end, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies), model


def test_logprobs_and_gradients_are_hugging_faces_on_packed_rows(folder):
    batch = build_batch(make_groups(max_tokens=90), 0, {1: 0})
    weight_N = torch.linspace(-1, 1, batch.num_tokens)
    wanted, wanted_entropy, model = by_hugging_face(folder, batch, 0.7)
    ((wanted + 0.1 * wanted_entropy) * weight_N).sum().backward()
    backend = open_backend(folder, temperature=0.7, grad_clip=1e9)
    found, entropy = backend.logprobs(batch)
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy, wanted_entropy.detach(), rtol=0, atol=1e-4)
    metrics = backend.update(batch, lambda lp, h, part: (((lp + 0.1 * h) * weight_N).sum(), {}))
    backend.close()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_export_gives_back_every_bit(folder, tmp_path):
    backend = open_backend(folder)
    backend.save_hf(tmp_path / "export")
    backend.close()
    source, export = load_file(folder / "model.safetensors"), load_file(tmp_path / "export/model.safetensors")
    assert source.keys() == export.keys()
    assert all(torch.equal(source[name], export[name]) for name in source)
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")


def test_an_export_in_bfloat16_says_so_and_rounds_once(tmp_path):
    folder = save_model(tmp_path / "model")
    backend = open_backend(folder, dtype="bfloat16")
    backend.save_hf(tmp_path / "export")
    backend.close()
    source, model = (
        load_file(folder / "model.safetensors"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "export"),
    )
    assert model.dtype is torch.bfloat16
    assert all(torch.equal(source[name].bfloat16(), tensor) for name, tensor in model.state_dict().items())


def test_a_model_in_several_files_is_read_like_one(tmp_path):
    folder = save_model(tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert not (tmp_path / "many/model.safetensors").exists()
    backend = open_backend(tmp_path / "many")
    found = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    backend.close()
    assert all(
        torch.equal(tensor, found[name]) for name, tensor in load_file(folder / "model.safetensors").items()
    )


def test_rows_of_the_padded_vocabulary_get_no_probability_and_no_gradient(tmp_path):
    folder = save_model(tmp_path / "model", vocab_size=131)
    backend = open_backend(folder)
    (weight,) = (p for name, p in backend._model.named_parameters() if name == "output_layer.weight")
    batch = build_batch(make_groups(), 0, {1: 0})
    before, _ = backend.logprobs(batch)
    with torch.no_grad():
        assert weight.shape[0] == 144
        weight[131:] = 5.0
    after, _ = backend.logprobs(batch)
    assert torch.equal(before, after)
    backend.update(batch, lambda lp, h, part: ((lp + h).sum(), {}))
    assert float(weight.main_grad[131:].abs().max()) == 0.0
    assert float(weight.main_grad[:131].abs().max()) > 0.0
    backend.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mistral"}, "llama, qwen2, qwen3"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(tmp_path, change, said):
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=said):
        open_backend(folder)


def test_a_missing_folder_and_a_missing_tensor_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_backend(tmp_path / "nothing")
    folder = save_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    backend = None
    with pytest.raises(ConfigError, match="q_norm"):
        backend = open_backend(folder)
    assert backend is None


def test_more_tensor_ranks_than_key_value_heads_are_refused(tmp_path):
    folder = save_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="key/value heads"):
        open_backend(folder, tp=4)


def test_an_older_config_with_rope_theta_at_the_top_is_read(tmp_path):
    folder = save_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": theta}))
    backend = open_backend(folder)
    assert backend._architecture.rope["rope_theta"] == theta
    backend.close()


def test_buckets_waste_less_than_half_when_short_and_a_quarter_when_long():
    assert [bucket_length(n) for n in (1, 16, 17, 64, 65, 100, 129, 1000)] == [
        16,
        16,
        32,
        64,
        80,
        112,
        160,
        1024,
    ]
    assert all(n <= bucket_length(n) <= 1.25 * n for n in range(65, 3000))


def test_padding_and_packing_are_inverse():
    rows = describe_rows([0, 3, 40, 41, 60], torch.device("cpu"))
    assert rows.buckets == ((2, 16), (1, 32), (1, 64))
    assert torch.equal(rows.padded_from_M[rows.packed_from_N], torch.arange(60))
    assert rows.positions_N.tolist() == [*range(3), *range(37), 0, *range(19)]
