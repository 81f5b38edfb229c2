"""The cases of the pipeline benchmark, and how one of them is run.

Owns the work, which is the same in all cases of an engine: model, prompts, rows of a batch, mean length.
Two settings: `scripted`, in which engine and model sleep at stated rates, and `real`, vLLM and
Megatron-core.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.core.config.lengths import Lengths
from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.metrics.row_log import read_rows
from asyncrl.core.service_command import Tighten
from asyncrl.core.status.replica import ReplicaStatus
from asyncrl.core.status.service import BufferStatus
from benchmarks.pipeline.bounded import Work
from benchmarks.pipeline.crew import LAUNCHER, Crew, placements_of
from benchmarks.pipeline.sleepers import Pace
from benchmarks.pipeline.window import Sample, Window, read_window
from configs import shipped

COLOCATED = "colocated"
SLEEPERS = {
    "rollout": "benchmarks.pipeline.sleepers:build_replica",
    "learner": "benchmarks.pipeline.sleepers:build_learner",
}
POLL_S = 0.1
FIRST_ROW_S, NEXT_ROW_S = 150.0, 60.0
"""Until the first step is done, and from step to step."""
NUM_PROMPTS = 2048
FOREVER = 1_000_000


@dataclass(frozen=True)
class Setting:
    """Engine of a case, and its amount of work.

    Attributes:
        mean_tokens: Of a response, whatever the skew (before it is cut at `max_tokens`).
        pace: Of engine and model that sleep; None for the real ones.
    """

    engine: str
    groups_per_step: int
    group_size: int
    mean_tokens: float
    max_tokens: int
    pace: Pace | None = None

    @property
    def rows(self) -> int:
        """Trajectories of a batch, and slots of the engine."""
        return self.groups_per_step * self.group_size

    def lengths(self, sigma: float) -> Lengths:
        """Return the log-normal distribution of that skew and the setting's mean."""
        return Lengths(sigma, round(self.mean_tokens * math.exp(-(sigma**2) / 2), 2))

    def work(self, sigma: float) -> Work | None:
        """Return what sleeps for how long; None where nothing sleeps."""
        if self.pace is None:
            return None
        return Work(
            self.lengths(sigma),
            self.max_tokens,
            self.groups_per_step,
            self.group_size,
            slots=self.rows,
            tokens_per_s=self.pace.tokens_per_s,
            train_s_per_token=self.pace.train_s_per_token,
        )


SCRIPTED = Setting("scripted", 8, 4, 40.0, 320, Pace(tokens_per_s=100.0, train_s_per_token=0.8 / 100.0 / 32))
"""A full engine generates a batch in 0.4 s, and the learner trains it in 0.8 of that."""
REAL = Setting("real", 16, 4, 40.0, 320)
SETTINGS = {setting.engine: setting for setting in (SCRIPTED, REAL)}


@dataclass(frozen=True)
class Case:
    """One way of doing the work.

    Attributes:
        way: `colocated` or the `max_lag` of a disaggregated run; 0 is synchronous.
        streams: `learner.stream`.
    """

    engine: str
    sigma: float
    way: str
    streams: bool = False

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.engine]

    @property
    def max_lag(self) -> int:
        return 0 if self.way == COLOCATED else int(self.way)

    @property
    def name(self) -> str:
        """Of the case's run."""
        return f"{self.engine}-{self.sigma:g}-{self.way}{'-stream' if self.streams else ''}"

    @property
    def num_settling(self) -> int:
        """Steps until the run is in its stride."""
        return 2 if self.max_lag == 0 else 4 + self.max_lag


def make_task(folder: Path) -> Path:
    """Write a digit model with random weights, its tokenizer and prompts; return the folder.

    Lengths are forced, and a step takes as long whatever the weights are. The last digit of a response is to
    be a 4, which random answers do now and then: advantages are not all 0, and the weights move.
    """
    from rollout_service.tasks.digit_sort.examples import draw_split
    from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer, prompt_text
    from rollout_service.tasks.digit_sort.warm_start import build_model
    from rollout_service.tasks.recipes import write_rows

    folder.mkdir()
    build_model(0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    prompts = (prompt_text(digits) for digits in draw_split(0, NUM_PROMPTS, 1).train)
    write_rows(folder / "train.parquet", "pipeline", "train", ((prompt, "4") for prompt in prompts))
    return folder


def make_config(case: Case, task: Path, folder: Path) -> Config:
    """Return the configuration of a case's run in `folder`."""
    setting = case.setting
    lengths = setting.lengths(case.sigma)
    ranks = 2 if _has_two_ranks(case) else 1
    values = {
        "run.name": "run",
        "run.dir": folder,
        "model.path": task,
        "data.train": task / "train.parquet",
        "data.eval": "null",
        "eval.every_steps": 0,
        "reward.fn": "gsm8k_flexible",
        "rollout.engine": "scripted" if setting.pace else "vllm",
        "rollout.replicas": ranks,
        "rollout.group_size": setting.group_size,
        "rollout.max_sequences": setting.rows // ranks,  # of each replica: together they take one batch
        "rollout.max_tokens": setting.max_tokens,
        "rollout.response_tokens": f"lognormal:{lengths.sigma}:{lengths.median_tokens}",
        "rollout.prefix_caching": "false",  # the same in every case: auto is off at max_lag 0
        "staleness.max_lag": case.max_lag,
        "learner.steps": FOREVER,
        "learner.groups_per_step": setting.groups_per_step,
        "learner.dp": ranks,
        "learner.minibatches": 1,  # as `learner.stream` wants it
        "checkpoint.every_steps": FOREVER,
        "buffer.journal": "none",
    }
    if case.streams:
        values["learner.stream"] = "true"
    return load_config(shipped()["quickstart"], [f"{key}={value}" for key, value in values.items()])


def _has_two_ranks(case: Case) -> bool:
    """With sides that take turns, each has a process on both cores; one that sleeps is twice as fast."""
    return case.way == COLOCATED and case.setting.pace is None


def run_case(
    case: Case, task: Path, folder: Path, turns: Sequence[tuple[int, int]], say: Callable[[str], None]
) -> list[Window]:
    """Run a case and return the figures of its turns.

    Args:
        turns: (max_lag, steps) one after the other, each at most the case's own bound; the bound is moved in
            the live run, and the steps right after are left out.

    Raises:
        ServiceFailed: A service ended, or makes no steps.
    """
    config = make_config(case, task, folder)
    began_s = time.monotonic()
    with Crew(config, folder / "run") as crew:
        watch = Watch(crew, start_services(crew, case))
        watch.follow(1)
        started_s = time.monotonic() - began_s
        say(f"{case.engine}, sigma {case.sigma:g}, {case.way}: first step after {started_s:.1f} s")
        windows = []
        for max_lag, num_steps in turns:
            crew.command("buffer.0", Tighten(max_lag=max_lag))
            first = len(watch.rows) + case.num_settling
            watch.follow(first + num_steps)
            windows.append(read_window(watch.rows[: first + num_steps], watch.samples, first))
    return windows


def start_services(crew: Crew, case: Case) -> list[str]:
    """Start all services; return the names of the replicas."""
    is_colocated = case.way == COLOCATED
    indices = range(2 if _has_two_ranks(case) else 1)
    replicas = [f"rollout.{index}" for index in indices]
    learners = [f"learner.{index}" for index in indices]
    receivers = [f"receiver.{index}" for index in indices]
    pace = case.setting.pace
    if pace is not None:
        factor = 2 if is_colocated else 1
        Pace(pace.tokens_per_s * factor, pace.train_s_per_token / factor).write(crew.run_dir)
    # The replica first: it takes the longest.
    names = [*replicas, *LAUNCHER, *receivers, *learners]
    placements = placements_of(names, SLEEPERS if pace else {}, shares_cores=is_colocated)
    for name in names:
        crew.start(name, placements[name])
    return replicas


class Watch:
    """Reads a run's rows as they come, and notes what its replicas say meanwhile."""

    def __init__(self, crew: Crew, replicas: Sequence[str]) -> None:
        self._crew = crew
        self._replicas = replicas
        self.rows: list[dict[str, Any]] = []
        self.samples: list[Sample] = []

    def follow(self, num_rows: int) -> None:
        """Return when there are so many rows, and a sample from after the last one.

        Raises:
            ServiceFailed: A service ended, or no row came in time.
        """
        end_s = time.monotonic() + FIRST_ROW_S
        while len(self.rows) < num_rows or self.samples[-1].time_s <= self.rows[-1]["time"]:
            time.sleep(POLL_S)
            self._crew.check()
            if len(found := read_rows(self._crew.run_dir)) > len(self.rows):
                end_s = time.monotonic() + NEXT_ROW_S
            self.rows = found
            if found:  # before, the replicas may still be starting
                self.samples.append(self._take_sample())
            if time.monotonic() > end_s:
                raise ServiceFailed(f"no step in time\n{self._crew.tail('learner.0')}")

    def _take_sample(self) -> Sample:
        engines = {}
        for name in self._replicas:
            status = self._crew.status(name)
            assert isinstance(status, ReplicaStatus) and status.engine is not None, status
            engines[name] = status.engine
        buffer = self._crew.status("buffer.0")
        assert isinstance(buffer, BufferStatus), buffer
        return Sample(time.time(), engines, sum(buffer.dropped.values()))
