"""vLLM's AsyncLLM with nothing around it: requests in, final outputs out, as fast as it takes them.

It samples as a replica does (temperature, seeds, lengths, log-probs) and asks for no more than it must: one
output per request, no text. What is measured against it is therefore all that a replica adds.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from asyncrl.core.config.lengths import parse_lengths
from benchmarks.calibration.engine_curve import sampling_of
from benchmarks.rollout.ways import setting
from benchmarks.rollout.ways.setting import Count, Rate, make_prompt, rate_between
from benchmarks.weight_sync.peers.peers import now_s
from rollout_service.engine.vllm.core import process

PREFIX_TOKENS, PREFIX_RESPONSE_TOKENS, PREFIX_GROUPS = 260, 8, 2
"""On a CPU vLLM caches blocks of 128 tokens, and computes a prompt's last token always."""
ABORT_S = 0.3
"""Until the engine has heard that nobody waits any more."""


class Load:
    """Keeps `in_flight` requests in an engine, and counts what comes out.

    Args:
        prompts: Token ids; each is given `group_size` times, one after the other.
        max_tokens: Length of every response; None draws them as `setting.RESPONSES` says.
    """

    def __init__(self, llm: Any, prompts: list[list[int]], in_flight: int, max_tokens: int | None) -> None:
        self._llm = llm
        self._in_flight = in_flight
        self._max_tokens = max_tokens
        self._lengths = parse_lengths(setting.RESPONSES)
        self._requests = self._draw(prompts)
        self._name = f"{id(self):x}"
        self.num_tokens = 0
        self.num_requests = 0

    def _draw(self, prompts: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
        repeated = (prompt for prompt in itertools.cycle(prompts) for _ in range(setting.GROUP_SIZE))
        return enumerate(repeated)

    def count(self) -> Count:
        num_tokens = self.num_tokens + tokens_in_flight(self._llm)
        return Count(now_s(), num_tokens, self.num_requests, self._in_flight)

    async def run(self) -> None:
        """Generate until cancelled."""
        async with asyncio.TaskGroup() as requests:
            for _ in range(self._in_flight):
                requests.create_task(self._follow_on())

    async def _follow_on(self) -> None:
        while True:
            await self.answer()

    async def answer(self) -> None:
        """Generate one response to the next prompt."""
        number, prompt = next(self._requests)
        request = {"type": "token", "prompt_token_ids": prompt}
        async for output in self._llm.generate(request, self._sampling(number), f"{self._name}.{number}"):
            if output.finished:
                self.num_tokens += len(output.outputs[0].token_ids)
                self.num_requests += 1

    def _sampling(self, seed: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        assert self._lengths is not None
        max_tokens = self._max_tokens or self._lengths.draw_tokens(seed, setting.MAX_TOKENS)
        return sampling_of(seed, max_tokens, RequestOutputKind.FINAL_ONLY)


def tokens_in_flight(llm: Any) -> int:
    """Return how many tokens an AsyncLLM has received of requests that have not ended."""
    states = list(llm.output_processor.request_states.values())
    return sum(state.detokenizer.num_output_tokens() for state in states)


def start_engine(
    folder: Path,
    caches_prefixes: bool,
    kv_cache_bytes: int = setting.KV_CACHE_BYTES,
    stat_loggers: Sequence[Any] = (),
    *,
    tells_iterations: bool = False,
) -> Any:
    """Return an AsyncLLM of the sizes that a replica's has."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=setting.MAX_MODEL_TOKENS,
        max_num_seqs=setting.MAX_SEQUENCES,
        max_num_batched_tokens=8192,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=caches_prefixes,
        enable_chunked_prefill=False,
        disable_log_stats=not stat_loggers,
        enable_logging_iteration_details=tells_iterations,
        enforce_eager=True,
        kv_cache_memory_bytes=kv_cache_bytes,
        distributed_executor_backend="uni",
    )
    with process.forked_cores():
        return AsyncLLM.from_engine_args(arguments, stat_loggers=list(stat_loggers) or None)


class Bare:
    """The engine and its loads, on an event loop in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        before = _children()
        self._llm = self._await(self._start(caches_prefixes=False))
        self._core_pids = sorted(_children() - before)
        self._load: Load | None = None
        self._running: Future[None] | None = None

    async def _start(self, caches_prefixes: bool) -> Any:
        return start_engine(self._folder, caches_prefixes)

    def _await(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def core_pids(self) -> list[int]:
        """Return the processes that compute."""
        return self._core_pids

    def begin(self) -> None:
        """Put the load on; it stays."""
        numbers = range(setting.NUM_PROMPTS)
        prompts = [_ids(make_prompt(number, setting.PROMPT_TOKENS)) for number in numbers]
        self._load = Load(self._llm, prompts, setting.IN_FLIGHT, None)
        self._running = asyncio.run_coroutine_threadsafe(self._load.run(), self._loop)

    def count(self) -> Count:
        """Return what the load has got so far; raises what ended it."""
        assert self._load is not None and self._running is not None, "begin comes first"
        if self._running.done():
            self._running.result()
        return self._load.count()

    def compare_prefixes(self, num_turns: int) -> dict[str, list[Rate]]:
        """Return the rates on long prompts that groups share, without and with the prefix cache, in turns."""
        self._end()
        engines = {"off": self._llm, "on": self._await(self._start(caches_prefixes=True))}
        rates: dict[str, list[Rate]] = {name: [] for name in engines}
        for turn, (name, llm) in itertools.product(range(num_turns + 1), engines.items()):
            numbers = range(PREFIX_GROUPS * turn, PREFIX_GROUPS * (turn + 1))  # no prompt comes twice
            prompts = [_ids(make_prompt(number, PREFIX_TOKENS)) for number in numbers]
            found = self._await(_answer_all(Load(llm, prompts, 0, PREFIX_RESPONSE_TOKENS), len(prompts)))
            rates[name] += [found] * bool(turn)  # the first turn warms up
        self._await(_shut_down(engines["on"]))
        return rates

    def _end(self) -> None:
        """Take the load off."""
        if self._running is not None and self._running.cancel():
            self._await(asyncio.sleep(ABORT_S))

    def close(self) -> None:
        self._end()
        self._await(_shut_down(self._llm))


async def _answer_all(load: Load, num_prompts: int) -> Rate:
    """Return the rates of a load whose groups are all given at once."""
    before = load.count()
    await asyncio.gather(*(load.answer() for _ in range(num_prompts * setting.GROUP_SIZE)))
    return rate_between(before, load.count())


async def _shut_down(llm: Any) -> None:
    """End an engine from its own event loop, where it stops listening to its core first."""
    llm.shutdown(timeout=1.0)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _ids(text: str) -> list[int]:
    """Return made-up token ids for a text: a letter is a token, as for the benchmark's tokenizer."""
    return [ord(letter) for letter in text]
