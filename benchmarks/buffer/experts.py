"""Cost of recorded experts on their way through the buffer (`rollout.router_replay: r3`).

    asyncrl bench experts [--quick] [--json FILE] [--check]

Groups of 8 answers of 4,096 tokens, each sent to 8 of 128 experts in each of 48 layers (384 bytes, as
Qwen3-30B-A3B's), are pushed by one replica into a buffer with a file journal, and fetched by a learner: 1,024
rows, 1.6 GB of experts. Without experts, with the column as it is, and packed; of what a random model of that
shape chooses on tokens with Zipf's frequencies, and drawn evenly, which no text does: the worst case.
The targets: packed, experts of a model take a third of their bytes, and drawn ones no more than they have;
and a batch of either is pushed and fetched in a minute.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.buffer.bounds import GroupBounds
from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.buffer.journals.kind import open_journal
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.messages import LeaseGrant
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core import experts
from asyncrl.core.config.tree import BufferSection
from asyncrl.core.experience import Group, Trajectory, encode_group
from asyncrl.core.experts import Rows
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.staleness import Span
from benchmarks.harness import options

LAYERS, CHOSEN, NUM_EXPERTS = 48, 8, 128
NUM_TOKENS, NUM_PROMPT, GROUP_SIZE = 4096, 256, 8
NUM_GROUPS, QUICK_GROUPS = 128, 8
REPEATS, QUICK_REPEATS = 3, 1
AT_ONCE = 4
"""Groups that a replica pushes and a learner fetches at a time."""
TARGET_S = 60.0
TARGET_SHARE = 1 / 3
VOCABULARY = 4096
Case = tuple[str, str]
CASES: tuple[Case, ...] = (
    ("none", "-"),
    ("model", "plain"),
    ("model", "packed"),
    ("drawn", "plain"),
    ("drawn", "packed"),
)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    if arguments[:1] == ["serve"]:
        return _serve(Path(arguments[1]), int(arguments[2]))
    parser = options.make_parser("asyncrl bench experts", __doc__, f"{QUICK_GROUPS} groups, once")
    given = parser.parse_args(arguments)
    size = (QUICK_GROUPS, QUICK_REPEATS) if given.quick else (NUM_GROUPS, REPEATS)
    return options.report(given, measure(*size), table, check)


def measure(num_groups: int, repeats: int) -> dict[str, Any]:
    """Return the median of the figures by case; the cases take turns."""
    routes = {"model": routes_of_model(), "drawn": drawn_routes(), "none": None}
    runs: dict[Case, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(repeats):
        for case in CASES:
            runs[case].append(_measure_once(num_groups, routes[case[0]], case[1] != "plain"))
    return {
        "groups": num_groups,
        "cases": {
            f"{name}, {how}": {
                figure: float(np.median([one[figure] for one in found])) for figure in found[0]
            }
            for (name, how), found in runs.items()
        },
    }


def _measure_once(num_groups: int, routes: Rows | None, is_packed: bool) -> dict[str, float]:
    codec, sort = experts._codec, experts._sorted_steps
    if not is_packed:
        experts._codec, experts._sorted_steps = _Plain, lambda rows: rows
    with tempfile.TemporaryDirectory(prefix="asyncrl-experts-", dir=os.environ.get("TMPDIR")) as name:
        command = [sys.executable, "-m", "benchmarks.buffer.experts", "serve", name, str(num_groups)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            return asyncio.run(_exchange(address, num_groups, routes)) | {
                "journal_MB": sum(file.stat().st_size for file in Path(name).rglob("*.segment")) / 1e6
            }
        finally:
            experts._codec, experts._sorted_steps = codec, sort
            process.kill()
            process.wait()


class _Plain:
    """A codec that saves no byte: the column is sent as it is."""

    def compress(self, data: memoryview, asbytes: bool) -> memoryview:
        return data.cast("B")


async def _exchange(address: str, num_groups: int, routes: Rows | None) -> dict[str, float]:
    """Push all groups, then fetch them."""
    learner = LearnerClient(address, deadline_s=300.0)
    learner.open("benchmark")
    replica = ReplicaClient(address, "replica", deadline_s=300.0)
    await replica.describe_data(num_groups, "digest")
    version = learner.register_version(0)
    grants = (await replica.lease(version, num_groups, 60.0)).grants
    began = time.monotonic()
    encode_s = 0.0
    for first in range(0, num_groups, AT_ONCE):
        groups = [make_group(grant, routes) for grant in grants[first : first + AT_ONCE]]
        assert await asyncio.gather(*map(replica.push, groups)) == ["stored"] * len(groups)
    pushed_s = time.monotonic() - began
    began = time.monotonic()
    frames = encode_group(make_group(grants[0], routes))
    encode_s = time.monotonic() - began
    began = time.monotonic()
    found = learner.reserve(0, 60.0)
    assert found is not None
    for first in range(0, num_groups, AT_ONCE):
        learner.fetch([one.ticket for one in found.tickets[first : first + AT_ONCE]])
    fetched_s = time.monotonic() - began
    replica.close()
    learner.close()
    return {
        "pushed_s": pushed_s,
        "fetched_s": fetched_s,
        "encode_ms_per_group": 1e3 * encode_s,
        "MB_per_group": sum(len(frame) for frame in frames) / 1e6,
        "share": len(frames[7]) / count_bytes() if routes is not None else 0.0,
    }


def count_bytes() -> int:
    """Return the bytes of a group's experts as they are recorded."""
    return (GROUP_SIZE * NUM_TOKENS + NUM_PROMPT) * LAYERS * CHOSEN


def _serve(folder: Path, num_groups: int) -> int:
    settings = LedgerSettings(
        run_seed=0,
        groups_per_step=num_groups,
        max_lag=0,
        ready_batches=1,
        memory_bytes=4 * num_groups * count_bytes(),
        max_group_bytes=2 * count_bytes(),
        lease_s=3600.0,
        max_attempts=3,
    )
    journal, now = open_journal(BufferSection(), folder), SystemClock().now()
    bounds = GroupBounds(experts=(LAYERS, CHOSEN, NUM_EXPERTS))
    store = ExperienceStore(settings, journal, GROUP_SIZE, False, now, bounds=bounds)
    service = BufferService(store, ThreadRuntime())
    print(service.address, flush=True)
    service.run(ThreadEvent())
    return 0


def make_group(grant: LeaseGrant, routes: Rows | None) -> Group:
    """Return a group of the lease, whose answers begin at different places of `routes`.

    Equal rows are so far apart that the codec, which looks back half a megabyte, does not find them.
    """
    rng = np.random.default_rng(grant.ticket)
    trajectories = tuple(
        Trajectory(
            response_ids=rng.integers(0, 150_000, NUM_TOKENS, dtype=np.int32),
            loss_mask=np.ones(NUM_TOKENS, dtype=np.uint8),
            logprobs=rng.random(NUM_TOKENS, dtype=np.float32),
            spans=(Span(1, 0, NUM_TOKENS),),
            reward=float(sample),
            finish_reason="stop",
            experts=None if routes is None else np.roll(routes, NUM_TOKENS // 2 * sample, axis=0),
        )
        for sample in range(GROUP_SIZE)
    )
    prompt_experts = None if routes is None else routes[-NUM_PROMPT:]
    prompt_ids = np.arange(NUM_PROMPT, dtype=np.int32)
    return Group(grant.ticket, grant.attempt, prompt_ids, trajectories, prompt_experts=prompt_experts)


def drawn_routes() -> Rows:
    """Return experts drawn evenly [tokens, layers, chosen]."""
    scores = np.random.default_rng(0).random((NUM_TOKENS, LAYERS, NUM_EXPERTS), dtype=np.float32)
    return np.argpartition(scores, CHOSEN)[..., :CHOSEN].astype(np.uint8)


def routes_of_model() -> Rows:
    """Return the experts that a narrow random model chooses [tokens, layers, chosen]."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    generator = torch.Generator().manual_seed(0)
    config = Qwen3MoeConfig(
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    chosen: list[torch.Tensor] = []

    def note(_router: torch.nn.Module, _inputs: object, output: Any) -> None:
        scores = (output[0] if isinstance(output, tuple) else output).flatten(0, -2)
        chosen.append(scores.topk(CHOSEN, -1).indices)

    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(note)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.12, generator=generator)
        frequencies = 1.0 / torch.arange(1, VOCABULARY + 1).float()
        model(torch.multinomial(frequencies, NUM_TOKENS, True, generator=generator)[None])
    return torch.stack(chosen, 1).numpy().astype(np.uint8)


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    rows = results["groups"] * GROUP_SIZE
    lines = [
        f"{rows} rows of {NUM_TOKENS} tokens, {rows * NUM_TOKENS * LAYERS * CHOSEN / 1e9:.2f} GB of experts",
        f"{'':<16} pushed  fetched  of its bytes  journal  encoding a group",
    ]
    for name, one in results["cases"].items():
        lines.append(
            f"{name:<16} {one['pushed_s']:>4.1f} s {one['fetched_s']:>6.1f} s {one['share']:>13.2f} "
            f"{one['journal_MB']:>5.0f} MB {one['encode_ms_per_group']:>13.0f} ms"
        )
    return "\n".join(lines)


def check(results: Mapping[str, Any]) -> options.Verdict:
    """Judge the packed columns."""
    model, drawn = results["cases"]["model, packed"], results["cases"]["drawn, packed"]
    ratios = {
        "bytes of a model's": TARGET_SHARE / model["share"],
        "bytes of drawn ones": 1.0 / drawn["share"],
    }
    for name, one in (("model", model), ("drawn", drawn)):
        ratios[f"time of {name}"] = TARGET_S / (one["pushed_s"] + one["fetched_s"])
    return options.judge(ratios)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
