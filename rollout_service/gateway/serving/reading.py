"""vLLM's parsers of answers, each given what it can read, and kept from failing.

Owns the difference between a parser in vLLM's server and the same one in the gateway. Invariant: an answer
that a parser fails at is the text that it is.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from openai.types.responses import FunctionTool
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import convert_tool_responses_to_completions_format

from rollout_service.gateway.conversation.session import Call

BROKEN = (ValueError, LookupError, TypeError, AttributeError)
"""Errors of vLLM's parsers at an answer that is not in their format."""


def adapt(parser_class: type, counters: Counter[str], current: Callable[[], Call | None]) -> type:
    """Return vLLM's parser, made in the task of the `current` call, with three differences.

    It leaves an answer which it fails at as the text that it is: a few raise at a broken call. It gets the
    tools of a response as a chat has them, the only form that six know. And of a prompt it sees what follows
    the recorded turns: some look for the end of the thought everywhere, and find that of an earlier one.
    """

    class Parser(parser_class):
        def __init__(self, tokenizer: object, tools: Sequence[object] | None = None, **more: object) -> None:
            self._chat_tools = tools and [_as_in_chats(tool) for tool in tools]
            super().__init__(tokenizer, self._chat_tools, **more)
            self._num_recorded = 0 if (call := current()) is None else call.num_recorded

        def adjust_request(self, request: ResponsesRequest) -> object:
            with self._as_chat(request):
                return super().adjust_request(request)

        def parse(self, model_output: str, request: ResponsesRequest, *args: object, **kw: object) -> object:
            try:
                with self._as_chat(request):
                    return super().parse(model_output, request, *args, **kw)
            except BROKEN:
                counters["answers_not_parsed"] += 1
                return None, model_output, []

        def parse_delta(
            self, *, request: ResponsesRequest, prompt_token_ids: Sequence[int] | None, **more: object
        ) -> object:
            new_ids = prompt_token_ids and prompt_token_ids[self._num_recorded :]
            with self._as_chat(request):
                return super().parse_delta(request=request, prompt_token_ids=new_ids, **more)

        @contextlib.contextmanager
        def _as_chat(self, request: ResponsesRequest) -> Iterator[None]:
            tools, request.tools = request.tools, self._chat_tools
            try:
                yield
            finally:
                request.tools = tools

    return Parser


def _as_in_chats(tool: object) -> object:
    if not isinstance(tool, FunctionTool):
        return tool
    return convert_tool_responses_to_completions_format(tool.model_dump())
