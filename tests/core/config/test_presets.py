"""The shipped configurations: each passes `plan`, on this machine where it can run here, else without it."""

from __future__ import annotations

import pytest

from asyncrl.cli.doctor.machine import MIN_MEMORY_GB, MIN_SHM_GB
from asyncrl.core.config.load import load_config
from asyncrl.planner import plan
from asyncrl.planner.plan import checks
from asyncrl.planner.plan.footprint.capacity import Capacity
from asyncrl.planner.plan.footprint.memory import LEARNER_GPU
from configs import shipped

HERE = ("agents", "quickstart", "quickstart_redis", "tool_product")
"""Those that need no GPU, no network and no file that is not made on first use."""
GB = 10**9


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_configuration_passes_the_plan_and_says_what_was_not_checked(name):
    found = plan.check_elsewhere(load_config(shipped()[name]))
    assert any("CPUs, GPUs and memory" in line for line in found.not_checked)
    assert any(line.startswith("model.path: ") for line in found.not_checked), "no model is here"


@pytest.mark.parametrize("name", HERE)
def test_those_for_a_laptop_take_as_much_memory_as_the_doctor_asks_for(name):
    config = load_config(shipped()[name])
    room = Capacity(host=int(MIN_MEMORY_GB * GB), shm=int(MIN_SHM_GB * GB))
    assert list(checks.check_memory(config, room)) == []
    assert list(checks.check_memory(config, Capacity(host=int((MIN_MEMORY_GB - 0.1) * GB)))) != []


@pytest.mark.parametrize("name", HERE)
def test_those_for_a_laptop_pass_every_check_of_this_machine(name):
    found = plan.check(load_config(shipped()[name], ["rollout.cpus=0", "learner.cpus=0"]))
    assert found.num_gpus == 0
    assert not any("CPUs" in line for line in found.not_checked)


def test_there_is_a_preset_for_each_size_of_machine():
    gpus = {name: plan.check_elsewhere(load_config(path)).num_gpus for name, path in shipped().items()}
    sizes = {"quickstart": 0, "agents": 0, "one_gpu": 1, "two_gpus": 2, "eight_gpus": 8}
    assert {name: gpus[name] for name in sizes} == sizes
    assert gpus["two_nodes"] == 12 and load_config(shipped()["two_nodes"]).rollout.replicas.max == 8


@pytest.mark.parametrize(
    ("name", "host", "gpu"),
    [
        ("one_gpu", 32, 80),
        ("two_gpus", 64, 80),
        ("eight_gpus", 512, 80),
        ("two_nodes", 256, 80),
        ("grpo", 64, 40),
    ],
)
def test_those_for_gpus_fit_the_machine_that_they_name(name, host, gpu):
    config = load_config(shipped()[name])
    # Half of main memory is what Linux gives /dev/shm.
    there = Capacity(host=host * GB, shm=host * GB // 2, gpu=gpu * GB)
    assert list(checks.check_memory(config, there)) == []
    parts = checks.count_all(config, 0, 0)
    held = [part for part in parts if part.where == LEARNER_GPU]
    assert bool(held) == bool(config.learner.gpus)
    assert sum(part.num_bytes for part in held) < gpu * GB, "activations too"


@pytest.mark.parametrize("name", shipped())
def test_those_with_gpus_keep_the_cache_of_running_answers_and_correct_for_it(name):
    """Recomputing it at each version would cost 128 answers of 2,048 tokens of an 8 B model about 10 s."""
    config = load_config(shipped()[name])
    if config.rollout.gpus:
        assert config.rollout.kv_cache == "keep" and config.algorithm.correction != "none"
