"""The real vLLM with requests in flight through many versions: what each token and each span must be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.core.errors import EngineError
from asyncrl.core.runtime.faults import VARIABLE
from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.protocol import Completion, Sampling
from rollout_service.engine.vllm.engine import VllmEngine
from tests.rollout.engine.engine_parts import LoopThread, logprobs_of, make_model, probe_of, save_model, stage
from tests.rollout.replica.flight_parts import TOLERANCE, Answer, Flight, settings_for, until_under_way
from weight_sync.memory.staging import Staged

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
NUM_SWAPS = 20
MANY = 30
DOOMED, HALF = 500, 12
NUM_FAILURES = 12
"""vLLM's workers can leave ten replies unread before they block."""


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[tuple[LoopThread, Flight]]:
    """Yield a loop, and a flight on a started engine that serves version 0."""
    model = make_model(0)
    engine = VllmEngine(settings_for(str(save_model(model, folder)), **settings))
    loop = LoopThread()
    try:
        loop.call(engine.start(), 280.0)
        yield loop, Flight(engine, {0: model})
    finally:
        loop.call(engine.shutdown())
        loop.close()


def load_good(loop: LoopThread, flight: Flight) -> int:
    """Load the next version and return its number."""
    number = max(flight.models) + 1
    flight.models[number] = make_model(number)
    with stage(flight.models[number], PolicyVersion(number, number)) as staged:
        loop.call(flight.engine.swap(staged))
    return number


def test_every_token_in_flight_through_twenty_versions_is_of_the_version_that_it_names(tmp_path: Path):
    with opened(tmp_path) as (loop, flight):
        loop.call(flight.through(NUM_SWAPS), 240.0)
        assert flight.engine._llm.get_num_unfinished_requests() == 0
    crossings = flight.crossings
    assert min(crossings[number] for number in range(1, NUM_SWAPS + 1)) >= MANY, crossings
    assert len(flight.aborted) == 3 * NUM_SWAPS
    assert all(len(answer.completion.spans) >= 2 for answer in flight.aborted)
    flight.check_spans()
    assert flight.check_logprobs() > 5000
    assert sorted(flight.greedy) == list(range(NUM_SWAPS + 1))
    flight.check_greedy()


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoopThread, Flight]]:
    """An engine that keeps the KV cache over a swap and shares prefixes."""
    with opened(tmp_path_factory.mktemp("model"), recomputes_kv_cache=False, caches_prefixes=True) as parts:
        yield parts


def test_with_keep_spans_are_right_and_log_probs_are_those_of_the_cache_of_two_versions(
    sharing: tuple[LoopThread, Flight],
):
    loop, flight = sharing
    loop.call(flight.through(3))
    flight.check_spans()
    flight.check_greedy()
    crossing = [answer for answer in flight.finished if len(answer.completion.spans) == 2]
    assert len(crossing) >= 8
    for answer in crossing:
        first = answer.completion.spans[0]
        assert flight.distance(answer, first, first.version) < TOLERANCE
        assert _hybrid_distance(flight, answer) < TOLERANCE
    differing = [
        flight.distance(one, one.completion.spans[1], one.completion.spans[1].version) for one in crossing
    ]
    assert sum(distance > 100 * TOLERANCE for distance in differing) > len(crossing) / 2


@torch.no_grad()
def _hybrid_distance(flight: Flight, answer: Answer) -> float:
    """Compare the second span with new weights over a cache that the old ones have filled.

    The last token before the swap was sampled by the old weights; its keys and values are the new ones'.
    """
    first, second = answer.completion.spans
    ids = torch.tensor([[*answer.prompt, *answer.completion.token_ids.tolist()]])
    num_cached = len(answer.prompt) + first.end - 1
    cache = flight.models[first.version](ids[:, :num_cached], use_cache=True).past_key_values
    rest = flight.models[second.version](ids[:, num_cached:-1], past_key_values=cache)
    logprobs = rest.logits[0].log_softmax(-1).gather(1, ids[0, num_cached + 1 :, None])[:, 0]
    return float((logprobs - torch.tensor(answer.completion.logprobs[second.start :])).abs().max())


@pytest.mark.parametrize("recomputes", [False, True], ids=["keep", "recompute"])
def test_a_prefix_of_an_older_version_is_never_served(sharing: tuple[LoopThread, Flight], recomputes: bool):
    loop, flight = sharing
    engine = flight.engine
    engine._settings = replace(engine._settings, recomputes_kv_cache=recomputes)
    prompt = [index * 7 % 10 for index in range(400)]

    def ask(name: str) -> Completion:
        return loop.call(
            engine.generate(prompt, Sampling(1.0, 8, 5, ignores_eos=True), f"{recomputes}.{name}")
        )

    ask("fills the cache")
    assert _num_cached(loop, engine, prompt) > 300, "nothing was shared: this test shows nothing"
    number = load_good(loop, flight)
    found = ask("after the swap")
    wanted = logprobs_of(flight.models[number], prompt, found.token_ids.tolist())
    assert (torch.tensor(found.logprobs) - wanted).abs().max() < TOLERANCE


def test_the_status_counts_prompt_tokens_hits_and_preemptions(sharing: tuple[LoopThread, Flight]):
    loop, flight = sharing
    engine = flight.engine
    engine._settings = replace(engine._settings, recomputes_kv_cache=True)
    prompt, before = [index * 9 % 10 for index in range(400)], engine.cache_status()
    for name in ("counted.first", "counted.second"):
        loop.call(engine.generate(prompt, Sampling(1.0, 8, 5, ignores_eos=True), name))
    after = engine.cache_status()
    assert after.prompt_tokens - before.prompt_tokens == 800
    assert after.cached_tokens - before.cached_tokens == 384, "whole blocks of 128 of the second prompt"
    loop.call(flight.through(1))
    swapped = engine.cache_status()
    assert swapped.preemptions >= after.preemptions + MANY, "the swap has taken the cache of all that ran"
    loggers = engine.client.logger_manager.stat_loggers
    assert len(loggers) == 1, "vLLM's own observes each token, for nobody"


def test_a_request_that_waits_through_a_swap_finds_no_prefix_of_the_older_version(
    sharing: tuple[LoopThread, Flight],
):
    """It was salted with the older version, and has not begun: its prompt is computed by the new weights."""
    loop, flight = sharing
    engine = flight.engine
    engine._settings = replace(engine._settings, recomputes_kv_cache=False)
    prompt = [index * 3 % 10 for index in range(400)]
    sampling = Sampling(1.0, 8, 9, ignores_eos=True)
    loop.call(engine.generate(prompt, sampling, "waited.before"))
    assert _num_cached(loop, engine, prompt) > 300, "nothing was shared: this test shows nothing"
    number = max(flight.models) + 1
    flight.models[number] = make_model(number)
    with stage(flight.models[number], PolicyVersion(number, number)) as staged:
        found = loop.call(_wait_through(engine, staged, prompt, sampling))
    assert [span.version for span in found.spans] == [number]
    wanted = logprobs_of(flight.models[number], prompt, found.token_ids.tolist())
    assert (torch.tensor(found.logprobs) - wanted).abs().max() < TOLERANCE


def test_requests_that_share_a_prompt_are_recomputed_by_the_new_weights(sharing: tuple[LoopThread, Flight]):
    """On a CPU a generator cannot be rewound, as vLLM does for a prefill in chunks: it would die."""
    loop, flight = sharing
    engine = flight.engine
    engine._settings = replace(engine._settings, recomputes_kv_cache=True)
    prompt, old = [index * 9 % 10 for index in range(400)], max(flight.models)

    async def cross(staged: Staged) -> list[Completion]:
        long = [Sampling(1.0, 300, seed, ignores_eos=True) for seed in range(32)]
        asked = [
            asyncio.create_task(engine.generate(prompt, one, f"shared.{one.seed}.{old}")) for one in long
        ]
        await until_under_way(engine, len(asked) - 1)
        await engine.swap(staged)
        return await asyncio.gather(*asked)

    flight.models[old + 1] = make_model(old + 1)
    with stage(flight.models[old + 1], PolicyVersion(old + 1, old + 1)) as staged:
        completions = loop.call(cross(staged))
    for completion in completions:
        assert [span.version for span in completion.spans] == [old, old + 1]
        for span in completion.spans:
            assert flight.distance(Answer(prompt, completion), span, span.version) < TOLERANCE


async def _wait_through(
    engine: VllmEngine, staged: Staged, prompt: list[int], sampling: Sampling
) -> Completion:
    """Swap while all places of the batch are taken and one more request waits; return its answer."""
    places = engine._settings.max_sequences
    long = Sampling(1.0, 700, 1, ignores_eos=True)
    running = [asyncio.create_task(engine.generate([1, 2], long, f"place.{n}")) for n in range(places)]
    await until_under_way(engine, places - 1)
    waiting = asyncio.create_task(engine.generate(prompt, sampling, "waited.after"))
    async with asyncio.timeout(60.0):
        while engine.client.get_num_unfinished_requests() <= places:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
    await engine.swap(staged)
    assert not waiting.done()
    await asyncio.gather(*running)
    return await waiting


def _num_cached(loop: LoopThread, engine: VllmEngine, prompt: list[int]) -> int:
    sampling = Sampling(1.0, 8, 6, ignores_eos=True)
    return loop.call(
        engine._final_output(prompt, sampling, f"cached.{engine.serving.number}")
    ).num_cached_tokens


def test_two_workers_that_share_a_model_swap_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, f"engine.load@{DOOMED}.{HALF}.1")  # on the second worker alone
    with opened(tmp_path, cpu_workers=2) as (loop, flight):
        monkeypatch.delenv(VARIABLE)
        loop.call(flight.through(3), 120.0)
        for _ in range(NUM_FAILURES):
            with (
                stage(make_model(50), PolicyVersion(DOOMED, 3), probe_of(make_model(50))) as staged,
                pytest.raises(EngineError, match="told to fail"),
            ):
                loop.call(flight.engine.swap(staged))
            assert not flight.engine.is_loaded
        with (
            stage(make_model(51), PolicyVersion(DOOMED + 1, 3), probe_of(make_model(52))) as staged,
            pytest.raises(EngineError, match="the probe does not match"),
        ):
            loop.call(flight.engine.swap(staged))
        load_good(loop, flight)
        loop.call(flight.through(1), 120.0)
    flight.check_spans()
    assert flight.check_logprobs() > 500
    flight.check_greedy()
