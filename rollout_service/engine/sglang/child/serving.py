"""SGLang behind the messages: starts its engine, and does what the adapter asks.

Requests go by the numbers of their messages, each with an end sign: SGLang ends every request whose name
begins with the one that it is told. While it is paused new ones wait here: SGLang could not end them.
"""

from __future__ import annotations

import asyncio
import difflib
import json
from pathlib import Path

import msgspec
import numpy as np
from sglang import Engine
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.server_args import ServerArgs

from rollout_service.engine.sglang.messages import (
    Abort,
    Answer,
    Channel,
    Done,
    Failed,
    Generate,
    Generated,
    Load,
    Loaded,
    Pause,
    Resume,
    Started,
    write_request,
)

UNLOADED, ID_BYTES = "0", 4
Asked = Generate | Abort | Pause | Load | Resume
"""Once SGLang has started."""


def start_engine(arguments: dict[str, object]) -> Engine:
    """Return SGLang's engine. Raises what SGLang raises, and ValueError for arguments that it has not."""
    known = ServerArgs.__struct_fields__
    if unknown := sorted(set(arguments) - set(known)):
        near = {match for name in unknown for match in difflib.get_close_matches(name, known)}
        raise ValueError(f"SGLang has no {', '.join(unknown)}; near: {', '.join(sorted(near)) or 'nothing'}")
    return Engine(**arguments)


class Serving:
    """Answers each message as soon as SGLang has done it; one that fails fails alone."""

    def __init__(self, engine: Engine, channel: Channel[Asked], request_file: Path) -> None:
        self._manager = engine.tokenizer_manager
        self._channel = channel
        self._request_file = request_file
        self._model_path = engine.server_args.model_path
        self._requests: set[int] = set()
        self._aborted: set[int] = set()
        self._is_paused = False
        self._turn = asyncio.Condition()

    async def run(self, number: int) -> None:
        """Say that SGLang has started, in answer to the message `number`, and serve until the end."""
        import psutil

        label = UpdateWeightVersionReqInput(new_version=UNLOADED, abort_all_requests=False)
        await self._manager.update_weight_version(label)
        pids = [child.pid for child in psutil.Process().children(recursive=True)]
        self._channel.send(Started(number, pids))
        async with asyncio.TaskGroup() as group:
            while (ask := await self._channel.receive()) is not None:
                if isinstance(ask, Abort):
                    await self._abort(ask.requests)
                    continue
                if isinstance(ask, Generate):  # before its task: its abort may be read first
                    self._requests.add(ask.number)
                group.create_task(self._answer(ask))

    async def _answer(self, ask: Generate | Pause | Load | Resume) -> None:
        try:
            answer = await self._do(ask)
        except Exception as error:  # SGLang raises ValueError for a request, and anything else for the rest
            answer = Failed(ask.number, f"{type(error).__name__}: {error}")
        self._channel.send(answer)

    async def _do(self, ask: Generate | Pause | Load | Resume) -> Answer:
        if isinstance(ask, Generate):
            return await self._generate(ask)
        if isinstance(ask, Load):
            return await self._load(ask)
        async with self._turn:
            self._is_paused = isinstance(ask, Pause)
            self._turn.notify_all()
        if isinstance(ask, Pause):
            mode = "in_place" if ask.keeps_cache else "retract"
            await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))
        else:
            await self._manager.continue_generation(ContinueGenerationReqInput())
        return Done(ask.number)

    async def _load(self, load: Load) -> Answer:
        """Have the scheduler run `loading.load_staged`, which reads what to load from the file."""
        write_request(self._request_file, load)
        request = UpdateWeightFromDiskReqInput(
            model_path=self._model_path, weight_version=str(load.version), flush_cache=load.flushes_cache
        )
        is_loaded, told, _ = await self._manager.update_weights_from_disk(request)
        if not is_loaded:
            return Failed(load.number, told)
        return Loaded(load.number, json.loads(told.split()[0]))  # SGLang adds a sentence about the label

    async def _generate(self, ask: Generate) -> Answer:
        request = GenerateReqInput(
            rid=_name(ask.number),
            input_ids=np.frombuffer(ask.prompt_ids, np.int32).tolist(),
            sampling_params={
                "temperature": ask.temperature,
                "max_new_tokens": ask.max_tokens,
                "sampling_seed": ask.seed,
                "ignore_eos": ask.ignores_eos,
                "stop_token_ids": ask.stop_ids,
                "stop": ask.stop,
            },
            return_logprob=True,
            stream=ask.is_streamed,
            top_logprobs_num=ask.num_top,
        )
        try:
            async with self._turn:
                await self._turn.wait_for(lambda: not self._is_paused or ask.number in self._aborted)
            if ask.number in self._aborted:
                return Generated(ask.number, b"", b"", [], "abort")
            num_sent = 0
            async for told in self._manager.generate_request(request, None):
                result = read_result(ask.number, told, num_sent)
                if isinstance(result, Generated) and not result.finish_reason:
                    num_sent += len(result.token_ids) // ID_BYTES
                    self._channel.send(result)
        finally:
            self._requests.discard(ask.number)
            self._aborted.discard(ask.number)
        return result

    async def _abort(self, numbers: list[int]) -> None:
        known = self._requests.intersection(numbers)
        async with self._turn:
            self._aborted |= known
            self._turn.notify_all()
        for number in known:
            name = _name(number)
            if (state := self._manager.rid_to_state.get(name)) is not None:
                state.abort_sent = False  # SGLang sends one abort, and loses one that overtakes its request
            self._manager.abort_request(rid=name)


def _name(number: int) -> str:
    return f"{number}."


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None
    output_token_logprobs: list[tuple[float, int, object]] | None = None
    output_top_logprobs: list[list[tuple[float, int, object]] | None] | None = None
    weight_versions: list[_Span] | None = None


class _Result(msgspec.Struct):
    """What is read of a result of SGLang's, or of the next part of one."""

    meta_info: _Meta
    output_ids: list[int]


def read_result(number: int, told: object, num_before: int = 0) -> Answer:
    """Return a result as an answer; a request that SGLang ended for a reason of its own failed.

    Args:
        num_before: Tokens that earlier parts had; the spans alone count them.
    """
    result = msgspec.convert(told, _Result)
    meta, finish = result.meta_info, result.meta_info.finish_reason
    if finish is not None and finish.type == "abort" and finish.status_code is not None:
        return Failed(number, str(finish.message))
    logprobs = [value for value, *_ in meta.output_token_logprobs or ()]
    ids = result.output_ids[: len(logprobs)]
    spans = [
        (int(span.version), max(span.start - num_before, 0), min(span.end - num_before, len(ids)))
        for span in meta.weight_versions or ()
    ]
    top = [one for row in (meta.output_top_logprobs or ())[: len(ids)] for one in row or ()]
    return Generated(
        number,
        np.asarray(ids, np.int32).tobytes(),
        np.asarray(logprobs[: len(ids)], np.float32).tobytes(),
        [span for span in spans if span[1] < span[2]],
        finish.type if finish is not None else "",
        np.asarray([token for _, token, _ in top], np.int32).tobytes(),
        np.asarray([value for value, *_ in top], np.float32).tobytes(),
    )
