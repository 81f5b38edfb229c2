"""Real learner, real weight sync, real engine: every token belongs to the version that it names.

The test plays the replica by hand, so that it can look at each version's weights as they are swapped
in. Responses have a fixed length, so that many of them are in flight over several versions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.buffer.client import ReplicaClient
from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.config.load import load_config
from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.staleness import Span
from learner.batching.probe import NUM_ROWS
from rollout_service.engine.protocol import Completion, Sampling
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings
from tests.different import assert_all_differ
from tests.system.parts.harness import Harness
from weight_sync.link import ReceiverLink
from weight_sync.memory.manifest import Probe
from weight_sync.memory.staging import Staged, open_tensors

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
NUM_STEPS = 16
NUM_TOKENS = 96
PROMPT = [11, 3, 1, 4, 13]
TELLING_TOKENS = 5
PROBE_EVERY = 2


@dataclass
class Record:
    """What the hand-played replica saw."""

    completions: list[Completion] = field(default_factory=list)
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    greedy: list[int] = field(default_factory=list)
    probes: dict[int, Probe | None] = field(default_factory=dict)


def config_for(folder: Path, tp: int, model: Path) -> list[str]:
    return [
        f"run.name=exact{tp}",
        f"run.dir={folder}",
        f"model.path={model}",
        "data.train=unused.parquet",
        "data.eval=null",
        "eval.every_steps=0",
        f"rollout.max_tokens={NUM_TOKENS}",
        "rollout.group_size=4",
        f"learner.tp={tp}",
        "learner.groups_per_step=4",
        "learner.lr=1e-3",
        "learner.warmup_steps=0",
        f"learner.steps={NUM_STEPS}",
        f"weight_sync.probe_every={PROBE_EVERY}",
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A digit model with random weights, of the demo's shape."""
    from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
    from rollout_service.tasks.digit_sort.warm_start import build_model

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    build_model(0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


pytestmark = pytest.mark.long
ENGINES = [pytest.param(1, id="tp1"), pytest.param(2, id="tp2")]


@pytest.fixture(scope="module", params=ENGINES)
def played(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Record, Path]:
    folder = tmp_path_factory.mktemp("exact")
    config = load_config(QUICKSTART, config_for(folder, request.param, model))
    run_dir = folder / config.run.name
    with Harness(config, run_dir) as harness:
        for name in ("buffer.0", "weight_sync.0", "publisher.0", "receiver.0"):
            harness.start(name)
        for rank in range(request.param):
            harness.start(f"learner.{rank}")
        record = asyncio.run(play_replica(harness, model))
        for rank in range(request.param):
            harness.await_end(f"learner.{rank}")
    return record, run_dir / "weights"


async def play_replica(harness: Harness, model: Path) -> Record:
    engine = VllmEngine(
        VllmSettings(str(model), "float32", max_model_tokens=128, max_sequences=64, kv_cache_bytes=64 << 20)
    )
    await engine.start()
    try:
        return await Player(engine, harness).play()
    finally:
        await engine.shutdown()


class Player:
    """Leases, generates, pushes and swaps, and writes everything down."""

    def __init__(self, engine: VllmEngine, harness: Harness) -> None:
        self.engine = engine
        self.buffer = ReplicaClient(harness.address("buffer.0"), "rollout.0", deadline_s=60.0)
        self.link = ReceiverLink(ThreadRuntime(), harness.address("receiver.0"))
        self.record = Record()
        self.groups: set[asyncio.Task[None]] = set()

    async def play(self) -> Record:
        await self.buffer.describe_data(100, "digest")
        async with asyncio.timeout(240):
            while self.engine.serving.step < NUM_STEPS:
                await self.follow()
                await self.lease()
        for task in self.groups:
            task.cancel()
        sampling = Sampling(temperature=0.0, max_tokens=48, seed=0)
        greedy = await self.engine.generate(PROMPT, sampling, "greedy")
        self.record.greedy = greedy.token_ids.tolist()
        self.buffer.close()
        self.link.close()
        return self.record

    async def follow(self) -> None:
        try:
            staged = await self.link.next_staged(self.engine.serving.number, 0.05)
        except DeadlineExceeded:
            return  # the receiver is still starting
        if staged is not None:
            self.record.weights[staged.version.number] = copy_weights(staged)
            self.record.probes[staged.version.number] = staged.manifest.probe
            await self.engine.swap(staged)
            await self.link.report_loaded(staged.version.number, ok=True)

    async def lease(self) -> None:
        if self.engine.serving.number == 0:
            return
        reply = await self.buffer.lease(self.engine.serving.number, 8, 0.05)
        for grant in reply.grants:
            task = asyncio.create_task(self.run_group(grant))
            self.groups.add(task)
            task.add_done_callback(self.groups.discard)

    async def run_group(self, grant: LeaseGrant) -> None:
        samplings = [
            Sampling(1.0, NUM_TOKENS, sample_seed(0, grant.ticket, sample), ignores_eos=True)
            for sample in range(4)
        ]
        requests = [
            self.engine.generate(PROMPT, sampling, f"{grant.ticket}.{grant.attempt}.{index}")
            for index, sampling in enumerate(samplings)
        ]
        completions = await asyncio.gather(*requests)
        self.record.completions += completions
        await self.buffer.push(as_group(grant, completions))


def copy_weights(staged: Staged) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in open_tensors(staged)}


def as_group(grant: LeaseGrant, completions: list[Completion]) -> Group:
    import numpy as np

    trajectories = tuple(
        Trajectory(
            response_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), np.uint8),
            logprobs=completion.logprobs,
            spans=completion.spans,
            reward=float((completion.token_ids == 5).mean()),
            finish_reason=completion.finish_reason,
        )
        for completion in completions
    )
    return Group(grant.ticket, grant.attempt, np.asarray(PROMPT, np.int32), trajectories)


@torch.no_grad()
def logprobs_under(model: torch.nn.Module, completion: Completion) -> torch.Tensor:
    ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
    logits = model(ids).logits[0, len(PROMPT) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0]


def test_every_token_has_the_log_prob_of_the_version_that_it_names(
    played: tuple[Record, Path], model: Path
) -> None:
    record, _ = played
    assert_all_differ(record.weights.values(), in_every_tensor=True)
    crossing = [completion for completion in record.completions if len(completion.spans) >= 2]
    assert len(crossing) >= 30, "too few requests were in flight over a sync"
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    spans = [(completion, span) for completion in record.completions for span in completion.spans]
    loaded = 0
    for completion, span in sorted(spans, key=lambda pair: pair[1].version):
        if span.version != loaded:
            network.load_state_dict(record.weights[span.version])
            loaded = span.version
        wanted = logprobs_under(network, completion)[span.start : span.end]
        found = torch.from_numpy(completion.logprobs[span.start : span.end].copy())
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_a_span_names_another_version_exactly_where_the_log_probs_change(
    played: tuple[Record, Path], model: Path
) -> None:
    record, _ = played
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # One token alone may well have nearly the same log-prob under both.
    telling = [
        one
        for one in record.completions
        if len(one.spans) >= 2 and _num_tokens(one.spans[1]) >= TELLING_TOKENS
    ][:30]
    assert len(telling) >= 10, "too few spans are long enough to tell versions apart"
    num_told_apart = 0
    for completion in telling:
        first, second = completion.spans[:2]
        network.load_state_dict(record.weights[first.version])
        under_first = logprobs_under(network, completion)[second.start : second.end]
        found = torch.from_numpy(completion.logprobs[second.start : second.end].copy())
        num_told_apart += bool((found - under_first).abs().max() > 1e-3)
    assert num_told_apart == len(telling)


def test_every_version_brings_a_probe_of_tokens_that_were_trained_and_says_when_to_check(
    played: tuple[Record, Path], model: Path
) -> None:
    record, _ = played
    sampled = set(PROMPT).union(*(one.token_ids.tolist() for one in record.completions))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    first = min(record.probes)
    for number, probe in record.probes.items():
        assert probe is not None and probe.every == PROBE_EVERY
        assert probe.num_rows == (NUM_ROWS if number == first else 2 * NUM_ROWS)
        assert set(probe.tokens[NUM_ROWS * probe.row_tokens :]) <= sampled
        network.load_state_dict(record.weights[number])
        assert _gap(network, probe) < 1e-4, f"version {number}"


@torch.no_grad()
def _gap(network: torch.nn.Module, probe: Probe) -> float:
    """Return the largest difference of the probe's log-probs to the model's."""
    rows, found = zip(*probe.rows(), strict=True)
    tokens_RL = torch.tensor(rows)
    wanted_RLV = network(tokens_RL).logits[:, :-1].log_softmax(-1)
    wanted_RL = wanted_RLV.gather(2, tokens_RL[:, 1:, None])[..., 0]
    return float((torch.tensor(found) - wanted_RL).abs().max())


def _num_tokens(span: Span) -> int:
    return span.end - span.start


def test_after_the_last_sync_greedy_tokens_equal_those_of_the_exported_weights(
    played: tuple[Record, Path],
) -> None:
    record, weights = played
    network = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    with torch.no_grad():
        output = network.generate(torch.tensor([PROMPT]), max_new_tokens=48, do_sample=False)
    assert record.greedy == output[0].tolist()[len(PROMPT) :]
