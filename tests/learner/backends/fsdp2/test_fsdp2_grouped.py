"""DeepSeek-style mixtures on fsdp2: grouped routers, correction biases, shared experts, latent attention."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from asyncrl.core.errors import ConfigError
from learner.batching.batch import build_batch
from learner.fsdp2.backend import Fsdp2ValueBackend
from tests.learner.backends.experts.expert_ranks import GRAD_CLIP
from tests.learner.backends.experts.test_router_replay import loss
from tests.learner.parts.contract import assert_equals_hugging_face, assert_export_gives_back_every_bit
from tests.learner.parts.launching import run_ranks
from tests.learner.parts.samples import make_groups, save_model
from tests.learner.parts.training import open_fsdp2, record_experts, train
from tests.rollout.engine.families import GROUPED, Form

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
GROUPED_GEMM = "aten::_grouped_mm"


@pytest.fixture(scope="module", params=GROUPED)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    model = Form(family, is_tied=False, vocab_size=131).build(0)
    model.get_input_embeddings().padding_idx = model.config.pad_token_id = None
    folder = tmp_path_factory.mktemp(family)
    model.save_pretrained(folder)
    return folder


def test_it_computes_what_the_library_computes_on_packed_rows(folder):
    backend = assert_equals_hugging_face(folder, open_fsdp2)
    assert backend._engine._module.ways.is_packed
    backend.close()


def test_every_tensor_is_published_and_exported_and_a_bias_keeps_its_bits_in_bfloat16(folder, tmp_path):
    assert_export_gives_back_every_bit(folder, tmp_path / "out", open_fsdp2)
    backend, stored = open_fsdp2(folder, dtype="bfloat16"), load_file(folder / "model.safetensors")
    train(backend, range(1))
    sent, parts = dict(backend.named_tensors()), backend.named_parts()
    assert sent.keys() == {part.name for part in parts} == stored.keys()
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in sent.items() if name != BIAS)
    if BIAS in stored:
        (part,) = (part for part in parts if part.name == BIAS)
        assert not stored[BIAS].bfloat16().float().equal(stored[BIAS]), "bfloat16 would lose nothing"
        assert sent[BIAS].equal(stored[BIAS]) and part.values_RC[:, 0].equal(stored[BIAS])
    backend.close()


def test_versions_of_adapters_hold_adapters_alone_and_a_critic_is_exported_with_its_bias(folder, tmp_path):
    backend = open_fsdp2(folder, lora={"rank": 2, "targets": ["o_proj"]})
    sent, parts = dict(backend.named_tensors()), backend.named_parts()
    assert all(".lora_" in name for name in sent) and sent.keys() == {part.name for part in parts}
    backend.close()
    critic = open_fsdp2(folder, make=Fsdp2ValueBackend)
    critic.save_hf(tmp_path / "critic")
    critic.close()
    stored, saved = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "critic"))
    assert saved.keys() == stored.keys() - {"lm_head.weight"} | {"score.weight"}
    open_fsdp2(tmp_path / "critic", make=Fsdp2ValueBackend).close()


def test_its_routers_are_measured_and_take_no_recorded_experts(folder):
    batch = build_batch(make_groups(), 0, {1: 0})
    model, loads = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    note = lambda _module, _inputs, outputs: loads.append(outputs[2].flatten().bincount(minlength=8))  # noqa: E731
    model.model.layers[1].mlp.gate.register_forward_hook(note)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        model(batch.tokens_N[None, start:end])
    load_E = torch.stack(loads).sum(0)
    backend = open_fsdp2(folder)
    metrics = backend.update(batch, loss)
    share_E = load_E * 8 / load_E.sum()
    assert metrics["actor/expert_load_max"] == pytest.approx(share_E.max().item(), rel=1e-6)
    assert metrics["actor/expert_load_min"] == pytest.approx(share_E.min().item(), rel=1e-6)
    with pytest.raises(ConfigError, match=r"ranks experts in \d steps: the recorded ones cannot"):
        backend.logprobs(record_experts(batch, num_layers=2, num_active=3, num_experts=8))
    backend.close()


@pytest.mark.long
def test_two_ranks_train_it_as_one_process_and_their_parts_cover_each_element_once(folder, tmp_path):
    job = {
        "name": "fsdp2",
        "kind": "experts",
        "model": str(folder),
        "changes": {"dp": 2, "recompute": "full"},
    }
    run_ranks(2, [job], tmp_path)
    found = [json.loads((tmp_path / f"fsdp2.{rank}.json").read_text()) for rank in range(2)]
    backend = open_fsdp2(folder, grad_clip=GRAD_CLIP)
    wanted = train(backend, range(3))
    backend.close()
    for result in found:
        assert result["wrong_parts"] == []
        for ours, reference in zip(result["metrics"], wanted, strict=True):
            assert ours == pytest.approx(reference, rel=1e-5, abs=1e-5)
    exported = load_file(tmp_path / "fsdp2" / "model.safetensors")
    assert exported.keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize("changes", [{}, {"recompute": "full"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_experts_of_cut_layers_are_computed_by_one_grouped_product_for_each_matrix(kind, changes, tmp_path):
    """Up with gate and down of each mixture, and no product of a single expert."""
    folder = save_model(tmp_path, kind, num_layers=2)
    num_sparse = 1 if kind == "qwen3_moe" else 2
    backend, batch = open_fsdp2(folder, **changes), build_batch(make_groups(), 0, {1: 0})
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        backend.logprobs(batch)
    with profile(activities=[ProfilerActivity.CPU]) as update:
        backend.update(batch, loss)
    backend.close()
    assert count(forward) == 2 * num_sparse
    passes = 4 if changes.get("recompute") else 3  # backward: of the rows, and of the matrices
    assert count(update) == 2 * num_sparse * passes


def count(found):
    return sum(event.count for event in found.key_averages() if event.key == GROUPED_GEMM)
