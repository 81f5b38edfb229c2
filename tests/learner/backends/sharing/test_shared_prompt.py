"""A prompt that is computed once per group: log-probs, values and gradients are those of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.core.config.tree import LearnerSection
from learner.backend import Placement
from learner.batching.batch import PackedBatch, build_batch
from learner.batching.shared_prompts import measure_work
from learner.batching.sharing import can_share
from learner.fsdp2.backend import Fsdp2ValueBackend
from learner.fsdp2.model.language_model import choose_ways, load_model
from learner.megatron.backend import MegatronValueBackend
from tests.learner.parts.contract import gradients_of
from tests.learner.parts.samples import make_forked_group, make_groups, save_model
from tests.learner.parts.training import open_backend, open_fsdp2, squared_error

OPENERS = {"megatron": open_backend, "fsdp2": open_fsdp2}
UNCLIPPED = {"grad_clip": 1e9, "betas": (0.9, 0.999)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_batch() -> PackedBatch:
    """Groups with long prompts, one of several turns and branches, and one that does not share."""
    groups = [*make_groups(2, prompt_tokens=(30, 50)), replace(make_groups(1, seed=3)[0], ticket=20)]
    batch = build_batch([*groups, make_forked_group(21)], 0, {1: 0})
    return replace(batch, rewards_R=torch.linspace(-1, 1, batch.num_rows) + 0.1)


def weigh(part: PackedBatch) -> torch.Tensor:
    """Return a weight for each position, of prompts too, which differs between rows that share it."""
    return (1.7 * part.tokens_N + 0.3 * part.labels_N).sin() * part.rewards_R[part.row_N]


def loss(logprobs_N: torch.Tensor, entropy_N: torch.Tensor, part: PackedBatch) -> tuple[torch.Tensor, Any]:
    return ((logprobs_N + 0.1 * entropy_N) * weigh(part)).sum(), {"rows": torch.tensor(float(part.num_rows))}


def compute(opener: Callable[..., Any], model: Path, batch: PackedBatch, **changes: Any) -> tuple[Any, ...]:
    """Return log-probs, entropies and squares, gradients, metrics, and the tokens of the first pass."""
    backend = opener(model, **UNCLIPPED, **changes)
    sizes: list[int] = []
    hook = embedding_of(backend).register_forward_pre_hook(lambda _, given: sizes.append(given[0].numel()))
    columns = backend.logprobs_and_squares(batch)
    hook.remove()
    metrics = backend.update(batch, loss)
    gradients = gradients_of(backend)
    backend.close()
    assert metrics["rows"] == batch.num_rows
    return columns, gradients, metrics, sum(sizes)


def embedding_of(backend: Any) -> torch.nn.Module:
    root = backend._chunks[0] if hasattr(backend, "_chunks") else backend._engine._module
    names = ("word_embeddings", "embed_tokens")
    return next(module for name, module in root.named_modules() if name.endswith(names))


def assert_gradients_alike(ours: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, gradient in wanted.items():
        largest = gradient.abs().max().item()
        assert largest > 0
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * largest)


@pytest.fixture(scope="module", params=OPENERS)
def packed(request: pytest.FixtureRequest, model: Path) -> tuple[str, tuple[Any, ...]]:
    found = compute(OPENERS[request.param], model, make_batch(), temperature=0.7, shared_prompt="off")
    assert found[-1] == make_batch().num_tokens
    return request.param, found


@pytest.mark.parametrize(
    "changes", [{}, {"max_tokens_per_microbatch": 330, "recompute": "full"}], ids=["whole", "cut"]
)
def test_outputs_and_gradients_are_those_of_packed_rows(
    packed: tuple[str, tuple[Any, ...]], model: Path, changes: dict[str, Any]
) -> None:
    backend, (wanted, gradients, _, num_tokens) = packed
    batch = make_batch()
    columns, found, _, num_computed = compute(OPENERS[backend], model, batch, temperature=0.7, **changes)
    if changes:  # the prompt of a group that is cut is computed again
        assert num_computed < 0.8 * num_tokens
    else:
        assert num_computed == measure_work(make_batch(), is_shared=True).num_tokens < 0.6 * num_tokens
    for ours, theirs in zip(columns, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert_gradients_alike(found, gradients)


def read_values(make: type, model: Path, shared_prompt: str) -> tuple[torch.Tensor, Any]:
    section = LearnerSection(shared_prompt=shared_prompt, **UNCLIPPED)
    critic, batch = make(model, section, Placement(), dtype="float32"), make_batch()
    critic.update(batch, squared_error)  # a head of zeros gives nothing to compare
    values_N, gradients = critic.values(batch), gradients_of(critic)
    critic.close()
    return values_N, gradients


@pytest.mark.parametrize("make", [MegatronValueBackend, Fsdp2ValueBackend])
def test_a_critic_s_values_and_gradients_are_those_of_packed_rows(make: type, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    path = model / "model.safetensors"
    save_file(load_file(path) | {"score.weight": torch.linspace(-1, 1, 64)[None]}, path)
    (values_N, gradients), (wanted_N, wanted) = (read_values(make, model, way) for way in ("auto", "off"))
    assert wanted_N.std() > 0.01
    torch.testing.assert_close(values_N, wanted_N, rtol=0, atol=1e-5)
    assert_gradients_alike(gradients, wanted)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shared_prompt": "off"}, "learner.shared_prompt is off"),
        ({"cp": 2}, "learner.cp cuts rows"),
        ({"compile": True}, "learner.compile"),
        ({"kernels": "te"}, "learner.kernels is te"),
        ({"problem": "no tree"}, "no tree"),
        ({"is_varlen": False, "device": "cuda"}, "this GPU has no kernel"),
    ],
    ids=str,
)
def test_what_cannot_share_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    caplog.set_level("INFO")
    options = {"is_varlen": True, "problem": "", "device": "cpu"} | changes
    device = torch.device(options.pop("device"))
    ways = {name: options.pop(name) for name in ("is_varlen", "problem")}
    assert can_share(LearnerSection(), tmp_path, device, is_varlen=True)
    for _ in range(2):
        assert not can_share(LearnerSection(**options), tmp_path, device, **ways)
    (said,) = (record.message for record in caplog.records)
    assert reason in said


@pytest.mark.parametrize("layers", ["sliding_attention", "full_attention"])
def test_fsdp2_finds_by_trial_that_a_model_with_sliding_windows_cannot_share(
    tmp_path: Path, layers: str
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 99}
    options = {"use_sliding_window": True, "sliding_window": 64, "layer_types": [layers] * 2}
    config = Qwen2Config(**sizes, num_hidden_layers=2, num_key_value_heads=1, **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ways = choose_ways(*load_model(tmp_path))
    assert ways.is_packed and ways.no_tree.startswith("no prefix tree") == (layers == "sliding_attention")
