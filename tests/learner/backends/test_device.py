"""The device of a learner rank is the configuration's, and its optimizer is torch's, whatever there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.core.config.sections.learner import DETERMINISTIC
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.service import ServiceContext
from learner.composition import build
from learner.fsdp2.groups import join_group
from learner.megatron import cpu_adaptor
from learner.megatron.groups import join_groups
from learner.megatron.model.architecture import Parallelism
from learner.megatron.state import _values
from learner.numerics import device as devices
from learner.numerics.device import VISIBLE, choose_device, claim_device
from learner.record.plan import Plan
from learner.record.replay import replay
from tests.learner.parts.samples import save_model
from tests.learner.parts.training import Placement


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs, as torch would tell; yields what becomes the current device."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv(VISIBLE, "0,1")
    return current


def test_a_rank_without_a_gpu_computes_on_the_cpu_and_hides_those_that_the_machine_has(
    gpus: list[torch.device],
) -> None:
    assert claim_device(0, 0) == torch.device("cpu")
    assert os.environ[VISIBLE] == "" and gpus == []


def test_ranks_with_gpus_take_them_in_turn_and_hide_none(gpus: list[torch.device]) -> None:
    assert [claim_device(1, rank) for rank in (0, 1, 2)] == gpus
    assert [device.index for device in gpus] == [0, 1, 0] and os.environ[VISIBLE] == "0,1"


class Stop(Exception):
    """Raised where models would be opened."""


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("process", ["service", "replay"])
def test_a_rank_and_its_replay_use_deterministic_algorithms_where_that_is_asked_for(
    tmp_path: Path, process: str, is_deterministic: bool
) -> None:
    needed = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
    config = Config.model_validate({**needed, "learner": {"deterministic": is_deterministic}})
    found: list[bool] = []

    def open_models(*_: object) -> Any:
        found.append(torch.are_deterministic_algorithms_enabled())
        raise Stop

    context, plan = ServiceContext(config, "learner.0", tmp_path, "id"), Plan(tmp_path, 0, 0, 1, False)
    run = {
        "service": lambda: build(context, open_models),
        "replay": lambda: replay(plan, config, Placement(), make_models=open_models),
    }[process]
    try:
        with pytest.raises(Stop):
            run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [is_deterministic]


def test_libraries_of_a_deterministic_rank_repeat_their_results_on_a_gpu(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no roster has set its environment, as in a replay."""
    for name in DETERMINISTIC:
        monkeypatch.setenv(name, "")
    claim_device(1, 0)
    assert {os.environ[name] for name in DETERMINISTIC} == {""}
    try:
        claim_device(1, 0, is_deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {name: os.environ[name] for name in DETERMINISTIC} == DETERMINISTIC


def test_a_gpu_that_is_not_there_is_a_config_error_and_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"learner\.gpus is 1, and PyTorch .* finds no GPU"):
        choose_device(1, 0)


def test_neither_backend_asks_what_the_machine_has(gpus: list[torch.device]) -> None:
    group = join_group(Placement(), gpus=0, seed=0)
    assert group.device == torch.device("cpu") and group.mesh.device_type == "cpu"
    group.stop()
    groups = join_groups(Placement(), Parallelism(), gpus=0, seed=0)
    assert groups.device == torch.device("cpu")
    groups.stop()


def test_megatron_that_was_bound_to_a_gpu_is_not_used_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_adaptor.is_installed()
    monkeypatch.setattr(cpu_adaptor, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match="this process sees a GPU, which Megatron-core would compute on"):
        join_groups(Placement(), Parallelism(), gpus=0, seed=0)


def test_no_other_module_of_the_learner_asks_for_a_gpu_but_the_adaptor_that_is_bound_at_import() -> None:
    folder = Path(devices.__file__).parents[1]
    asking = [path for path in folder.rglob("*.py") if "cuda.is_available()" in path.read_text()]
    assert {path.name for path in asking} == {"device.py", "cpu_adaptor.py"}


APEX = """
import importlib.machinery, sys, types, torch
class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **others):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
for name in ("apex", "apex.optimizers"):
    sys.modules[name] = module = types.ModuleType(name)
    module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
sys.modules["apex"].optimizers = sys.modules["apex.optimizers"]
sys.modules["apex.optimizers"].FusedAdam = sys.modules["apex.optimizers"].FusedSGD = FusedAdam
from pathlib import Path
from tests.learner.parts.training import open_backend
backend = open_backend(Path(sys.argv[1]))
print(type(backend._training.optimizers[0].optimizer))
"""


@pytest.mark.long
def test_the_optimizer_is_torchs_where_apex_is_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", APEX, str(save_model(tmp_path))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "<class 'torch.optim.adamw.AdamW'>"


def test_the_step_of_a_parameter_that_was_never_updated_is_where_its_values_are() -> None:
    """AdamW's fused kernel refuses it elsewhere."""
    made: dict[str, torch.Tensor] = {}
    values = _values(torch.zeros(3, device="meta"), made)
    assert {one.device.type for one in (*made.values(), *values.values())} == {"meta"}
    assert made.keys() == {"step", "exp_avg", "exp_avg_sq"}
