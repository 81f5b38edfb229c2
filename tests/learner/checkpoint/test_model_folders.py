"""Model folders: what a rank reads of one, and an export in several files."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from learner.checkpoint import pretrained
from learner.checkpoint.pretrained import PretrainedTensors, write_folder
from learner.fsdp2.model import language_model
from learner.fsdp2.model.stored_weights import StoredWeights
from learner.megatron import convert
from tests.different import as_saved
from tests.learner.parts.samples import KINDS, save_model

TIED, UNTIED = "qwen2_tied", "qwen3"


class Sizes(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made, views aside."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_view = func.is_view or func is torch.ops.aten.set_.source_Storage  # of a mapped file
        if isinstance(found, torch.Tensor) and not is_view:
            self.largest = max(self.largest, found.numel())
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_in_several_files_is_the_model_for_transformers_and_for_us(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_model(tmp_path / "source", kind)
    stored = PretrainedTensors(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    names = list(as_saved(dict(model.named_parameters()), model.config.model_type))
    tensors = [(name, stored.read(name).clone()) for name in names]
    largest = max(tensor.nbytes for _, tensor in tensors)
    monkeypatch.setattr(pretrained, "MAX_FILE_BYTES", largest)
    target = tmp_path / "target"
    write_folder(source, target, tensors, torch.float32)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((target / file).stat().st_size <= largest + 4096 for file in files)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(names)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in tensors)
    loaded = as_saved(
        AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict(),
        model.config.model_type,
    )
    ours = PretrainedTensors(target)
    for name, tensor in tensors:
        assert torch.equal(loaded[name], tensor) and torch.equal(ours.read(name), tensor)
    monkeypatch.undo()
    write_folder(source, target, ((name, tensor + 1.0) for name, tensor in tensors), torch.float32)
    again = PretrainedTensors(target)
    assert all(torch.equal(again.read(name), tensor + 1.0) for name, tensor in tensors), "not the old index"


def test_what_is_read_takes_no_memory_before_it_is_copied(tmp_path: Path) -> None:
    stored = PretrainedTensors(save_model(tmp_path))
    with Sizes() as sizes:
        tensor = stored.read("model.embed_tokens.weight")
    assert tensor.numel() > 1000 > sizes.largest


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_tensor_parallel_rank_reads_its_part_of_a_fused_tensor_and_of_no_other(size: int) -> None:
    config: Any = SimpleNamespace(num_query_groups=4, num_attention_heads=8, kv_channels=6)
    generator = torch.Generator().manual_seed(0)
    rows = {"q_proj": 48, "k_proj": 24, "v_proj": 24, "o_proj": 32, "gate_proj": 40, "up_proj": 40}
    rows["down_proj"], made = 32, dict[str, torch.Tensor]()

    def read(name: str) -> torch.Tensor:
        kind = name.split(".")[-2]
        if name not in made:
            made[name] = torch.randn(rows[kind], 24, generator=generator)
        return made[name]

    inner = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    for name in (f"decoder.layers.3.{part}.weight" for part in inner):
        alone: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        full = convert._read_part(name, config, read, alone)
        parts = []
        for rank in range(size):
            group: Any = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
            with Sizes() as sizes:
                parts.append(convert._read_part(name, config, read, group))
            assert sizes.largest <= full.numel() // size
        assert torch.equal(convert.merge(name, parts), full)


@pytest.mark.parametrize("kind", [TIED, UNTIED])
def test_layers_hold_their_weights_only_while_they_run_and_a_rank_reads_only_its_rows(
    kind: str, tmp_path: Path
) -> None:
    source = save_model(tmp_path, kind)
    model, weights = language_model.load_model(source)
    layers = language_model.find_layers(model)
    assert len(layers) >= 2
    untouched = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    ran: list[int] = []

    def holding() -> set[str]:
        return {name for name, one in model.named_parameters() if one.data_ptr() != untouched[name]}

    def check(index: int) -> None:
        in_layers = {name for name in holding() if ".layers." in name}
        assert in_layers == {name for name in untouched if f".layers.{index}." in name}
        ran.append(index)

    with torch.no_grad(), weights.lent(layers):
        assert holding() == {name for name in untouched if ".layers." not in name}
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: check(index))
        tokens = torch.arange(9)[None]
        found = model(input_ids=tokens).logits
    assert holding() == set() and ran == list(range(len(layers)))
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert torch.equal(found, whole(input_ids=tokens).logits)
    assert_rows_are_read(model, weights, dict(whole.named_parameters()))


@dataclass
class RankRows:
    """A parameter's rows of one of several ranks; a stand-in for `ShardedParameter`."""

    name: str
    start: int
    shard: torch.Tensor


def assert_rows_are_read(
    model: torch.nn.Module, weights: StoredWeights, wanted: dict[str, torch.Tensor]
) -> None:
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with pytest.raises(AssertionError, match=re.escape(f"no parameter is called {min(shapes)}")):
        weights.fill([])
    for name, parameter in model.named_parameters():
        num_rows = parameter.shape[0]
        cuts = [0, num_rows // 3, num_rows, num_rows]
        shards: list[Any] = [
            RankRows(name, start, torch.full((end - start, *parameter.shape[1:]), float("nan")))
            for start, end in itertools.pairwise(cuts)
        ]
        others: Any = [RankRows(one, 0, torch.empty(0, *shapes[one][1:])) for one in shapes if one != name]
        with Sizes() as sizes:
            weights.fill([*shards, *others])
        assert sizes.largest <= max(one.shard.numel() for one in shards)
        assert torch.equal(torch.cat([one.shard for one in shards]), wanted[name])


def test_a_layer_that_fails_gives_its_weights_back(tmp_path: Path) -> None:
    model, weights = language_model.load_model(save_model(tmp_path))
    (layer, *_), before = language_model.find_layers(model), [one.data_ptr() for one in model.parameters()]
    with weights.lent([layer]), pytest.raises(TypeError):
        layer()
    assert [one.data_ptr() for one in model.parameters()] == before
