"""Experts that each token was sent to, as the real vLLM tells them: those that Hugging Face chooses."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from asyncrl.core.experts import ITEM_BYTES, has_row, no_expert
from asyncrl.core.staleness import PolicyVersion, Span
from rollout_service.engine.protocol import Completion, Interrupted, Sampling
from rollout_service.engine.vllm.engine import VllmEngine, _sampling_params, read_output
from rollout_service.engine.vllm.objects import TokenPrompt
from tests.rollout.engine.engine_parts import LoopThread, stage
from tests.rollout.engine.families import WIDTHS, Form, start_engine
from tests.rollout.replica.flight_parts import TIE, until_under_way

FORMS = (
    Form("qwen3_moe", is_tied=True, vocab_size=96),
    Form("mixtral", is_tied=False, vocab_size=87),
    Form("olmoe", is_tied=False, vocab_size=96, width=WIDTHS[0]),
)
NUM_EXPERTS, NUM_REQUESTS = 4, 24
MAX_TIED = 0.002
"""Share of (token, layer) pairs whose scores may be nearer than rounding."""
LONG_PROMPT = [index * 7 % 80 for index in range(400)]


class Served:
    """An engine that records experts, and the models of its versions."""

    def __init__(self, form: Form, folder: Path, loop: LoopThread, **options: Any) -> None:
        self.form, self.loop = form, loop
        self.models: dict[int, PreTrainedModel] = {0: form.build(0)}
        self.engine: VllmEngine = start_engine(
            self.models[0], folder, loop, num_experts=NUM_EXPERTS, **options
        )

    async def ask(self, prompt: Sequence[int], num_tokens: int, name: str) -> Completion:
        sampling = Sampling(1.0, num_tokens, len(name), ignores_eos=True)
        return await self.engine.generate(prompt, sampling, name)

    def begin_many(self, name: str, num_tokens: int) -> list[tuple[list[int], asyncio.Task[Completion]]]:
        prompts = [[(n * 5 + i * 3) % 80 for i in range(3 + n)] for n in range(NUM_REQUESTS)]
        return [
            (prompt, asyncio.create_task(self.ask(prompt, num_tokens, f"{name}.{n}")))
            for n, prompt in enumerate(prompts)
        ]

    async def swap(self) -> None:
        number = max(self.models) + 1
        self.models[number] = self.form.build(number)
        with stage(self.models[number], PolicyVersion(number, number)) as staged:
            await self.engine.swap(staged)


def opened(form: Form, folder: Path, **options: Any) -> Iterator[Served]:
    loop = LoopThread()
    served = Served(form, folder, loop, **options)
    try:
        yield served
    finally:
        loop.call(served.engine.shutdown())
        loop.close()


@pytest.fixture(
    scope="module", params=[FORMS[0], *[pytest.param(f, marks=pytest.mark.long) for f in FORMS[1:]]], ids=str
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from opened(request.param, tmp_path_factory.mktemp("model"), caches_prefixes=True)


@torch.no_grad()
def routes_of(model: PreTrainedModel, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what Hugging Face's routers choose, [M, L, K], and by how much of a score, [M, L]."""
    chosen, gaps = [], []

    def note(_router: torch.nn.Module, _inputs: object, output: Any) -> None:
        scores = (output[0] if isinstance(output, tuple) else output).flatten(0, -2)
        best = scores.sort(-1, descending=True)
        num = model.config.num_experts_per_tok
        chosen.append(best.indices[:, :num].sort(-1).values)
        gaps.append(best.values[:, num - 1] - best.values[:, num])

    hooks = [
        module.register_forward_hook(note) for name, module in model.named_modules() if name.endswith(".gate")
    ]
    model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1), torch.stack(gaps, 1)


def check(served: Served, prompt: Sequence[int], found: Completion, num_none: int = 0) -> tuple[int, int]:
    """Check all rows but `num_none` at the beginning; return how many pairs were compared, and tied."""
    ids = [*prompt, *found.token_ids.tolist()]
    rows = found.experts
    assert rows is not None and rows.shape == (len(ids), 2, 2) and rows.dtype == np.uint8
    assert has_row(rows).tolist() == [False] * num_none + [True] * (len(ids) - 1 - num_none) + [False]
    num_pairs = num_tied = 0
    for version, start, end in rows_by_version(found.spans, len(prompt)):
        chosen, gaps = routes_of(served.models[version], ids[:end])
        start = max(start, num_none)
        mine = torch.from_numpy(np.sort(rows[start:end].astype(np.int64), -1))
        is_other = (mine != chosen[start:end]).any(-1)
        assert (gaps[start:end][is_other] < TIE).all()
        num_pairs, num_tied = num_pairs + is_other.numel(), num_tied + int(is_other.sum())
    return num_pairs, num_tied


def rows_by_version(spans: Sequence[Span], num_prompt: int) -> Iterator[tuple[int, int, int]]:
    """Yield (version, start, end) of the rows whose pass sampled the next token under that version."""
    for span in spans:
        start = span.start + num_prompt - 1 if span.start else 0
        yield span.version, start, span.end + num_prompt - 1


def check_all(served: Served, asked: Sequence[tuple[Sequence[int], Completion]], num_none: int = 0) -> None:
    counts = [check(served, prompt, completion, num_none) for prompt, completion in asked]
    num_pairs, num_tied = (sum(numbers) for numbers in zip(*counts, strict=True))
    assert num_pairs > 200 and num_tied <= MAX_TIED * num_pairs
    rows = np.concatenate([completion.experts[:-1].reshape(-1) for _, completion in asked])
    assert set(rows.tolist()) - {no_expert(1)} == set(range(NUM_EXPERTS)), "every expert was chosen"


async def all_of(
    asked: Sequence[tuple[list[int], asyncio.Task[Completion]]],
) -> list[tuple[list[int], Completion]]:
    return [(prompt, await task) for prompt, task in asked]


def test_each_token_has_the_experts_that_hugging_face_chooses(served: Served):
    async def run() -> list[tuple[list[int], Completion]]:
        return await all_of(served.begin_many(f"plain.{max(served.models)}", 40))

    check_all(served, served.loop.call(run()))


def test_rows_before_a_swap_stay_those_of_the_pass_that_sampled(served: Served):
    """The swap takes the KV cache of all that run, and the new weights compute their tokens once more."""

    async def run() -> list[tuple[list[int], Completion]]:
        asked = served.begin_many("crossing", 300)
        for _ in range(2):
            await until_under_way(served.engine, 8)
            await served.swap()
        return await all_of(asked)

    found = served.loop.call(run())
    assert sum(len(completion.spans) > 1 for _, completion in found) >= 8
    check_all(served, found)


def test_a_prefix_found_in_the_cache_has_no_rows(served: Served):
    async def run() -> list[Completion]:
        return [await served.ask(LONG_PROMPT, 60, f"shared.{n}") for n in range(3)]

    first, *others = served.loop.call(run())
    check_all(served, [(LONG_PROMPT, first)])
    for found in others:
        assert check(served, LONG_PROMPT, found, num_none=384)[1] <= 1, "whole blocks of 128"


def test_an_interrupted_answer_has_the_rows_of_its_beginning(served: Served):
    async def run() -> list[tuple[list[int], Completion]]:
        asked = served.begin_many(f"interrupted.{max(served.models)}", 700)
        await until_under_way(served.engine, 12)
        await served.engine.interrupt()
        found = []
        for prompt, task in asked:
            with pytest.raises(Interrupted) as error:
                await task
            if len(error.value.completion.token_ids):
                found.append((prompt, error.value.completion))
            else:
                assert error.value.completion.experts is None
        return found

    found = served.loop.call(run())
    assert len(found) >= 12
    check_all(served, found)


@pytest.mark.long
def test_two_workers_that_share_a_model_tell_the_same_rows(tmp_path: Path):
    for served in opened(FORMS[0], tmp_path, workers=2):

        async def run(served: Served = served) -> list[tuple[list[int], Completion]]:
            asked = served.begin_many("two", 120)
            await until_under_way(served.engine, 8)
            await served.swap()
            return await all_of(asked)

        check_all(served, served.loop.call(run()))


@pytest.mark.long
def test_prefills_in_chunks_and_preempted_requests_lose_no_row(tmp_path: Path):
    """Nine requests of 520 tokens do not fit a cache of 4,096: some lose it, and are computed again.

    Without a seed: on a CPU vLLM 0.32 ends when a request with one is prefilled in chunks.
    """
    options = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48, "kv_cache_memory_bytes": 2 << 20}
    prompts = [LONG_PROMPT[n : n + 220] for n in range(9)]
    for served in opened(FORMS[0], tmp_path, engine_args=options):
        engine = served.engine

        async def ask(number: int, engine: VllmEngine = engine) -> tuple[list[int], Completion]:
            params: Any = _sampling_params(Sampling(1.0, 300, 0, ignores_eos=True))
            params.seed = None
            prompt = TokenPrompt(type="token", prompt_token_ids=prompts[number])
            async for output in engine.client.generate(prompt, params, f"chunks.{number}"):
                found = output
            return prompts[number], read_output(found, NUM_EXPERTS)

        async def run() -> list[tuple[list[int], Completion]]:
            return await asyncio.gather(*map(ask, range(len(prompts))))

        check_all(served, served.loop.call(run()))
        assert engine.cache_status().preemptions > 0


class _Request:
    request_id = "one"

    def __init__(self, is_over: bool = False) -> None:
        self.is_finished = lambda: is_over


def _rows(*numbers: int) -> Any:
    return np.array(numbers, ITEM_BYTES[1])[:, None, None]


def test_the_book_hands_each_row_out_once_and_keeps_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)  # that module takes it away
    book = importlib.import_module("rollout_service.engine.vllm.core.routed").RouteBook()
    book.take_in("one", 2, _rows(5))  # two tokens were in the prefix cache
    book.take_in("one", 3, _rows(6, 7))  # a chunk without an output
    assert book.take_output(_Request(), None).ravel().tolist() == [255, 255, 5, 6, 7]
    book.request_finished(_Request())  # preempted: it goes on
    book.take_in("one", 0, _rows(1, 1, 1, 1, 1, 8))
    assert book.take_output(_Request(), None).ravel().tolist() == [8]
    assert book.take_output(_Request(), None) is None
    book.request_finished(_Request(is_over=True))
    book.take_in("one", 0, _rows(9))
    assert book.take_output(_Request(), None).ravel().tolist() == [9], "another request of the same name"
