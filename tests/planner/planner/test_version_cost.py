"""Cost of a version of weights: what plan prints, what the page says, and how both are held to real ones."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.cli.up import find_config
from asyncrl.core.config.load import load
from asyncrl.core.config.tree import Config
from asyncrl.planner.hardware import assume_rates
from asyncrl.planner.plan.checks import read_size
from asyncrl.planner.plan.footprint.estimate import find_stages
from asyncrl.planner.plan.footprint.version_cost import (
    ALL,
    EXPORT,
    GROUP,
    LOAD,
    MAP,
    STORE,
    VersionCost,
    WeightRates,
)
from benchmarks.weight_sync import planned

PAGE = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
COMMANDS = re.findall(r"^asyncrl plan (\w+) --elsewhere(.*)$", PAGE, re.MULTILINE)
RATES = WeightRates(
    export_s=1.0, export_bytes_per_s=10.0, group_s=2.0, send_bytes_per_s=5.0, load_bytes_per_s=10.0
)
COST = VersionCost(100, writers=2, in_group=4, by_folder=0, engine_gpus=2, parallelism=2)


def config_of(name: str, options: str = "") -> Config:
    sets = [word for word in shlex.split(options) if word != "--set"]
    return load([find_config(name)], sets).config


@pytest.mark.parametrize(
    ("in_group", "cores", "copies"),
    [(1, None, 1), (3, None, 2), (4, None, 3), (28, None, 5), (4, 2, 4), (4, 16, 3)],
)
def test_a_broadcast_leaves_the_publisher_once_per_level_and_on_few_cores_once_per_receiver(
    in_group: int, cores: int | None, copies: int
) -> None:
    assert replace(COST, in_group=in_group, cores=cores).num_copies == copies


def test_each_stage_has_its_seconds_and_bytes() -> None:
    stages = {stage.name: (stage.seconds, stage.num_bytes) for stage in COST.stages(RATES)}
    assert stages == {EXPORT: (6.0, 100), GROUP: (62.0, 400), LOAD: (5.2, 100), ALL: (10.4, 400)}


def test_a_folder_is_written_once_and_read_by_each_and_the_slower_way_counts() -> None:
    both = replace(COST, in_group=1, by_folder=3)
    stages = {stage.name: stage for stage in both.stages(replace(RATES, store_bytes_per_s=50.0))}
    assert (stages[STORE].seconds, stages[STORE].num_bytes) == (4.0, 400)
    assert both.transfer_s(replace(RATES, store_bytes_per_s=50.0)) == stages[GROUP].seconds == 22.0
    assert both.transfer_s(replace(RATES, store_bytes_per_s=1.0)) == 200.0


def test_who_is_beside_the_publisher_checks_its_copy_and_moves_no_byte() -> None:
    mapped = replace(COST, in_group=0, mapped=4)
    rates = replace(RATES, check_bytes_per_s=25.0)
    stages = {stage.name: (stage.seconds, stage.num_bytes) for stage in mapped.stages(rates)}
    assert stages == {EXPORT: (6.0, 100), MAP: (4.0, 0), LOAD: (5.2, 100), ALL: (10.4, 400)}
    assert mapped.transfer_s(rates) == 4.0


def test_a_share_that_may_be_unavailable_is_loaded_at_once_if_that_is_fewer() -> None:
    options = "--set weight_sync.parallelism=4 --set weight_sync.max_unavailable=0.5"
    assert VersionCost.of(config_of("eight_gpus", options), 100).parallelism == 2


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ("", (0, 0, 4)),
        ("--set launcher.ray=auto", (4, 0, 0)),
        ("--set weight_sync.folder=memory://x", (0, 0, 4)),
        ("--set weight_sync.folder=memory://x --set launcher.ray=auto", (0, 4, 0)),
        ("--set weight_sync.folder=memory://x --set weight_sync.backend=folder", (0, 4, 0)),
        ("--set rollout.replicas=0", (0, 0, 0)),
    ],
)
def test_the_ways_of_replicas_are_those_of_the_configuration(options: str, ways: tuple[int, ...]) -> None:
    cost = VersionCost.of(config_of("eight_gpus", options), 100)
    assert (cost.in_group, cost.by_folder, cost.mapped) == ways
    assert (cost.writers, cost.engine_gpus) == (4, 1)
    assert len(list(cost.stages(RATES))) == (4 if any(ways) else 1)


def test_the_page_says_what_plan_calculates() -> None:
    rows = re.findall(r"^\| .*calculated.*$", PAGE, re.MULTILINE)
    assert len(rows) == len(COMMANDS) == 2
    for row, command in zip(rows, COMMANDS, strict=True):
        told = re.findall(r" ([\d.]+) s \|", row)
        assert told == [f"{stage.seconds:.3g}" for stage in find_stages(config_of(*command))]


def test_a_simulation_takes_the_seconds_that_plan_prints() -> None:
    config = config_of("eight_gpus")
    size = read_size(config)
    assert size is not None
    rates = assume_rates(config, size, "H100", 500.0)
    seconds = {stage.name: stage.seconds for stage in find_stages(config)}
    assert (rates.publish_s, rates.transfer_s, rates.swap_s) == (
        seconds[EXPORT],
        seconds[MAP],
        seconds[LOAD],
    )


def test_the_benchmark_plans_each_size_with_rates_of_others() -> None:
    def seconds(size: int, fleet: int) -> dict[str, float]:
        return {"export_s": 0.01 + size / 1e9, "group_s": 0.02 * fleet + fleet * size / 2e9}

    points = {(size, fleet): seconds(size, fleet) for size in (10**7, 10**8, 4 * 10**8) for fleet in (1, 3)}
    rows = planned.compare(points)
    assert len(rows) == 4 and all(abs(row["deviation"]) < 1e-9 for row in rows)
    points[10**8, 3]["group_s"] *= 2
    (worst,) = (row for row in planned.compare(points) if abs(row["deviation"]) > 1e-9)
    assert worst["deviation"] == pytest.approx(-0.5)
    assert not planned.check({"rows": planned.compare(points)})[0]
