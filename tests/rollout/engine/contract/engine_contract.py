"""The contract of an engine, run on a real one with a tiny model, against Hugging Face.

Each engine's test module imports these tests, and has a fixture `running` of its own.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from asyncrl.core.errors import EngineError
from asyncrl.core.experience import Trajectory
from asyncrl.core.staleness import PolicyVersion, Span
from rollout_service.data.prompts import Prompt, TokenizedPrompt
from rollout_service.engine.protocol import Completion, Interrupted, Sampling
from rollout_service.rewards.score import Answer, Score
from rollout_service.sampling.episode import SingleTurn
from rollout_service.tasks.digit_sort.vocabulary import EOS, build_tokenizer, encode_prompt
from tests.different import assert_all_differ
from tests.rollout.engine.engine_parts import (
    Change,
    LoopThread,
    NamedTensors,
    greedy_of,
    logprobs_of,
    make_model,
    probe_of,
    stage,
)
from weight_sync.memory.agreement import FIRST_CHECKS
from weight_sync.memory.staging import Staged

NAME = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"
DOOMED, HALF = 500, 12
PROMPT = encode_prompt([3, 1, 4, 2])
LONG, CROSSING = 900, 400
NOISE = 2e-6
"""Of two computations with the same weights, in nats per token."""
"""The load of this version fails at this one of its tensors."""


@dataclass
class Running(ABC):
    """The engine under test, with the models whose weights it has been given, by version number.

    Attributes:
        tolerance: Of its log-probs, against Hugging Face's and in another batch.
    """

    loop: LoopThread
    engine: Any
    models: dict[int, Qwen3ForCausalLM]
    tolerance: float

    @abstractmethod
    async def is_paused(self) -> bool:
        """Tell whether the engine generates nothing."""

    @abstractmethod
    async def resume(self) -> None:
        """Have the engine generate with the weights as they are, although the adapter does not."""

    @abstractmethod
    async def pause(self) -> None:
        """Take `resume` back."""

    @abstractmethod
    async def until_under_way(self, most: int) -> None:
        """Wait until more than `most` requests have a token."""

    @abstractmethod
    def num_unfinished(self) -> int:
        """Return the requests that the engine holds."""

    @abstractmethod
    def check_half_loaded(self, models: list[Qwen3ForCausalLM]) -> None:
        """The weights are those of none of the `models`."""

    def generate(self, seed: int, max_tokens: int = 40, temperature: float = 1.0) -> Completion:
        return self.loop.call(self.sample(seed, max_tokens, temperature))

    def sample(self, seed: int, max_tokens: int = 40, temperature: float = 1.0) -> Any:
        sampling = Sampling(temperature, max_tokens, seed)
        return self.engine.generate(PROMPT, sampling, f"r{seed}.{max_tokens}.{temperature}")

    def swap(self, seed: int, has_probe: bool = False) -> int:
        """Load the model of `seed`, which must be another than the version before, and return its number."""
        number = max(self.models) + 1
        self.models[number] = make_model(seed)
        assert_all_differ([self.models[number - 1], self.models[number]], in_every_tensor=True)
        probe = probe_of(self.models[number], 0.7) if has_probe else None
        with stage(self.models[number], PolicyVersion(number, number - 1), probe) as staged:
            self.loop.call(self.engine.swap(staged))
        return number

    def fail_to_swap(self, staged: Staged, reason: str) -> None:
        """Offer what cannot be served: generation pauses, nothing is labelled."""
        served = self.engine.serving
        with pytest.raises(EngineError, match=reason):
            self.loop.call(self.engine.swap(staged))
        assert not self.engine.is_loaded
        assert self.engine.serving == served
        assert self.loop.call(self.is_paused())

    def peek(self) -> Completion:
        """Generate with the weights as they are, although the adapter keeps the engine paused."""

        async def generate() -> Completion:
            await self.resume()
            completion = await self.sample(77)
            await self.pause()
            return completion

        return self.loop.call(generate())

    def distance(self, completion: Completion, model: Qwen3ForCausalLM) -> float:
        """Return how far the log-probs are from the model's, in nats per token."""
        wanted = logprobs_of(model, PROMPT, completion.token_ids.tolist())
        return float((torch.tensor(completion.logprobs) - wanted).abs().mean())

    def check_logprobs(self, completion: Completion, temperature: float = 1.0) -> None:
        """Every span's log-probs are those of the version that it names."""
        ids = completion.token_ids.tolist()
        for span in completion.spans:
            wanted = logprobs_of(self.models[span.version], PROMPT, ids, temperature)[span.start : span.end]
            found = torch.tensor(completion.logprobs[span.start : span.end])
            assert (found - wanted).abs().max() < self.tolerance


def test_a_fresh_engine_serves_version_zero(running: Running):
    assert running.engine.serving == PolicyVersion(0, 0)
    assert running.engine.is_loaded
    assert {span.version for span in running.generate(1).spans} == {0}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_log_probs_equal_those_of_hugging_face_at_the_sampling_temperature(
    running: Running, temperature: float
):
    completions = [running.generate(seed, temperature=temperature) for seed in range(8)]
    assert sum(len(completion.token_ids) for completion in completions) > 40
    for completion in completions:
        running.check_logprobs(completion, temperature)


def test_a_response_ends_with_the_end_of_sequence_or_is_cut(running: Running):
    completions = [running.generate(seed, max_tokens=30) for seed in range(16)]
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        has_eos = EOS in completion.token_ids[-1:]
        assert has_eos == (completion.finish_reason == "stop")
        assert has_eos or len(completion.token_ids) == 30


def test_a_seed_decides_the_response_whatever_else_is_in_the_batch(running: Running):
    alone = [running.generate(seed) for seed in range(10, 15)]

    async def together() -> list[Completion]:
        others = [running.sample(seed) for seed in range(100, 140)]
        return (await asyncio.gather(*[running.sample(seed) for seed in range(10, 15)], *others))[:5]

    for one, other in zip(alone, running.loop.call(together()), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.abs(one.logprobs - other.logprobs).max() < running.tolerance
    assert len({tuple(completion.token_ids.tolist()) for completion in alone}) == 5


async def _swap_in_flight(running: Running, staged: Staged) -> list[Completion]:
    """Swap once most of 48 requests have a token and far to go, and return all responses."""
    async with asyncio.TaskGroup() as group:
        requests = [
            group.create_task(
                running.engine.generate(PROMPT, Sampling(2.0, CROSSING, seed, ignores_eos=True), f"r{seed}")
            )
            for seed in range(1000, 1048)
        ]
        await running.until_under_way(40)
        await running.engine.swap(staged)
    return [request.result() for request in requests]


def test_a_swap_in_flight_labels_and_scores_each_token_by_the_version_that_sampled_it(running: Running):
    old = running.swap(1)
    running.models[old + 1] = make_model(2)
    with stage(running.models[old + 1], PolicyVersion(old + 1, old)) as staged:
        completions = running.loop.call(_swap_in_flight(running, staged))
    crossing = [completion for completion in completions if len(completion.spans) == 2]
    assert len(crossing) > 40, "requests had ended before the swap"
    for completion in crossing:
        first, second = completion.spans
        num_tokens = len(completion.token_ids)
        assert (first, second) == (Span(old, 0, first.end), Span(old + 1, first.end, num_tokens))
        running.check_logprobs(completion, 2.0)
    assert running.engine.serving == PolicyVersion(old + 1, old)


def test_after_a_swap_greedy_answers_are_those_of_hugging_face_on_the_new_weights(running: Running):
    number = running.swap(5)
    wanted = greedy_of(running.models[number], PROMPT, 40, EOS)
    found = running.generate(0, temperature=0.0)
    assert found.token_ids.tolist() == wanted
    assert greedy_of(running.models[number - 1], PROMPT, 40, EOS) != wanted
    assert [span.version for span in found.spans] == [number]


def _drop(name: str) -> Change:
    return lambda tensors: [(n, t) for n, t in tensors if n != name]


def _retype(tensors: NamedTensors, name: str, dtype: torch.dtype) -> NamedTensors:
    return [(n, t.to(dtype) if n == name else t) for n, t in tensors]


MISFITS: dict[str, Change] = {
    rf"missing \['{NAME}'\]": _drop(NAME),
    r"unexpected \['model.extra.weight'\]": lambda tensors: [*tensors, ("model.extra.weight", torch.ones(8))],
    rf"of another shape \['{NAME}'\]": lambda tensors: [(n, t[1:] if n == NAME else t) for n, t in tensors],
    rf"of another dtype \['{NAME}'\]": lambda tensors: _retype(tensors, NAME, torch.int8),
}


@pytest.mark.parametrize("reason", MISFITS)
def test_what_does_not_fit_the_engine_is_refused_before_anything_is_overwritten(
    running: Running, reason: str
):
    served = running.swap(6)
    with stage(make_model(7), PolicyVersion(served + 1, served), change=MISFITS[reason]) as staged:
        running.fail_to_swap(staged, reason)
    assert running.distance(running.peek(), running.models[served]) < running.tolerance
    running.check_logprobs(generate_at(running, running.swap(8)))


def test_a_load_that_breaks_half_way_is_never_served_and_the_next_one_repairs_it(running: Running):
    served = running.swap(6)
    doomed = make_model(7)
    with stage(doomed, PolicyVersion(DOOMED, served)) as staged:
        running.fail_to_swap(staged, f"told to fail at tensor {HALF}")
    running.check_half_loaded([running.models[served], doomed])

    async def ask_while_paused() -> asyncio.Task[Completion]:
        request = asyncio.create_task(running.sample(300))
        done, _ = await asyncio.wait([request], timeout=0.3)
        assert not done, "a half-loaded engine generated"
        return request

    request = running.loop.call(ask_while_paused())
    number = running.swap(8)
    completion = running.loop.call(_result(request))
    assert [span.version for span in completion.spans] == [number]
    running.check_logprobs(completion)


def test_a_parameter_that_got_nothing_is_named_even_if_the_checkpoint_lost_it_too(running: Running):
    served = running.swap(6)
    file = Path(running.engine._settings.model) / "model.safetensors"
    whole = file.read_bytes()
    save_file({n: t for n, t in load_file(file).items() if n != NORM}, file, {"format": "pt"})
    try:
        with stage(make_model(7), PolicyVersion(served + 1, served), change=_drop(NORM)) as staged:
            running.fail_to_swap(staged, rf"brought nothing for the engine's parameters \['{NORM}'\]")
    finally:
        file.write_bytes(whole)
    running.check_logprobs(generate_at(running, running.swap(8)))


def test_a_staged_file_that_is_gone_is_refused(running: Running):
    served = running.swap(6)
    with stage(make_model(7), PolicyVersion(served + 1, served)) as staged:
        Path(staged.path).unlink()
        running.fail_to_swap(staged, "SegmentGone: .* is gone")
    running.check_logprobs(generate_at(running, running.swap(8)))


def test_the_label_moves_only_when_the_probe_matches(running: Running):
    served = running.swap(6, has_probe=True)
    loaded, probed = make_model(7), make_model(9)
    with stage(loaded, PolicyVersion(served + 1, served), probe_of(probed)) as staged:
        running.fail_to_swap(staged, "the probe does not match")
    assert running.distance(running.peek(), loaded) < running.tolerance
    running.check_logprobs(generate_at(running, running.swap(9, has_probe=True)))


def test_the_gap_of_the_last_probe_is_that_of_the_weights(running: Running):
    served = running.swap(6, has_probe=True)
    assert 0 <= running.engine.probe_gap < NOISE
    off, probe = make_model(7), probe_of(make_model(7), 0.7)
    with torch.no_grad():
        off.model.norm.weight.mul_(1 + 5e-6)
    theirs = zip(probe_of(off, 0.7).logprobs, probe.logprobs, strict=True)
    gap = fmean(abs(mine - learners) for mine, learners in theirs)
    assert gap > 5 * NOISE
    with stage(off, PolicyVersion(served + 1, served), probe) as staged:
        running.loop.call(running.engine.swap(staged))
    running.models[served + 1] = off
    assert running.engine.probe_gap == pytest.approx(gap, abs=NOISE)
    running.swap(8)
    assert running.engine.probe_gap > 4 * NOISE, "a version without a probe leaves the last one"


def test_an_engine_checks_its_first_loads_and_then_one_in_so_many_steps(running: Running):
    every, number = 1000, running.swap(6, has_probe=True)

    def swap(loaded: int, probed: int, step: int) -> None:
        nonlocal number
        number += 1
        running.models[number] = make_model(loaded)
        probe = replace(probe_of(make_model(probed)), every=every)
        with stage(running.models[number], PolicyVersion(number, step), probe) as staged:
            running.loop.call(running.engine.swap(staged))

    for seed in range(FIRST_CHECKS):
        swap(20 + seed, 20 + seed, step=seed)
    swap(loaded=40, probed=41, step=every - 1)
    with pytest.raises(EngineError, match="the probe does not match"):
        swap(loaded=42, probed=43, step=every)
    with pytest.raises(EngineError, match="the probe does not match"):
        swap(loaded=44, probed=45, step=every - 1)
    swap(46, 46, step=every - 1)
    running.check_logprobs(running.generate(number))


def generate_at(running: Running, number: int) -> Completion:
    completion = running.generate(301)
    assert [span.version for span in completion.spans] == [number]
    return completion


async def _result(task: asyncio.Task[Completion]) -> Completion:
    return await asyncio.wait_for(task, 30.0)


def test_a_cancelled_request_is_aborted_and_the_engine_goes_on(running: Running):
    async def cancel_some() -> None:
        requests = [asyncio.create_task(running.sample(seed, LONG, 2.0)) for seed in range(400, 420)]
        await asyncio.sleep(0.2)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    running.loop.call(cancel_some())
    assert running.num_unfinished() == 0
    running.check_logprobs(running.generate(1))


def test_a_request_that_cannot_be_run_fails_alone(running: Running):
    too_long = Sampling(1.0, 5, 0)
    with pytest.raises(EngineError, match="too-long"):
        running.loop.call(running.engine.generate([1] * 2000, too_long, "too-long"))
    assert running.generate(2).finish_reason in ("stop", "length")


def test_an_empty_prompt_is_refused_and_the_engine_goes_on(running: Running):
    with pytest.raises(EngineError, match="nothing-asked"):
        running.loop.call(running.engine.generate([], Sampling(1.0, 5, 0), "nothing-asked"))
    assert running.generate(2).finish_reason in ("stop", "length")


def test_an_answer_that_fills_the_model_is_cut_there(running: Running):
    sampling = Sampling(1.0, LONG, 0, ignores_eos=True)
    completion = running.loop.call(running.engine.generate([1] * 1000, sampling, "fills-the-model"))
    assert (len(completion.token_ids), completion.finish_reason) == (24, "length")


STOPS = ("12", "777", "5=")


def test_a_response_ends_with_the_token_that_completes_a_stop_string(running: Running):
    tokenizer, num_tokens = build_tokenizer(), 80

    async def ask(stop: tuple[str, ...]) -> list[Completion]:
        requests = [
            running.engine.generate(PROMPT, Sampling(2.0, num_tokens, seed, True, stop), f"{stop}.{seed}")
            for seed in range(12)
        ]
        return await asyncio.gather(*requests)

    wholes, stopped = running.loop.call(ask(())), running.loop.call(ask(STOPS))
    for whole, found in zip(wholes, stopped, strict=True):
        ids = whole.token_ids.tolist()
        texts = [tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(1, num_tokens + 1)]
        ends = [end for end, text in enumerate(texts, 1) if any(stop in text for stop in STOPS)]
        assert found.token_ids.tolist() == (ids[: ends[0]] if ends else ids)
        assert found.finish_reason == ("stop" if ends else "length")
        assert found.spans[-1].end == len(found.logprobs) == len(found.token_ids)
        running.check_logprobs(found, 2.0)
    assert len({len(found.token_ids) for found in stopped}) > 4, "few stop strings: this test shows nothing"


def _begin(running: Running, name: str, num_requests: int = 6) -> list[asyncio.Task[Completion]]:
    """Start long requests; call it in the loop."""
    return [
        asyncio.create_task(
            running.engine.generate(PROMPT, Sampling(2.0, LONG, seed, ignores_eos=True), f"{name}.{seed}")
        )
        for seed in range(num_requests)
    ]


async def _beginnings(tasks: list[asyncio.Task[Completion]]) -> list[Completion]:
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30.0)
    assert all(isinstance(result, Interrupted) for result in results), results
    return [result.completion for result in results if isinstance(result, Interrupted)]


async def _swap_until_paused(running: Running, staged: Staged) -> asyncio.Task[None]:
    swap = asyncio.create_task(running.engine.swap(staged))
    while running.engine.is_loaded and not swap.done():
        await asyncio.sleep(0)
    assert not swap.done(), "the swap was over before it could be disturbed"
    return swap


def test_interrupted_requests_give_their_tokens_with_exact_log_probs_also_in_the_middle_of_a_swap(
    running: Running,
):
    old = running.swap(1)
    running.models[old + 1] = make_model(2)

    async def interrupt(staged: Staged) -> list[Completion]:
        tasks = _begin(running, "disturbed")
        await running.sample(500, 20)  # by then they have tokens
        swap = await _swap_until_paused(running, staged)
        await running.engine.interrupt()
        found = await _beginnings(tasks)
        await swap
        return found

    with stage(running.models[old + 1], PolicyVersion(old + 1, old)) as staged:
        beginnings = running.loop.call(interrupt(staged))
    for beginning in beginnings:
        assert len(beginning.token_ids) and beginning.spans == (Span(old, 0, len(beginning.token_ids)),)
        running.check_logprobs(beginning, 2.0)
    assert not running.loop.call(running.is_paused())
    assert running.num_unfinished() == 0
    running.check_logprobs(generate_at(running, old + 1))


class NoReward:
    async def score(self, answer: Answer) -> Score:
        return Score(0.0)


def test_an_answer_goes_on_from_its_beginning_with_the_log_probs_and_versions_of_each_part(running: Running):
    first = running.swap(1)
    episodes = SingleTurn(running.engine, build_tokenizer(), NoReward())
    prompt = TokenizedPrompt(0, Prompt(0, "", "", "", {}), np.asarray(PROMPT, np.int32))

    async def run(name: str, begun: list[Trajectory | None]) -> list[Any]:
        episodes_running = [
            asyncio.create_task(
                episodes.run(prompt, Sampling(2.0, 200, seed, True), f"{name}.{seed}", trajectory)
            )
            for seed, trajectory in enumerate(begun)
        ]
        if not any(begun):
            await running.sample(501, 20)  # by then they have tokens
            await running.engine.interrupt()
        return await asyncio.gather(*episodes_running, return_exceptions=True)

    begun = [error.trajectory for error in running.loop.call(run("begun", [None] * 4))]
    second = running.swap(2)
    wholes, again = (running.loop.call(run(name, begun)) for name in ("whole", "again"))
    for trajectory, whole, other in zip(begun, wholes, again, strict=True):
        assert whole.response_ids.tolist() == other.response_ids.tolist(), "its seed decides the rest"
        num_begun = trajectory.num_tokens
        assert 0 < num_begun < whole.num_tokens == 200
        assert whole.spans == (Span(first, 0, num_begun), Span(second, num_begun, 200))
        assert whole.logprobs[:num_begun].tolist() == trajectory.logprobs.tolist()
        running.check_logprobs(Completion(whole.response_ids, whole.logprobs, whole.spans, "length"), 2.0)


def test_a_swap_whose_caller_is_cancelled_does_not_leave_the_engine_paused(running: Running):
    number = running.swap(1) + 1
    running.models[number] = make_model(3)

    async def disturb(staged: Staged) -> None:
        tasks = _begin(running, "kept", 4)
        swap = await _swap_until_paused(running, staged)
        swap.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swap
        assert not await running.is_paused()
        await running.engine.interrupt()
        await _beginnings(tasks)

    with stage(running.models[number], PolicyVersion(number, number - 1)) as staged:
        running.loop.call(disturb(staged))
    assert running.engine.is_loaded
    running.check_logprobs(generate_at(running, number))
