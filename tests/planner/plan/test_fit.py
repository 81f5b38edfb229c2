"""Presets for GPUs against stand-in machines: which fits, and which values make the others fit."""

from __future__ import annotations

import pytest

from asyncrl.cli.doctor.gpus import check_presets
from asyncrl.core.config.load import load_config
from asyncrl.planner.plan.fit import Machine, change, find_fit, find_lacks
from asyncrl.planner.plan.footprint.capacity import Capacity
from configs import shipped

GB = 10**9
ONE, TWO, EIGHT = (
    Machine(num_gpus, Capacity(host=host * GB, shm=host * GB // 2, gpu=80 * GB))
    for num_gpus, host in ((1, 128), (2, 256), (8, 1024))
)
SMALL = Machine(1, Capacity(host=64 * GB, shm=32 * GB, gpu=24 * GB))
IN_CONTAINER = Machine(8, Capacity(host=1024 * GB, shm=64 * GB, gpu=80 * GB))


def verdicts(machine: Machine) -> dict[str, str]:
    return {one.what: one.found for one in check_presets(machine)}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (
            ONE,
            {
                "one_gpu": "fits",
                "two_gpus": "with --set learner.gpus=0.5 --set rollout.gpus=0.5",
                "eight_gpus": "does not fit: it takes 8 GPUs of this machine, which has 1",
                "grpo": "with --set rollout.replicas=1 --set learner.recompute=full "
                "--set learner.gpus=0.5 --set rollout.gpus=0.5",
            },
        ),
        (
            TWO,
            {
                "one_gpu": "fits",
                "two_gpus": "fits",
                "grpo": "with --set rollout.replicas=1",
                "eight_gpus": "does not fit: it takes 8 GPUs of this machine, which has 2",
            },
        ),
        (EIGHT, {"one_gpu": "fits", "eight_gpus": "fits", "two_nodes": "fits; the others on other nodes"}),
        (SMALL, {"one_gpu": "with --set learner.recompute=full --set learner.offload=true"}),
    ],
)
def test_the_doctor_tells_each_preset_for_gpus_whether_it_fits_and_the_values_that_make_it_fit(
    machine: Machine, expected: dict[str, str]
) -> None:
    found = verdicts(machine)
    assert {f"preset {name}": told for name, told in expected.items()}.items() <= found.items()
    assert "preset quickstart" not in found


def test_shared_memory_of_a_container_is_named_where_no_value_helps() -> None:
    found = verdicts(IN_CONTAINER)["preset eight_gpus"]
    assert found.startswith(
        "does not fit: weight_sync.parallelism: the run takes 81.9 GB of /dev/shm, which has 64"
    )
    assert "--shm-size of a container" in found


def test_a_machine_without_a_gpu_is_told_what_runs_there() -> None:
    none = Machine(0, Capacity(host=64 * GB))
    assert verdicts(none) == {"presets": "quickstart runs here; the presets for GPUs do not"}


@pytest.mark.parametrize("machine", [ONE, TWO, SMALL])
def test_the_values_that_are_told_are_ones_that_the_configuration_takes_and_the_machine_has_room_for(
    machine: Machine,
) -> None:
    num_changed = 0
    for path in shipped().values():
        config = load_config(path)
        changes = find_fit(config, machine).changes if config.rollout.gpus else {}
        if not changes:
            continue
        num_changed += 1
        told = load_config(path, [f"{key}={str(value).lower()}" for key, value in changes.items()])
        assert told.learner == change(config, changes).learner
        assert told.rollout == change(config, changes).rollout
        assert list(find_lacks(told, machine)) == []
    assert num_changed >= 1
