"""Stand-ins for packages that SGLang imports on a CPU; SGLang itself is not imported here."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from asyncrl.core.config.tree import Config
from asyncrl.planner.plan.checks import check_cut_of_engine
from rollout_service.engine.protocol import engine_variant
from rollout_service.engine.sglang.process import STAND_INS
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer

MASK = 0xFFFFFFFF


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("asyncrl_stand_in", STAND_INS / "sgl_kernel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def murmur3(data: bytes) -> int:
    """Return MurmurHash3 x86 32 of whole words, with seed 0, as its author published it."""
    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & MASK
        word = (word << 15 | word >> 17) * 0x1B873593 & MASK
        state ^= word
        state = ((state << 13 | state >> 19) & MASK) * 5 + 0xE6546B64 & MASK
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & MASK
    return state ^ state >> 16


def test_the_hash_behind_seeds_is_murmur3_also_of_seeds_of_64_bits(kernels: ModuleType) -> None:
    seeds, positions, columns = [0, 7, 2**62 + 5, 2**63 - 1], [0, 3, 1024, 2**31], [0, 1, 151_935]
    found = kernels.murmur_hash32_cpu(
        torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns, dtype=torch.int64)
    )
    wanted = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found.tolist() == wanted
    assert len({value for row in wanted for value in row}) == 12


def test_a_kernel_without_a_stand_in_is_named_when_it_is_called(kernels: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.merge_state has no stand-in"):
        kernels.merge_state(1)


def test_the_modules_of_torchvision_that_configurations_import_are_there() -> None:
    code = (
        "from torchvision.transforms import InterpolationMode as a\n"
        "from torchvision.transforms.v2 import functional, InterpolationMode as b\n"
        "from torchvision.transforms.v2.functional import resize\n"
        "import torchvision.io, torchvision.transforms.functional\n"
        "assert a is b and a.BICUBIC.value == 'bicubic'\n"
        "resize(1)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(STAND_INS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "RuntimeError: torchvision is not installed: no resize" in done.stderr


def test_a_replica_of_sglang_has_one_gpu_at_most() -> None:
    values = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
    for engine, gpus, num in (("sglang", 2, 1), ("sglang", 1, 0), (["vllm", "sglang"], 2, 1), ("vllm", 2, 0)):
        config = Config(**values, rollout={"engine": engine, "gpus": gpus})
        told = list(check_cut_of_engine(config))
        assert len(told) == num
        assert all(line.startswith("rollout.gpus: SGLang: loads and probes run in one") for line in told)
        built = engine_variant("sglang").build(config.of_replica(1), build_tokenizer())
        assert built.serving.number == 0
