"""The Megatron model against Hugging Face's, and conversion between them."""

import importlib
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.core.errors import ConfigError
from learner.backend import Placement
from learner.batching.batch import build_batch
from learner.megatron import cpu_adaptor
from learner.megatron.groups import join_groups
from learner.megatron.model.architecture import Parallelism, make_transformer_config, read_architecture
from learner.megatron.model.packing import describe_rows
from learner.megatron.schedule import Schedule
from tests.learner.parts.contract import assert_equals_hugging_face, assert_export_gives_back_every_bit
from tests.learner.parts.samples import KINDS, make_groups, save_model
from tests.learner.parts.training import open_backend


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


def test_logprobs_and_gradients_are_hugging_faces_on_packed_rows(folder):
    assert_equals_hugging_face(folder, open_backend).close()


def test_export_gives_back_every_bit(folder, tmp_path):
    assert_export_gives_back_every_bit(folder, tmp_path, open_backend)


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
    (weight,) = (p for name, p in backend._chunks[0].named_parameters() if name == "output_layer.weight")
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
        ({"model_type": "olmo2"}, "llama, mistral, .* its record in asyncrl.models.architectures"),
        ({"sliding_window": 511, "use_sliding_window": None}, "sliding_window: 511 is not supported"),
        ({"final_logit_softcapping": 30.0}, "it caps its logits"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers are of several kinds"),
        ({"partial_rotary_factor": 0.75}, "rotates a part of each head"),
        ({"model_type": "gemma"}, "hidden_act: silu is not supported"),
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 8}, "num_experts: 8: these experts are not supported"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, "n_routed_experts: 8: these experts"),
        ({"model_type": "dbrx", "num_experts": 8}, "these experts are not supported"),
        ({"model_type": "olmoe", "num_experts": 8, "clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported"),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 1}, "gets no gradient"),
        (
            {
                "model_type": "mixtral",
                "num_local_experts": 8,
                "sliding_window": 64,
                "use_sliding_window": None,
            },
            "sliding_window: 64 is not supported",
        ),
    ],
)
def test_experts_of_a_kind_that_is_not_supported_are_refused_in_words(tmp_path, changes, said):
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=said):
        open_backend(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pp": 3}, "pp x vpp: 3 does not divide the model's 2 layers"),
        ({"pp": 2, "vpp": 2}, "pp x vpp: 4"),
        ({"vpp": 2}, "learner.pp is 1"),
        ({"cp": 2}, "1 learner ranks do not divide by learner.tp x pp x cp: 1 x 1 x 2"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused_by_name(tmp_path, changes, said):
    folder = save_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=said):
        open_backend(folder, **changes)


def test_interleaved_stages_without_overlapped_sends_are_never_run(tmp_path):
    groups = join_groups(Placement(), Parallelism(), gpus=0, seed=0)
    parallelism = Parallelism(pp=2, vpp=2)
    config = make_transformer_config(
        read_architecture(save_model(tmp_path, num_layers=4)), parallelism, torch.float32, groups.device
    )
    chunks = [torch.nn.Identity(), torch.nn.Identity()]
    Schedule(chunks, config, groups)
    config.overlap_p2p_comm = False
    with pytest.raises(AssertionError, match="wrong gradients"):
        Schedule(chunks, config, groups)
    groups.stop()


@pytest.mark.parametrize(("num_stages", "wanted"), [(1, 1), (3, 3), (9, 4)])
def test_a_batch_is_split_so_that_every_stage_has_work_if_there_are_rows_enough(num_stages, wanted):
    config = SimpleNamespace(params_dtype=torch.float32, kv_channels=16)
    pp = SimpleNamespace(size=lambda: num_stages)
    schedule = Schedule([object()], config, SimpleNamespace(pp=pp, device=torch.device("cpu")))
    batch = build_batch(make_groups(1, 4), 0, {1: 0})
    parts = schedule.split(batch, 10**6)
    assert len(parts) == wanted and sum(part.num_rows for part in parts) == batch.num_rows == 4


def test_megatron_never_compiles_on_a_cpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("about machines without CUDA")
    cpu_adaptor.install()
    fused = importlib.import_module("megatron.core.fusions.fused_bias_dropout").bias_dropout_add_fused_train
    # What torch.compile leaves on a function; `jit_fuser` is bound when Megatron is imported.
    monkeypatch.setattr(fused, "_torchdynamo_orig_callable", fused, raising=False)
    with pytest.raises(AssertionError, match="TORCHDYNAMO_DISABLE"):
        cpu_adaptor.install()


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
    assert backend._architecture.rope.theta == theta
    backend.close()


@pytest.mark.parametrize("cu_seqlens", [[0], [0, 1], [0, 3, 40, 41, 60], [0, 500, 501, 640]])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_context_parallel_ranks_share_every_row_and_all_hold_as_many_tokens(cu_seqlens, cp_size):
    num_tokens = cu_seqlens[-1]
    shares = [
        describe_rows(cu_seqlens, torch.device("cpu"), cp_rank=rank, cp_size=cp_size, multiple_of=2)
        for rank in range(cp_size)
    ]
    held = torch.cat([rows.share.own_N for rows in shares])
    assert torch.equal(held[shares[0].share.gathered_from_T], torch.arange(len(held)))
    assert len({len(rows.share.own_N) for rows in shares}) == 1
    assert len(shares[0].share.own_N) % 2 == 0
    position_T = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise([0, *cu_seqlens])])
    for rows in shares:
        own_N = rows.share.own_N
        is_real_N = own_N < num_tokens
        assert torch.equal(rows.positions_N[is_real_N], position_T[own_N[is_real_N]])
        layout = rows.attention
        assert torch.equal(layout.query_from_M[layout.output_from_N], torch.arange(len(own_N)))


def test_the_causal_work_of_a_long_row_is_shared_evenly():
    work = [
        int(describe_rows([0, 1000], torch.device("cpu"), cp_rank=rank, cp_size=4).positions_N.sum())
        for rank in range(4)
    ]
    assert max(work) < 1.01 * min(work)
