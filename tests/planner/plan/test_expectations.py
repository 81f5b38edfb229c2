"""Heads of the presets for GPUs: the figures that they state are those of `plan`, for each model and data."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

import pytest

from asyncrl.cli.reports.prediction import DEFAULT_GPU, STEPS, check_rooms, read_rates
from asyncrl.cli.up import find_config
from asyncrl.core.config.load import Loaded, load
from asyncrl.planner.hardware import GPUS
from asyncrl.planner.plan.footprint.memory import LEARNER_GPU, ROLLOUT_GPU
from asyncrl.planner.sweep import settle
from configs import overlays, shipped
from tests.cli.commands.calling import asyncrl

GB = 10**9
PRESETS = ("one_gpu", "two_gpus", "eight_gpus", "two_nodes")
TOLERANCE = 0.03
"""Of the simulation's figures, which move a little with each change of a rule that it drives."""
LINE = re.compile(
    r"^#   (?P<words>\w[\w ]*(?: --set \S+)*):\s+(?:#\s+)?step (?P<step>\S+) s, (?P<speed>\d+) tokens/s, "
    r"learner (?P<learner>\S+) of (?P<of>\S+) GB, engine (?P<engine>\S+) of (?P<of_engine>\S+) GB$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Expectation:
    """A command's words, and what the preset's head says of them."""

    words: str
    step_s: float
    tokens_per_s: float
    learner: tuple[str, str]
    engine: tuple[str, str]

    def load(self) -> Loaded:
        names, *sets = self.words.split(" --set ")
        return load([find_config(name) for name in names.split()], [shlex.split(one)[0] for one in sets])


def read(name: str) -> list[Expectation]:
    return [
        Expectation(
            found["words"],
            float(found["step"]),
            float(found["speed"]),
            (found["learner"], found["of"]),
            (found["engine"], found["of_engine"]),
        )
        for found in LINE.finditer(shipped()[name].read_text())
    ]


EXPECTATIONS = [one for name in PRESETS for one in read(name)]
by_words = pytest.mark.parametrize("expected", EXPECTATIONS, ids=lambda one: one.words)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_for_gpus_says_what_it_expects_with_each_data_and_that_nothing_of_it_was_measured(
    name: str,
) -> None:
    words = [one.words for one in read(name)]
    assert words[0] == name and any(one.startswith(f"{name} dapo_17k") for one in words)
    text = shipped()[name].read_text()
    assert "nothing of it measured" in text and len(words) == text.count(" tokens/s, learner ")


def test_the_presets_for_gpus_cover_four_models_each_with_both_data_sets() -> None:
    covered = {(one.load().config.model.path, "dapo_17k" in one.words) for one in EXPECTATIONS}
    models = [f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B")]
    assert covered == {(model, is_dapo) for model in models for is_dapo in (False, True)}


@by_words
def test_the_memory_that_a_preset_expects_is_what_plan_counts_and_there_is_room(
    expected: Expectation,
) -> None:
    rooms = {room.where: room for room in check_rooms(expected.load(), GPUS[DEFAULT_GPU].num_bytes)}
    for where, said in ((LEARNER_GPU, expected.learner), (ROLLOUT_GPU, expected.engine)):
        room = rooms[where]
        assert said == (f"{room.taken_bytes / GB:.3g}", f"{room.limit_bytes / GB:.3g}")
        assert room.taken_bytes < room.limit_bytes, "activations too"
    tokens, config = rooms[ROLLOUT_GPU].cache_tokens, expected.load().config
    assert tokens is not None
    assert tokens > 8 * (config.data.max_prompt_tokens + config.rollout.max_tokens), "for several rows"


@pytest.mark.long
@by_words
def test_the_speed_that_a_preset_expects_is_what_plan_simulates(expected: Expectation) -> None:
    config = expected.load().config
    rates, setting = read_rates(None, config)
    found = settle(setting, rates, config.run.seed, STEPS)
    assert found.step_s == pytest.approx(expected.step_s, rel=TOLERANCE)
    assert found.trained_per_s == pytest.approx(expected.tokens_per_s, rel=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("name", PRESETS)
def test_the_command_prints_what_the_head_says(name: str) -> None:
    done = asyncrl("plan", name, "--elsewhere", "--simulate", "--json")
    assert done.code == 0, done.err
    values, expected = json.loads(done.out), read(name)[0]
    assert values["prediction"]["step_s"] == pytest.approx(expected.step_s, rel=TOLERANCE)
    assert [room["where"] for room in values["memory"]] == [LEARNER_GPU, ROLLOUT_GPU]


def test_what_does_not_fit_the_assumed_gpu_is_refused_before_it_is_simulated() -> None:
    done = asyncrl("plan", "eight_gpus", "--elsewhere", "--simulate", "--set", "learner.tp=1")
    assert (done.code, done.out) == (2, "")
    assert "learner.gpus: the run takes 98.3 GB of each GPU of the learner, which has 80" in done.err
    assert "eight_gpus.yaml:" in done.err, "with its place"


def test_an_overlay_is_laid_over_a_preset_by_its_name() -> None:
    assert list(overlays()) == ["dapo_17k"] and not overlays().keys() & shipped().keys()
    config = load([find_config("eight_gpus"), find_config("dapo_17k")], []).config
    assert [part.fn for part in config.reward.fn] == ["math_dapo"] and config.rollout.gpus == 1
