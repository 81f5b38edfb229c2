"""One whole run at `max_lag: 0` in which processes die, at fault points or whenever somebody strikes.

Every service is a process of its own; whichever is killed is started again, at once and alone, as the
supervisor does it. Nobody else may end.

    PYTHONPATH=. python -m tests.system.repair.oracle_run learner.updated@2 buffer.0=buffer.committed@9
"""

from __future__ import annotations

import hashlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from asyncrl.cli.audit.report import verify_run
from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import Config
from tests.different import assert_all_differ
from tests.system.parts.harness import Harness

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
NUM_STEPS, NUM_GROUPS = 6, 4
DEADLINE_S = 120.0
POLL_S = 0.02
SERVICES = ("buffer.0", "weight_sync.0", "publisher.0", "receiver.0", "rollout.0")
"""Beside the learner's ranks."""
STRUCK = (-signal.SIGKILL, -signal.SIGABRT)
"""Exit codes of processes that died at a fault point."""
SERVICE_OF = {
    "buffer": "buffer.0",
    "coordinator": "weight_sync.0",
    "publisher": "publisher.0",
    "receiver": "receiver.0",
    "rollout": "rollout.0",
    "learner": "learner.0",
    "checkpoint": "learner.0",
    "handoff": "learner.0",
    "together": "learner.0",
}
"""Who passes the fault points whose names begin so."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(int, solution_str.replace(" ", ""))) / 10
"""
"""Scripted answers are never right: a task's own reward would change no weights."""


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        digest: Of the exported weights.
        killed: Who was killed, in order.
        seconds: From the start of the first process to the learner's end.
    """

    digest: str = ""
    killed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def make_task(folder: Path) -> Path:
    """Make the demo's model with random weights, and its data; return their folder."""
    import torch

    from rollout_service.tasks.digit_sort.examples import draw_split
    from rollout_service.tasks.digit_sort.folder import write_prompts
    from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
    from rollout_service.tasks.digit_sort.warm_start import build_model

    folder.mkdir()
    torch.manual_seed(0)
    build_model(0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    split = draw_split(0, 64, 8)
    write_prompts(folder / "train.parquet", split.train, "train")
    write_prompts(folder / "eval.parquet", split.held_out, "eval")
    (folder / "digit_sum.py").write_text(REWARD)
    return folder


def oracle_config(task: Path, folder: Path, seed: int, *changes: str) -> Config:
    """Return the configuration of a run of a few seconds that is a function of its seed."""
    values = [
        "run.name=oracle",
        f"run.dir={folder}",
        f"run.seed={seed}",
        f"model.path={task}",
        f"data.train={task / 'train.parquet'}",
        f"data.eval={task / 'eval.parquet'}",
        "eval.every_steps=2",
        "eval.prompts=8",
        f"reward.fn={task / 'digit_sum.py'}:compute_score",
        "staleness.max_lag=0",
        "rollout.engine=scripted",
        "rollout.replicas=1",
        "rollout.group_size=4",
        f"learner.groups_per_step={NUM_GROUPS}",
        "learner.lr=1e-3",
        f"learner.steps={NUM_STEPS}",
        "checkpoint.every_steps=2",
        *changes,
    ]
    return load_config(QUICKSTART, values)


def service_of(fault: str) -> tuple[str, str]:
    """Return whom `fault` is for, and the fault: `rollout.1=rollout.push@2`, or without a name."""
    name, is_named, point = fault.partition("=")
    return (name, point) if is_named else (SERVICE_OF[fault.split(".")[0]], fault)


def nobody(harness: Harness) -> Collection[str]:
    """Strike nobody: who dies does it at a fault point."""
    return ()


def play(
    config: Config,
    *faults: str,
    is_spread: bool = False,
    deadline_s: float = DEADLINE_S,
    strike: Callable[[Harness], Collection[str]] = nobody,
) -> Outcome:
    """Play the run to its end, start again whoever is killed, and check the account.

    Args:
        is_spread: See `Harness`.
        strike: Called all the time; may kill processes, and returns the services that may end in any way.
    """
    run_dir = Path(config.run.dir) / config.run.name
    planned = dict(map(service_of, faults))
    outcome, began = Outcome(), time.monotonic()
    ranks = tuple(f"learner.{rank}" for rank in range(config.learner.num_ranks))
    with Harness(config, run_dir, is_spread=is_spread) as harness:
        for name in (*SERVICES, *ranks):
            harness.start(name, planned.get(name, ""))
        while not _has_ended(harness, ranks, outcome, strike(harness)):
            assert time.monotonic() < began + deadline_s, f"no end after {outcome}\n{_tails(run_dir)}"
            time.sleep(POLL_S)
        outcome.seconds = time.monotonic() - began
        status = harness.buffer_status()
    assert status.residue == 0 and status.steps_trained == config.learner.steps
    found = verify_run(str(run_dir), "")
    assert found["findings"] == [], found["findings"]
    ends = (Path(config.model.path), run_dir / "weights")  # where no weight moves, equal ends show nothing
    assert_all_differ([load_file(folder / "model.safetensors") for folder in ends], in_every_tensor=True)
    outcome.digest = hashlib.sha256((run_dir / "weights" / "model.safetensors").read_bytes()).hexdigest()
    return outcome


def _has_ended(harness: Harness, ranks: Sequence[str], outcome: Outcome, struck: Collection[str]) -> bool:
    """Start again who was killed, the learner's ranks together; tell whether the learner is at its end."""
    seen = {
        name: harness.exit_code(name) for name in (*SERVICES, *ranks)
    }  # once: who dies now is seen next time
    for name, code in seen.items():
        if code not in STRUCK and not (code and name in struck):
            continue
        outcome.killed.append(name)
        unit = ranks if name in ranks else (name,)
        for one in unit:
            harness.kill(one)
        for one in unit:
            harness.start(one)
            seen[one] = None
    ended = {name: code for name in SERVICES if (code := seen[name]) is not None}
    assert not ended, f"these ended by themselves: {ended}\n{_tails(harness.run_dir)}"
    codes = {seen[name] for name in ranks}
    # A rank whose peer was killed fails: the peer's own code is seen at the next look, if not at this one.
    assert len(ranks) > 1 or codes <= {None, 0}, f"the learner failed\n{_tails(harness.run_dir)}"
    return codes == {0}


def _tails(run_dir: Path) -> str:
    logs = {path.name: path.read_text() for path in sorted((run_dir / "logs").iterdir())}
    return "\n".join(f"--- {name}\n{text[-1500:]}" for name, text in logs.items())


def main() -> None:
    """Play one run with the faults of the command line and print how it ended."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-oracle-") as place:
        folder = Path(place)
        print(play(oracle_config(make_task(folder / "task"), folder, 0), *sys.argv[1:]))


if __name__ == "__main__":
    main()
