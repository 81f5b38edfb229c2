"""The oracle with the real parts: vLLM on CPU, Megatron-core, weights over gloo.

At `max_lag: 0`, without prefix cache and with a seed per sample, a run in which processes are killed ends
with the weights of one in which nobody is, bit for bit. Which requests share a batch changes no bit of the
demo's model (hidden size 64; 256 too), so batches may be of any size and order. From 512 on a request alone
differs from one in company, by 1e-6 per log-prob: there it takes `rollout.max_sequences: 1`.

    pytest -m long -s tests/system/repair/test_vllm_oracle.py
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from asyncrl.core.config.tree import Config
from rollout_service.tasks.digit_sort.warm_start import build_model
from tests.system.parts.harness import Harness
from tests.system.repair.oracle_run import SERVICES, Outcome, make_task, oracle_config, play, service_of

pytestmark = pytest.mark.long

DEADLINE_S = 500.0
"""Of a run with some starts of an engine, on a machine that does other work too."""
SETS = ("rollout.engine=vllm", "rollout.max_tokens=24")
FAULTS = (
    "rollout.sampled@9",
    "rollout.push@2.10",
    "learner.updated@3",
    "buffer.committed@20",
    "receiver.map@4",
    "receiver.bucket@4",
)
"""The first sample of a group that ends has ended; half of a step's groups are there; between update and
publish; a batch of events is durable and not answered; a version is to be mapped; half of it is checked."""
SPREAD_FAULTS = ("publisher.bucket@3", "receiver.bucket@4")
"""Where versions are sent: half of one is sent; half of one is received."""
MEAN_S = 0.5
"""Between two strikes while an engine is up; the test counts how many there were."""
CORE = "engine core"
VICTIMS = (*SERVICES, "learner.0", CORE)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(int(letter) for letter in solution_str if letter.isdigit()) / 10
"""
"""A random model's answers are never right, and not all of them are digits."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("oracle") / "task")
    (folder / "digit_sum.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def larger_task(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task with a model of which a request alone in its batch gets other bits than one in company."""
    folder = tmp_path_factory.mktemp("larger") / "task"
    shutil.copytree(task, folder)
    config = build_model(0).config
    config.hidden_size, config.intermediate_size = 512, 1536
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def vllm_config(task: Path, folder: Path, *changes: str) -> Config:
    return oracle_config(task, folder, 0, *SETS, *changes)


def play_plain(task: Path, folder: Path, *changes: str) -> Outcome:
    """Play a run in which nobody dies."""
    outcome = play(vllm_config(task, folder, *changes), deadline_s=DEADLINE_S)
    print(f"undisturbed {changes}: {outcome.seconds:.1f} s")
    assert outcome.killed == []
    return outcome


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run in which nobody dies."""
    return play_plain(task, tmp_path_factory.mktemp("undisturbed")).digest


def test_which_requests_share_a_batch_changes_no_bit(task: Path, undisturbed: str, tmp_path: Path) -> None:
    """Batches of at most 3 requests against batches of all 16 of a step."""
    assert play_plain(task, tmp_path, "rollout.max_sequences=3").digest == undisturbed


@pytest.mark.parametrize(
    ("fault", "is_spread"), [(one, False) for one in FAULTS] + [(one, True) for one in SPREAD_FAULTS]
)
def test_with_vllm_a_run_with_a_kill_ends_with_the_weights_of_the_run_without(
    fault: str, is_spread: bool, task: Path, undisturbed: str, tmp_path: Path
) -> None:
    outcome = play(vllm_config(task, tmp_path), fault, is_spread=is_spread, deadline_s=DEADLINE_S)
    print(f"{fault}: {outcome.seconds:.1f} s")
    assert outcome.killed == [service_of(fault)[0]], "the fault was never reached"
    assert outcome.digest == undisturbed


def test_where_bits_depend_on_the_batch_batches_of_one_keep_them(larger_task: Path, tmp_path: Path) -> None:
    alone = "rollout.max_sequences=1"
    plain = play_plain(larger_task, tmp_path / "plain", alone)
    config = vllm_config(larger_task, tmp_path / "killed", alone)
    outcome = play(config, "rollout.push@2.10", deadline_s=DEADLINE_S)
    assert outcome.killed == ["rollout.0"]
    assert outcome.digest == plain.digest


class Lightning:
    """Kills each process of a run once, in a random order, at random moments at which an engine is up."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)
        self._strikes_at = 0.0
        self._left = self._source.sample(VICTIMS, len(VICTIMS))
        self.struck = Counter[str]()

    def strike(self, harness: Harness) -> Collection[str]:
        """Kill a process if its time has come; return the services that may end because of it."""
        has_engine = self._num_engines(harness) > self.struck["rollout.0"] + self.struck[CORE]
        if self._left and has_engine:
            self._strikes_at = self._strikes_at or time.monotonic() + self._source.expovariate(1 / MEAN_S)
            if time.monotonic() >= self._strikes_at:
                self._kill(harness)
        return ("rollout.0",) if self.struck[CORE] else ()

    def _kill(self, harness: Harness) -> None:
        victim = self._left[-1]
        service = "rollout.0" if victim == CORE else victim
        own, *others = harness.processes_of(service)
        if victim == CORE and not others:
            return  # its replica is dead or has just begun: at the next look, then
        self._strikes_at = 0.0
        if harness.exit_code(service) is None:
            os.kill(max(others, key=_size) if victim == CORE else own, signal.SIGKILL)
            self.struck[self._left.pop()] += 1

    @staticmethod
    def _num_engines(harness: Harness) -> int:
        """Return how many engines have come into service so far."""
        log = harness.run_dir / "logs" / "rollout.0.log"
        return log.read_text().count("SYNCING -> READY") if log.exists() else 0


def _size(pid: int) -> int:
    """Return the pages that a process has in memory, 0 if it ended meanwhile."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0


def test_with_vllm_kills_at_random_moments_change_no_bit(task: Path, tmp_path: Path) -> None:
    lightning = Lightning(0)
    longer = "learner.steps=24"
    plain = play_plain(task, tmp_path / "plain", longer)
    config = vllm_config(task, tmp_path / "killed", longer)
    outcome = play(config, deadline_s=DEADLINE_S, strike=lightning.strike)
    print(f"killed {dict(lightning.struck)}: {outcome.seconds:.1f} s")
    assert lightning.struck.total() >= len(VICTIMS) / 2
    assert outcome.digest == plain.digest
