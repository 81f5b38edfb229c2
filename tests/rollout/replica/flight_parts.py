"""Requests in flight while an engine is given one version after another, and what each token must be.

Hugging Face's model under the weights of every version is the judge.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from asyncrl.core.staleness import PolicyVersion, Span
from rollout_service.engine.protocol import Completion, Sampling
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings, read_output
from tests.different import assert_all_differ
from tests.rollout.engine.engine_parts import Change, greedy_of, logprobs_of, make_model, probe_of, stage

TOLERANCE = 1e-4
NUM_GREEDY_TOKENS = 16
NO_EOS = -1
NUM_DIGITS = 10
TIE, MAX_TIED = 1e-5, 0.02
"""Distance of two experts, as a router scores them, that rounding may reverse; most such answers."""
VICTIM_TOKENS = 900
"""So many that a request is under way when it is aborted."""
TELLING_TOKENS = 8
"""One token alone may well have nearly the same log-prob under two versions."""


async def until_under_way(engine: VllmEngine, most: float) -> None:
    """Wait until more than `most` requests have a token, however slow the machine is."""
    async with asyncio.timeout(60.0):
        while True:
            states = list(engine.client.output_processor.request_states.values())  # type: ignore[attr-defined]
            if sum(state.detokenizer.num_output_tokens() > 0 for state in states) > most:
                return
            await asyncio.sleep(0.005)


@dataclass
class Answer:
    """A prompt and what the engine made of it."""

    prompt: list[int]
    completion: Completion


@dataclass
class Flight:
    """Keeps `num_workers` requests in flight through `swap`s.

    Attributes:
        models: Hugging Face's model of every version, by number.
        make: Makes the model of a version from its number.
        vocab_size: Prompts are of tokens below it.
        sent: Says what is staged of the model of a version in place of its parameters.
        differ_everywhere: Whether no tensor of two versions is the same.
        finished: Requests that ran to their end.
        aborted: Requests that were ended from outside, with what they had by then.
        greedy: One greedy answer per version, asked for after its sync.
    """

    engine: VllmEngine
    models: dict[int, PreTrainedModel]
    num_workers: int = 48
    max_tokens: int = 260
    make: Callable[[int], PreTrainedModel] = make_model
    vocab_size: int = NUM_DIGITS
    sent: Callable[[int], Change] = lambda _: list
    differ_everywhere: bool = True
    finished: list[Answer] = field(default_factory=list)
    aborted: list[Answer] = field(default_factory=list)
    greedy: dict[int, Answer] = field(default_factory=dict)
    _serial: Any = field(default_factory=itertools.count)
    _source: random.Random = field(default_factory=lambda: random.Random(0))

    async def through(self, num_swaps: int) -> None:
        """Load `num_swaps` versions one after another with requests in flight all the while."""
        first, is_over = max(self.models) + 1, asyncio.Event()
        async with asyncio.TaskGroup() as workers:
            for _ in range(self.num_workers):
                workers.create_task(self._work(is_over))
            await self._ask_greedily()
            for number in range(first, first + num_swaps):
                await self._pass(number, workers)
            is_over.set()

    async def _pass(self, number: int, workers: asyncio.TaskGroup) -> None:
        """Cross one swap; some requests are aborted after it, others cancelled in the middle of it."""
        victims = [self._begin_victim(workers) for _ in range(3)]
        cancelled = [workers.create_task(self._ask(self.max_tokens)) for _ in range(3)]
        await self._ask_greedily()  # so that all of them have tokens of the version before
        await until_under_way(self.engine, 0.8 * self.num_workers)
        self.models[number] = self.make(number)
        model, version = self.models[number], PolicyVersion(number, number)
        with stage(model, version, probe_of(model), self.sent(number)) as staged:
            swap = asyncio.create_task(self.engine.swap(staged))
            while not await self.engine._llm.is_paused() and not swap.done():
                await asyncio.sleep(0)
            for task in cancelled:
                task.cancel()
            await swap
        await self._ask_greedily()
        await self.engine._llm.abort(victims)

    async def _work(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            self.finished.append(await self._ask(self._source.randint(20, self.max_tokens)))

    async def _ask(self, num_tokens: int) -> Answer:
        prompt = [self._source.randrange(self.vocab_size) for _ in range(self._source.randint(3, 20))]
        serial = next(self._serial)
        sampling = Sampling(1.0, num_tokens, serial, ignores_eos=True)
        return Answer(prompt, await self.engine.generate(prompt, sampling, f"flight-{serial}"))

    async def _ask_greedily(self) -> None:
        prompt = [3, 1, 4, 1, 5]
        sampling = Sampling(0.0, NUM_GREEDY_TOKENS, 0, ignores_eos=True)
        completion = await self.engine.generate(prompt, sampling, f"greedy-{next(self._serial)}")
        self.greedy[self.engine.serving.number] = Answer(prompt, completion)

    def _begin_victim(self, workers: asyncio.TaskGroup) -> str:
        request_id = f"victim-{next(self._serial)}"

        async def run() -> None:
            sampling = Sampling(1.0, VICTIM_TOKENS, 1, ignores_eos=True)
            output = await self.engine._final_output([2, 7, 1], sampling, request_id)
            assert output.outputs[0].finish_reason == "abort"
            self.aborted.append(Answer([2, 7, 1], read_output(output)))

        workers.create_task(run())
        return request_id

    # --- the judge --------------------------------------------------------------------------------

    @property
    def crossings(self) -> Counter[int]:
        """How many requests had tokens on both sides of the swap to each version."""
        answers = [*self.finished, *self.aborted]
        return Counter(span.version for answer in answers for span in answer.completion.spans[1:])

    def check_spans(self) -> None:
        """Spans cover each response without a gap, no version was jumped over, and no two share a tensor."""
        assert_all_differ(self.models.values(), in_every_tensor=self.differ_everywhere)
        for answer in [*self.finished, *self.aborted]:
            spans = answer.completion.spans
            ends = [0, *(span.end for span in spans)]
            assert [span.start for span in spans] == ends[:-1]
            assert ends[-1] == len(answer.completion.token_ids) == len(answer.completion.logprobs)
            numbers = [span.version for span in spans]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))

    def check_logprobs(self) -> int:
        """Each token's log-prob is Hugging Face's under the version that its span names, and no other's.

        Returns the number of tokens compared.
        """
        num_tokens, tied = 0, []
        for answer in [*self.finished, *self.aborted]:
            for span in answer.completion.spans:
                distance = self.distance(answer, span, span.version)
                if distance >= TOLERANCE:
                    seen = [*answer.prompt, *answer.completion.token_ids.tolist()[: span.end - 1]]
                    nearest = nearest_experts(self.models[span.version], seen)
                    assert nearest < TIE, f"{distance:.3g} nats, {span} of {answer}"
                    tied.append(answer)
                num_tokens += span.end - span.start
                if span.version and span.end - span.start >= TELLING_TOKENS:
                    assert self.distance(answer, span, span.version - 1) > 100 * TOLERANCE
        assert len(tied) <= MAX_TIED * len(self.finished)
        return num_tokens

    def distance(self, answer: Answer, span: Span, number: int) -> float:
        """Return the largest difference of the span's log-probs to those under version `number`."""
        wanted = logprobs_of(self.models[number], answer.prompt, answer.completion.token_ids.tolist())
        found = torch.tensor(answer.completion.logprobs[span.start : span.end])
        return float((found - wanted[span.start : span.end]).abs().max())

    def check_greedy(self) -> None:
        """After each sync greedy answers are, token by token, Hugging Face's on the new weights."""
        for number, answer in self.greedy.items():
            wanted = greedy_of(self.models[number], answer.prompt, NUM_GREEDY_TOKENS, NO_EOS)
            assert answer.completion.token_ids.tolist() == wanted, f"version {number}"
            assert [span.version for span in answer.completion.spans] == [number]


@torch.no_grad()
def nearest_experts(model: PreTrainedModel, token_ids: Sequence[int]) -> float:
    """Return how near the first expert left out came to the last one chosen; infinite without experts."""
    gaps = [math.inf]

    def note(_router: torch.nn.Module, _inputs: object, output: Any) -> None:
        scores_TE = (output[0] if isinstance(output, tuple) else output).flatten(0, -2)
        best_TE, num_chosen = scores_TE.sort(-1, descending=True).values, model.config.num_experts_per_tok
        gaps.append(float((best_TE[:, num_chosen - 1] - best_TE[:, num_chosen]).min()))

    routers = [module for name, module in model.named_modules() if name.endswith(".gate")]
    hooks = [router.register_forward_hook(note) for router in routers]
    model(torch.tensor([list(token_ids)]))
    for hook in hooks:
        hook.remove()
    return min(gaps)


def settings_for(folder: str, **changes: Any) -> VllmSettings:
    """Return settings with room for the requests of a flight."""
    return VllmSettings(folder, "float32", 1024, 64, 64 << 20, **changes)
