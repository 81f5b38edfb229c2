"""`asyncrl doctor` of a machine with GPUs, played by the driver's files and its management library."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from asyncrl.cli.doctor import gpus
from asyncrl.cli.doctor.finding import Finding
from asyncrl.control.machine import resources

DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}.95.05  Release Build\nGCC version: gcc 12\n"
)


@dataclass
class Machine:
    """GPUs with so many GiB free of 80, and the driver; `links` of NVLink are up."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def make(
        self, free_gib: list[float], driver: int = 580, links: int = 0, has_library: bool = True
    ) -> None:
        for index in range(len(free_gib)):
            (self.folder / "gpus" / f"0000:{index:02x}:00.0").mkdir(parents=True)
        (self.folder / "version").write_text(DRIVER.format(driver))
        for module in (gpus, resources):
            self.monkeypatch.setattr(module, "DRIVER_GPUS", self.folder / "gpus")
        self.monkeypatch.setattr(gpus, "DRIVER", self.folder / "version")
        self.monkeypatch.setattr(gpus, "installed_version", {"nvidia-cuda-runtime": "13.0.96"}.get)
        library = make_library(free_gib, links) if has_library else None
        self.monkeypatch.setitem(sys.modules, "pynvml", library)
        self.monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def findings(self) -> dict[str, Finding]:
        return {one.what: one for one in gpus.check_gpus()}


def make_library(free_gib: list[float], num_links: int) -> ModuleType:
    """A stand-in for `pynvml`: handles are indexes, and a link that is not there raises."""

    class NVMLError(Exception):
        pass

    def memory(index: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 << 30, free=int(free_gib[index] * 2**30))

    def link_state(_: int, link: int) -> int:
        if link >= num_links:
            raise NVMLError("Not Supported")
        return 1

    library = ModuleType("pynvml")
    library.__dict__.update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(free_gib),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}{index}",
        nvmlDeviceGetName=lambda _: "NVIDIA H100 80GB HBM3",
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetNvLinkState=link_state,
    )
    return library


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_machine_without_gpus_says_so(machine: Machine) -> None:
    machine.make([])
    assert machine.findings() == {"gpu": Finding("gpu", "ok", "none: runs use the CPU")}


def test_linked_and_free_gpus_with_their_driver_are_fit(machine: Machine) -> None:
    machine.make([79.0, 79.0], links=18)
    found = machine.findings()
    assert {one.verdict for one in found.values()} == {"ok"}
    assert found["gpu"].found == "2 NVIDIA GPUs; NVIDIA H100 80GB HBM3, 80 GiB"
    assert found["driver"].found == "580, packages for CUDA 13"


def test_a_driver_that_is_too_old_for_the_packages_fails(machine: Machine) -> None:
    machine.make([79.0], driver=550)
    driver = machine.findings()["driver"]
    assert driver.verdict == "fail" and "CUDA 13 needs a driver from 580 on" in driver.advice


@pytest.mark.parametrize("visible", ["0", "0,-1,1", "GPU-00"])
def test_memory_that_others_hold_is_told_by_gpu_and_not_for_a_hidden_one(
    machine: Machine, visible: str
) -> None:
    machine.make([79.0, 30.0], links=18)
    memory = machine.findings()["gpu memory"]
    assert memory.verdict == "warn" and memory.found == "others use GPU 1 (30 GiB free)"
    machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.findings()
    assert found["gpu memory"].verdict == "ok"
    assert f"1 of 2 (CUDA_VISIBLE_DEVICES={visible}) NVIDIA GPUs" in found["gpu"].found


def test_gpus_without_nvlink_are_told(machine: Machine) -> None:
    machine.make([79.0, 79.0])
    assert machine.findings()["nvlink"].verdict == "warn"


@pytest.mark.parametrize("has_library", [False, True])
def test_what_the_library_does_not_say_is_left_out(machine: Machine, has_library: bool) -> None:
    machine.make([79.0], has_library=has_library)
    if has_library:
        library = sys.modules["pynvml"]

        def fail() -> None:
            raise library.NVMLError("driver not loaded")

        machine.monkeypatch.setattr(library, "nvmlInit", fail)
    assert set(machine.findings()) == {"gpu", "driver"}
    assert machine.findings()["gpu"].found == "1 NVIDIA GPUs"
