"""Bits of log-probs: of vLLM alone and beside others, of the learner packed and by rows, and across.

    python -m research.engines.exactness [--quick] [--json FILE] [--check]

Sixteen prompts, 48 sampled tokens each, by random Qwen3 of two widths, on a CPU. A row: how many log-probs
of one side equal those of another to the bit, and the largest difference. `padded` is
`VLLM_BATCH_INVARIANT=1`: single rows go as two. Targets: with it the engine is equal to the bit in every
batch; every side repeats itself; learner and engine agree to 1e-4 in float32.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np
import torch

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.staleness import Span
from benchmarks.harness.options import Verdict, judge, make_parser, report
from learner.backend import LearnerBackend, Placement
from learner.batching.batch import PackedBatch, build_batch
from learner.fsdp2.backend import Fsdp2Backend
from learner.megatron.backend import MegatronBackend
from research.engines.engine_process import Answer, EngineProcess, Kind, Request
from research.engines.models import WIDTHS, make_prompts, save

NUM_PROMPTS, NUM_TOKENS, NUM_LAYERS = 16, 48, 3
BESIDE = (0, 1, 5, 16, 47)
"""Requests in the same batch, besides the sixteen."""
DTYPES = ("float32", "bfloat16")
BACKENDS: Mapping[str, Callable[..., LearnerBackend]] = {"megatron": MegatronBackend, "fsdp2": Fsdp2Backend}
TOLERANCE = 1e-4
Logprobs = list[torch.Tensor]
"""Of each answer, float32."""


class Account:
    """The rows of the study."""

    def __init__(self, width: str, dtype: str) -> None:
        self._case, self.rows = {"width": width, "dtype": dtype}, list[dict[str, Any]]()

    def add(self, side: str, other: str, ours: Logprobs, theirs: Logprobs) -> None:
        """Compare two sides, answer by answer, as far as their tokens are the same."""
        pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(ours, theirs, strict=True)]
        a_N, b_N = (torch.cat(one) for one in zip(*pairs, strict=True))
        found = {"equal": int((a_N == b_N).sum()), "of": len(a_N), "largest": float((a_N - b_N).abs().max())}
        self.rows.append({**self._case, "side": side, "other": other, **found})


def measure(is_quick: bool) -> dict[str, Any]:
    """Return a row per pair of sides, and what padding costs a request that is alone."""
    rows: list[dict[str, Any]] = []
    costs = {}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        for width in ("narrow",) if is_quick else WIDTHS:
            model = save(Path(scratch) / width, width, NUM_LAYERS)
            for dtype in DTYPES[:1] if is_quick else DTYPES:
                account = Account(width, dtype)
                answers, cost = _measure_engines(account, model, dtype)
                _measure_learners(account, model, dtype, answers)
                rows += account.rows
                costs[f"{width} {dtype}"] = cost
    return {"rows": rows, "padding": costs}


def _measure_engines(account: Account, model: Path, dtype: str) -> tuple[list[Answer], float]:
    """Return the answers of the plain engine, each alone, and the padded one's time over its."""
    engines = {
        name: EngineProcess(Kind(model, dtype, pads_single_rows=name == "padded"))
        for name in ("engine", "padded")
    }
    try:
        alone, spent = {}, {}
        for name, engine in engines.items():
            alone[name], spent[name] = _sample_alone(engine)
            again, more = _sample_alone(engine)
            account.add(f"{name}, alone", "again", _of(alone[name]), _of(again))
            spent[name] += more
            for number in BESIDE:
                found = _sample_together(engine, number)
                kept = [_same_tokens(a, b) for a, b in zip(alone[name], found, strict=True)]
                pairs = zip(*kept, strict=True)
                ours, theirs = map(list, pairs)
                account.add(f"{name}, alone", f"in a batch of {NUM_PROMPTS + number}", ours, theirs)
        ratios = [a / b for a, b in zip(spent["padded"], spent["engine"], strict=True)]
        return alone["padded"], statistics.median(ratios)
    finally:
        for engine in engines.values():
            engine.close()


def _requests(number: int = NUM_PROMPTS) -> list[Request]:
    prompts = make_prompts(NUM_PROMPTS, seed=0) + make_prompts(number - NUM_PROMPTS, seed=1)
    return [Request(prompt, NUM_TOKENS, seed) for seed, prompt in enumerate(prompts)]


def _sample_alone(engine: EngineProcess) -> tuple[list[Answer], list[float]]:
    found = [engine.sample([request]) for request in _requests()]
    return [answers[0] for answers, _ in found], [seconds for _, seconds in found]


def _sample_together(engine: EngineProcess, number: int) -> list[Answer]:
    return engine.sample(_requests(NUM_PROMPTS + number))[0][:NUM_PROMPTS]


def _of(answers: Iterable[Answer]) -> Logprobs:
    return [torch.tensor(answer.logprobs) for answer in answers]


def _same_tokens(a: Answer, b: Answer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of both up to the first token that differs: other digits may choose another."""
    pairs = zip(a.token_ids, b.token_ids, strict=True)
    number = next((index for index, (x, y) in enumerate(pairs) if x != y), NUM_TOKENS)
    return torch.tensor(a.logprobs[:number]), torch.tensor(b.logprobs[:number])


def _measure_learners(account: Account, model: Path, dtype: str, answers: Sequence[Answer]) -> None:
    by_engine, by_backend = _of(answers), {}
    for name, make in BACKENDS.items():
        section = LearnerSection(backend=name, max_tokens_per_microbatch=4096, shared_prompt="off")
        backend = make(model, section, Placement(), dtype=dtype)
        packed = _learner_logprobs(backend, answers)
        rows = [_learner_logprobs(backend, answers, index)[0] for index in range(len(answers))]
        account.add(f"{name}, packed", "again", packed, _learner_logprobs(backend, answers))
        account.add(f"{name}, packed", "row by row", packed, rows)
        account.add(f"{name}, packed", "engine, padded", packed, by_engine)
        by_backend[name] = packed
        backend.close()
    account.add("megatron, packed", "fsdp2, packed", *by_backend.values())


def _learner_logprobs(
    backend: LearnerBackend, answers: Sequence[Answer], only: int | None = None
) -> Logprobs:
    """Return the learner's log-probs of the answers, or of one of them alone in its batch."""
    chosen = range(len(answers)) if only is None else [only]
    batch = _batch_of([(_requests()[index].prompt, answers[index]) for index in chosen])
    logprobs_N = backend.logprobs(batch)[0]
    return list(logprobs_N[batch.loss_mask_N > 0].split(NUM_TOKENS))


def _batch_of(rows: Sequence[tuple[Sequence[int], Answer]]) -> PackedBatch:
    groups = []
    for ticket, (prompt, answer) in enumerate(rows):
        size = len(answer.token_ids)
        trajectory = Trajectory(
            response_ids=np.asarray(answer.token_ids, np.int32),
            loss_mask=np.ones(size, np.uint8),
            logprobs=np.asarray(answer.logprobs, np.float32),
            spans=(Span(1, 0, size),),
            reward=1.0,
            finish_reason="length",
        )
        groups.append(Group(ticket, 0, np.asarray(prompt, np.int32), (trajectory,)))
    return build_batch(groups, 0, {1: 0})


def make_table(results: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    lines = ["| model | dtype | side | other | equal to the bit | largest |", "|---|---|---|---|---|---|"]
    for row in results["rows"]:
        cells = [row["width"], row["dtype"], row["side"], row["other"], f"{row['equal']} of {row['of']}"]
        lines.append(f"| {' | '.join(cells)} | {row['largest']:.1e} |")
    costs = ", ".join(f"{case} {ratio:.2f}" for case, ratio in results["padding"].items())
    return "\n".join([*lines, f"padded over plain, processor time of a request that is alone: {costs}"])


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge what is to be equal to the bit, and the distance of learner and engine in float32."""
    ratios = {}
    for row in results["rows"]:
        name = f"{row['width']} {row['dtype']}: {row['side']}, {row['other']}"
        if row["other"] == "again" or row["side"].startswith("padded"):
            ratios[name] = row["equal"] / row["of"]
        elif row["other"].startswith("engine") and row["dtype"] == "float32":
            ratios[name] = TOLERANCE / max(row["largest"], 1e-12)
    return judge(ratios)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("research.engines.exactness", __doc__, "the narrow model in float32")
    given = parser.parse_args(arguments)
    return report(given, measure(given.quick), make_table, check)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
