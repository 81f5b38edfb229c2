"""kill -9 of every party at every named point, over both journals: nothing acknowledged is lost."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.buffer.killed.killed_trial import POINTS, POINTS_OF_KIND, ForkServer, Plan, Trial

NUM_TRIALS = 110
"""For each journal."""


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    started = ForkServer()
    yield started
    started.close()


def run(forks: ForkServer, kind: str, folder: Path, plan: Plan, name: str) -> list[str]:
    """Run a trial; return who was killed."""
    report = Trial(forks, kind, folder, plan).run()
    log = folder / "log"
    text = log.read_text()[-3000:] if log.exists() else ""
    assert not report.problems, f"{name}: {report.problems}; killed {report.killed}\n{text}"
    assert report.num_acknowledged >= 2
    shutil.rmtree(folder)
    return report.killed


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_a_buffer_killed_amid_a_record_and_after_a_commit_loses_nothing(
    forks: ForkServer, kind: str, tmp_path: Path
) -> None:
    faults = {"buffer": ["buffer.appending@3", "buffer.committed@6"], "producer": [], "consumer": []}
    killed = run(forks, kind, tmp_path / "trial", Plan(faults, [], "everysec"), kind)
    assert killed == ["buffer.appending@3", "buffer.committed@6"]


def test_redis_producer_and_consumer_killed_lose_nothing(forks: ForkServer, tmp_path: Path) -> None:
    faults = {"buffer": [], "producer": ["producer.pushed@2"], "consumer": ["consumer.trained@2"]}
    plan = Plan(faults, [1, 5], "everysec")
    killed = run(forks, "redis", tmp_path / "trial", plan, "redis")
    assert Counter(killed) == {"redis": 2, "producer.pushed@2": 1, "consumer.trained@2": 1}


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", ["file", "redis"])
def test_kills_at_every_named_point_lose_nothing(forks: ForkServer, kind: str, tmp_path: Path) -> None:
    killed: Counter[str] = Counter()
    for seed in range(NUM_TRIALS):
        plan = Plan.draw(kind, random.Random(f"{kind} {seed}"))
        name = f"{kind}, seed {seed}, {plan}"
        killed.update(point.split("@")[0] for point in run(forks, kind, tmp_path / "trial", plan, name))
    print(f"{kind}: {NUM_TRIALS} trials, {killed.total()} kills: {dict(killed)}")
    points = {name for party in POINTS.values() for name, _ in party}
    points |= {name for name, _ in POINTS_OF_KIND[kind]} | ({"redis"} if kind == "redis" else set())
    assert set(killed) == points, f"never killed at {points - set(killed)}"
