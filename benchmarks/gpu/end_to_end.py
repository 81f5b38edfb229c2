"""A whole run on one GPU, which vLLM and the learner share as `configs/one_gpu.yaml` is shipped.

Run: `python -m benchmarks.gpu.end_to_end --json FILE`. A Qwen3 of 0.46 B random weights, made-up prompts,
log-normal lengths (sigma 0.5, median 192); synchronous (`max_lag` 0) and at `max_lag` 2, a run each. The
steps after the third are counted. `--quick` does the same with a tiny model and without a GPU, and its
figures say nothing. Needs vLLM. Not run on a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import Config
from benchmarks.fleet.parts.whole_run import run_to_end
from benchmarks.gpu.frame import make_part_parser, run_part
from benchmarks.harness.options import Verdict, end_on_sigterm, judge
from benchmarks.harness.rows import Row
from benchmarks.learner.inputs import save_qwen3
from benchmarks.rollout.ways.setting import build_tokenizer, make_prompt
from configs import shipped

WARM_UP_STEPS = 3
MAX_LAGS = (0, 2)
TARGET_SPEED_UP = 1.3
NAMES = {
    "timing_s/step": "step_s",
    "perf/throughput": "learner_tokens_per_s",
    "perf/learner_idle_share": "learner_idle_share",
    "staleness/masked_share": "masked_share",
    "staleness/lag_mean": "lag_mean",
    "weights/transfer_s": "transfer_s",
    "weights/publish_s": "publish_s",
}
"""Metrics of a step that become values of a row."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model, the work, and which devices there are."""

    model: Mapping[str, Any]
    response_tokens: str
    max_tokens: int
    groups_per_step: int
    num_steps: int
    gpus: float
    learner_cpus: float


GPU = Sizes(
    model={"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 16384}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    response_tokens="lognormal:0.5:192",
    max_tokens=512,
    groups_per_step=8,
    num_steps=15,
    gpus=0.5,
    learner_cpus=max(1, min(8, len(os.sched_getaffinity(0)) - 4)),
)
TINY = Sizes(
    model={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    response_tokens="lognormal:0.5:8",
    max_tokens=32,
    groups_per_step=2,
    num_steps=6,
    gpus=0,
    learner_cpus=0.5,
)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    given = make_part_parser("end_to_end", __doc__).parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here", file=sys.stderr)
        return 1
    end_on_sigterm()  # the run must not outlive this
    return run_part(given, lambda: measure(TINY if given.quick else GPU), check)


def measure(sizes: Sizes) -> list[Row]:
    """Do the runs and return a row of each.

    Raises:
        ServiceFailed: A run failed, or did not end.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = make_task(Path(name), sizes)
        return [
            make_row(max_lag, run_once(make_config(folder, sizes, max_lag)), is_quick=sizes is TINY)
            for max_lag in MAX_LAGS
        ]


def make_task(folder: Path, sizes: Sizes) -> Path:
    """Write the model, its tokenizer and prompts, and return the folder."""
    save_qwen3(folder, dtype=torch.float32, tie_word_embeddings=True, **sizes.model)
    build_tokenizer(sizes.model["vocab_size"]).save_pretrained(folder)
    prompts = [{"prompt": make_prompt(number, 32), "ground_truth": str(number)} for number in range(512)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def make_config(folder: Path, sizes: Sizes, max_lag: int) -> Config:
    """Return the shipped configuration with the made-up task."""
    values = {
        "run.name": f"one_gpu_{max_lag}",
        "run.dir": folder / "runs",
        "model.path": folder,
        "model.dtype": "bfloat16" if sizes.gpus else "float32",
        "data.train": folder / "prompts.jsonl",
        "data.max_prompt_tokens": 64,
        "reward.fn": "gsm8k",
        "rollout.gpus": sizes.gpus,
        "rollout.max_tokens": sizes.max_tokens,
        "rollout.response_tokens": sizes.response_tokens,
        "rollout.prefix_caching": "false",  # the same in both: auto is off at max_lag 0
        "staleness.max_lag": max_lag,
        "algorithm.drop_constant_groups": "false",
        "learner.gpus": sizes.gpus,
        "learner.cpus": sizes.learner_cpus,
        "learner.groups_per_step": sizes.groups_per_step,
        "learner.steps": sizes.num_steps,
        "checkpoint.every_steps": 1000,
        "buffer.journal": "none",
    }
    return load_config(shipped()["one_gpu"], [f"{key}={value}" for key, value in values.items()])


def run_once(config: Config) -> list[dict[str, Any]]:
    """Do one run and return the metrics of its steps."""
    folder = run_to_end(config, lambda sentence: print(sentence, file=sys.stderr, flush=True))
    lines = folder.metrics.read_text().splitlines()
    return [row for line in lines if "timing_s/step" in (row := json.loads(line))]


def make_row(max_lag: int, steps: Sequence[Mapping[str, Any]], *, is_quick: bool) -> Row:
    """Return the row of one run: medians over the steps after those that warm up.

    `trained_tokens_per_s` is of all these steps together: what was masked for its age is not counted.
    """
    kept = steps[WARM_UP_STEPS:]
    samples: dict[str, float | list[float]] = {
        value: [float(step[name]) for step in kept if name in step]
        for name, value in NAMES.items()
        if any(name in step for step in kept)
    }
    trained = sum(float(step["staleness/trained_tokens"]) for step in kept)
    samples["trained_tokens_per_s"] = trained / sum(float(step["timing_s/step"]) for step in kept)
    return Row.of("gpu.end_to_end", {"max_lag": max_lag, "quick": int(is_quick)}, samples)


def check(rows: Sequence[Row]) -> Verdict:
    """Judge what asynchrony buys: trained tokens per second over those of the synchronous run."""
    speeds = {row.case["max_lag"]: row.values["trained_tokens_per_s"] for row in rows}
    speed_up = speeds[MAX_LAGS[-1]] / speeds[MAX_LAGS[0]]
    return judge({f"speed-up {speed_up:.2f}, target {TARGET_SPEED_UP}": speed_up / TARGET_SPEED_UP})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
