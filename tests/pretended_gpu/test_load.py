"""The load of a staged version into the model of a vLLM worker on a pretended GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from asyncrl.core.staleness import PolicyVersion
from learner.checkpoint import pretrained
from rollout_service.engine.checkpoint import read_tensors
from rollout_service.engine.vllm import weight_transfer
from rollout_service.engine.vllm.weight_transfer import StagedWeightTransferEngine
from tests.pretended_gpu.device.tensors import GPU, to_gpu
from tests.rollout.engine.engine_parts import stage
from tests.rollout.engine.test_reload import CONFIG, Matrix, Model
from weight_sync.copies import to_gpu as copies
from weight_sync.memory.staging import open_tensors

pytestmark = pytest.mark.usefixtures("gpu")
SHAPE = (24, 16)
RANK, NUM_RANKS = 1, 2


def load_rows(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight.chunk(NUM_RANKS, 0)[RANK])


def load_columns(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight.chunk(NUM_RANKS, 1)[RANK])


def parameter(num_rows: int, num_columns: int, loader: object = None) -> Parameter:
    made: Any = Parameter(to_gpu(torch.zeros(num_rows, num_columns)), requires_grad=False)
    if loader is not None:
        made.weight_loader = loader
    return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker's engine with a tied model, cut over two ranks."""
    monkeypatch.setattr(weight_transfer, "get_world_group", lambda: SimpleNamespace(rank=RANK))
    monkeypatch.setattr(weight_transfer, "BUFFER_BYTES", 256)
    shared = parameter(12, 16, load_rows)
    engine: Any = object.__new__(StagedWeightTransferEngine)
    with torch.device(GPU):
        engine.model = Model(
            embedding=Matrix(weight=shared),
            middle=Matrix(weight=parameter(24, 8, load_columns)),
            last=Matrix(weight=parameter(*SHAPE)),
            head=Matrix(weight=shared),
        )
    engine.model_config = CONFIG
    return engine


def load(engine: Any, number: int) -> dict[str, torch.Tensor]:
    """Load a version and return its tensors."""
    generator = torch.Generator().manual_seed(number)
    names = ("embedding.weight", "middle.weight", "last.weight")
    tensors = {name: torch.randn(SHAPE, generator=generator) for name in names}
    version = PolicyVersion(number, number)
    model: Any = SimpleNamespace(
        named_parameters=tensors.items,
        named_buffers=tuple,
        state_dict=dict,
        config=SimpleNamespace(model_type="qwen3"),
    )
    with stage(model, version) as staged:
        engine._load(number, list(open_tensors(staged)))
    return tensors


def test_the_parts_of_a_worker_are_loaded_and_processed_at_every_load(engine: Any) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for number in (1, 2, 3):
        tensors = load(engine, number)
        wanted = {
            "embedding": tensors["embedding.weight"][12:],
            "middle": tensors["middle.weight"][:, 8:],
            "last": tensors["last.weight"],
            "head": tensors["embedding.weight"][12:],
        }
        for name, values in wanted.items():
            matrix: Any = getattr(engine.model, name)
            assert matrix.weight.device == GPU
            for held in (matrix.weight, matrix.packed["weight"]):
                assert torch.equal(held.detach().cpu(), values), (number, name)
        found.append(wanted)
    assert not torch.equal(found[0]["last"], found[1]["last"])


def test_all_of_it_goes_through_the_pinned_buffers(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[copies.PinnedCopies] = []

    class Counted(copies.PinnedCopies):
        def __init__(self, pipeline: Any) -> None:
            super().__init__(pipeline)
            made.append(self)

    monkeypatch.setattr(weight_transfer, "PinnedCopies", Counted)
    load(engine, 1)
    (one,) = made
    least = (12 * 16 + 24 * 8 + 24 * 16 + 12 * 16) * 4 // 256
    assert one.num_copies >= least


def test_the_check_before_a_load_reads_an_export_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "MAX_FILE_BYTES", 100)
    (tmp_path / "config.json").write_text("{}")
    tensors = {f"t{index}": torch.zeros(index, 5, dtype=torch.bfloat16) for index in range(1, 8)}
    pretrained.write_folder(tmp_path, tmp_path / "to", tensors.items(), torch.bfloat16)
    assert len(list((tmp_path / "to").glob("model-*-of-*.safetensors"))) > 2
    found = {name: (one.shape, one.dtype) for name, one in read_tensors(tmp_path / "to").items()}
    assert found == {name: (tuple(one.shape), "bfloat16") for name, one in tensors.items()}
