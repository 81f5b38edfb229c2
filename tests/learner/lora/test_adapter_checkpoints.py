"""Checkpoints of adapters alone: either backend resumes them, and `asyncrl export` writes them both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import CheckpointError, ConfigError
from learner.checkpoint import CheckpointStore
from learner.checkpoint.export import export_run
from learner.checkpoint.reader import StateReader
from learner.lora.folder import ADAPTER, PREFIX
from tests.cli.commands.calling import asyncrl
from tests.different import digests_of
from tests.learner.parts.contract import is_bit_equal, weights_of
from tests.learner.parts.samples import save_model
from tests.learner.parts.training import open_backend, open_fsdp2, train

LORA = {"rank": 4, "alpha": 6.0, "targets": ["q_proj", "v_proj", "down_proj"]}
OPENERS = pytest.mark.parametrize("opener", [open_backend, open_fsdp2])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen3")


def write_run(folder, model, opener, lora):
    """Write what a run leaves; return the folder of its last weights."""
    folder.mkdir(parents=True)
    named = {"path": str(model), "dtype": "float32", "lora": lora}
    values = {"model": named, "data": {"train": "x"}, "reward": {"fn": "gsm8k"}}
    (folder / "resolved.yaml").write_text(dump_resolved(Config(**values)))
    store = CheckpointStore(folder / "checkpoints", keep=3, keep_best=1)
    backend = opener(model, lora=lora)
    train(backend, range(2))
    backend.save_state(store.prepare(2))
    store.seal(2, token=1)
    backend.save_hf(folder / "weights")
    backend.close()
    return folder / "weights"


@OPENERS
def test_a_run_s_adapters_are_exported_merged_or_as_peft_has_them(opener, model, tmp_path):
    weights = load_file(write_run(tmp_path / "mine", model, opener, LORA) / "model.safetensors")
    done = asyncrl("export", "mine", "--to", tmp_path / "merged", "--dir", tmp_path)
    assert done.code == 0, done.err
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert digests_of(merged) == digests_of(weights)
    done = asyncrl("export", "mine", "--adapter", "--to", tmp_path / "adapter", "--dir", tmp_path)
    assert done.code == 0, done.err
    factors = load_file(tmp_path / "adapter" / ADAPTER)
    table = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (table["r"], table["lora_alpha"], table["target_modules"]) == (4, 6, LORA["targets"])
    changed = {f"{name.removeprefix(PREFIX).partition('.lora_')[0]}.weight" for name in factors}
    base = load_file(model / "model.safetensors")
    assert {name for name, tensor in base.items() if not torch.equal(tensor, merged[name])} == changed


def test_a_run_without_adapters_has_none_to_export(model, tmp_path):
    write_run(tmp_path / "mine", model, open_backend, {})
    with pytest.raises(ConfigError, match="trains all weights, and has no adapter"):
        export_run("mine", str(tmp_path), "newest", tmp_path / "out", has_adapter=True)


@pytest.mark.parametrize(("opener", "other"), [(open_backend, open_fsdp2), (open_fsdp2, open_backend)])
def test_a_checkpoint_holds_adapters_alone_and_either_backend_goes_on_with_it(opener, other, model, tmp_path):
    backend = opener(model, lora=LORA)
    train(backend, range(1))
    backend.save_state(tmp_path)
    saved = weights_of(backend)
    with StateReader(tmp_path) as reader:
        assert set(reader.shapes) == set(saved)
    straight, straight_on = train(backend, range(1, 2)), weights_of(backend)
    backend.load_state(tmp_path)
    assert is_bit_equal(weights_of(backend), saved)
    assert train(backend, range(1, 2)) == straight
    assert is_bit_equal(weights_of(backend), straight_on)
    backend.close()
    backend = other(model, lora=LORA, seed=7)
    assert not is_bit_equal(weights_of(backend), saved)
    backend.load_state(tmp_path)
    assert is_bit_equal(weights_of(backend), saved)
    train(backend, range(1, 2))
    for name, tensor in weights_of(backend).items():
        torch.testing.assert_close(tensor, straight_on[name], rtol=0, atol=1e-4)
    backend.close()
    backend = other(model, lora=LORA | {"rank": 2})
    with pytest.raises(CheckpointError, match="another model"):
        backend.load_state(tmp_path)
    backend.close()
