"""`learner.kernels: te`: what it refuses, its names of weights, and a learner's step on a stand-in for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs

from asyncrl.core.config.tree import Config, LearnerSection
from asyncrl.core.errors import ConfigError
from learner.megatron import convert, rows
from learner.megatron.model import te_layers
from tests.learner.parts.samples import save_model
from tests.pretended_gpu.learner.steps import assert_is_published, result, run, run_on_gpu

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def choose(device: torch.device = GPU, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> str:
    return te_layers.choose(LearnerSection(**{"kernels": "te", "gpus": 1, **changes}), dtype, device, 64)


@pytest.fixture
def has_te(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with TransformerEngine, and a GPU whose capability is 9.0."""
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def test_layers_of_transformer_engine_are_taken_where_they_are_asked_for_and_can_run(has_te: None) -> None:
    assert choose() == te_layers.NAME
    for kernels in ("auto", "torch"):
        assert choose(kernels=kernels) == choose(device=CPU, kernels=kernels) == "local"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"device": CPU},
            r"kernels is te, .* computes on cpu.*Set learner\.gpus: 1; or set learner\.kernels",
        ),
        ({"cp": 2}, r"learner\.cp is 2"),
        ({"dtype": torch.float32}, r"does not take torch\.float32 with heads of 64 here"),
    ],
)
def test_what_they_cannot_do_is_refused_in_words(has_te: None, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(**options)


def test_a_process_without_transformer_engine_is_told_to_install_it(has_te: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", False)
    with pytest.raises(ConfigError, match=r"cannot import transformer_engine.*Install 'transformer-engine"):
        choose()


def test_fsdp2_has_no_layers_of_transformer_engine() -> None:
    needed = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
    for kernels in ("auto", "torch", "te"):
        learner = {"backend": "fsdp2", "gpus": 1, "kernels": kernels}
        if kernels == "te":
            with pytest.raises(ValueError, match=r"fsdp2 has no learner\.kernels: te"):
                Config.model_validate({**needed, "learner": learner})
        else:
            Config.model_validate({**needed, "learner": learner})


@pytest.mark.parametrize(
    ("inner", "hugging_face"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    ],
)
def test_the_weight_of_a_fused_norm_is_a_norm_s_in_a_model_folder_and_not_cut(
    monkeypatch: pytest.MonkeyPatch, inner: str, hugging_face: str
) -> None:
    monkeypatch.setattr(rows, "tensor_rank", lambda _: (1, 2))
    name, weight_H = f"decoder.layers.3.{inner}", torch.randn(64)
    config: Any = SimpleNamespace(num_query_groups=2, kv_channels=16, num_attention_heads=4)
    ((exported, tensor),) = convert.to_hugging_face(name, weight_H, config)
    assert exported == f"model.layers.3.{hugging_face}" and tensor is weight_H
    second: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    assert convert._read_part(name, config, {exported: weight_H}.__getitem__, second) is weight_H
    (run_of_rows,) = rows.row_runs(name, weight_H.shape, config, 131, rows.tensor_rank(name))
    assert (run_of_rows.name, run_of_rows.row, run_of_rows.num_rows) == (exported, 0, 64)


@pytest.mark.long  # 20 s: two learners in a process with a pretended GPU, per family
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "qwen2_tied", "llama", "llama_stretched"])
def test_a_learner_s_step_on_a_stand_in_for_transformer_engine_is_that_of_torch_s_kernels(
    tmp_path: Path, kind: str
) -> None:
    """Weights after updates and resume, exported and published, to the bit; and torch's step is the CPU's.

    `auto` is torch, though the process can import the stand-in.
    """
    model = save_model(tmp_path / "model", kind)
    run_on_gpu(tmp_path, model, ["bfloat16", "bfloat16:te"])
    ours, torchs = (result(tmp_path, f"bfloat16{kernels}") for kernels in (":te", ""))
    assert not torchs["te"]["made"] and torchs["varlen calls"] > 0 == ours["varlen calls"]
    made = [name for name, _ in ours["te"]["made"]]
    num_models, num_norms = 2, 2 * 2 + 1 if kind == "qwen3" else 1  # one opened to be resumed
    wanted = {"LayerNormLinear": 4, "Linear": 4, "DotProductAttention": 2, "RMSNorm": num_norms}
    assert {name: made.count(name) for name in wanted} == {
        name: num_models * num for name, num in wanted.items()
    }
    assert {name: one["fuses"] for name, one in ours["te"]["made"] if "fuses" in one} == {
        "Linear": True,
        "LayerNormLinear": True,
    }
    assert all((one["format"], one["mask"]) == ("thd", "padding_causal") for one in ours["te"]["calls"])
    for part in ("metrics", "rolled back", "resumed"):
        for one, other in zip(ours[part], torchs[part], strict=True):
            assert one == pytest.approx(other, rel=1e-6)  # a norm adds up tensors in their order
    for part in ("logprobs", "exported"):
        assert len(ours[part]) == len(torchs[part])
    for one, other in zip(ours["logprobs"], torchs["logprobs"], strict=True):
        assert torch.equal(one, other)
    assert ours["exported"].keys() == torchs["exported"].keys()
    assert all(torch.equal(tensor, torchs["exported"][name]) for name, tensor in ours["exported"].items())
    assert_is_published(ours)
    on_cpu = run(model, "bfloat16", tmp_path / "cpu", 0)
    for one, other in zip(torchs["logprobs"], on_cpu["logprobs"], strict=True):
        torch.testing.assert_close(one, other, atol=0.1, rtol=0.0)
    for one, other in zip(torchs["metrics"], on_cpu["metrics"], strict=True):
        assert one == pytest.approx(other, abs=0.1, rel=0.1)
