"""The gateway as a part of a replica: made with it, started after its engine, stopped with it.

consumes: HTTP of agents; grants of the replica's lease loop (`manager.run`)
waits for: agents, until a group's deadline
unblocked by: rewards, failures, deadlines, a drain
produces: groups, as a `GroupRunner` does
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError, ServiceFailed
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.service import ServiceContext
from asyncrl.core.status.replica import GatewayStatus
from rollout_service.engine.protocol import Engine
from rollout_service.engine.sglang.engine import SglangEngine
from rollout_service.engine.vllm.engine import VllmEngine
from rollout_service.engine.vllm.features import ENGINE, Feature, check_features
from rollout_service.gateway.keys import GatewayKey, read_key
from rollout_service.gateway.parsers import Parsers
from rollout_service.gateway.rules import Rules
from rollout_service.gateway.sessions import SessionManager

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from rollout_service.data.prompts import PromptSet
    from rollout_service.gateway.recorder import Llm, Meter

log = logging.getLogger(__name__)

OPENAI = "vllm.entrypoints.openai"
ANTHROPIC = "vllm.entrypoints.anthropic"
PARSED = ("online_renderer", "chat_template", "tool_parser", "reasoning_parser", "enable_auto_tools")
NEEDED = (
    *(
        Feature(f"{module}.api_router", name, ("request", "raw_request"))
        for module, name in (
            (f"{OPENAI}.chat_completion", "create_chat_completion"),
            (f"{OPENAI}.completion", "create_completion"),
            (f"{OPENAI}.responses", "create_responses"),
            (ANTHROPIC, "create_messages"),
            (ANTHROPIC, "count_tokens"),
        )
    ),
    *(
        Feature(f"{module}.protocol", name)
        for module, name in (
            (f"{OPENAI}.chat_completion", "ChatCompletionRequest"),
            (f"{OPENAI}.completion", "CompletionRequest"),
            (f"{OPENAI}.responses", "ResponsesRequest"),
            (ANTHROPIC, "AnthropicMessagesRequest"),
            (ANTHROPIC, "AnthropicCountTokensRequest"),
        )
    ),
    Feature(f"{OPENAI}.chat_completion.serving", "OpenAIServingChat", PARSED),
    Feature(f"{OPENAI}.chat_completion.serving", "OpenAIServingChat.chat_completion_full_generator"),
    Feature(f"{OPENAI}.chat_completion.serving", "OpenAIServingChat.chat_completion_stream_generator"),
    Feature(f"{OPENAI}.completion.serving", "OpenAIServingCompletion", ("online_renderer",)),
    Feature(f"{OPENAI}.responses.serving", "OpenAIServingResponses", PARSED),
    Feature(f"{OPENAI}.responses.serving", "OpenAIServingResponses.responses_full_generator"),
    Feature(f"{OPENAI}.responses.serving", "OpenAIServingResponses.responses_stream_generator"),
    Feature(f"{OPENAI}.responses.utils", "construct_input_messages", ("request_input",)),
    Feature(f"{OPENAI}.responses.utils", "convert_tool_responses_to_completions_format", ("tool",)),
    Feature(f"{ANTHROPIC}.serving", "AnthropicServingMessages", PARSED),
    Feature(f"{ANTHROPIC}.serving", "AnthropicServingMessages._get_disabled_thinking_effort"),
    Feature(f"{OPENAI}.models.serving", "OpenAIServingModels", ("engine_client", "base_model_paths")),
    Feature("vllm.renderers.online_renderer", "OnlineRenderer", ("model_config", "renderer", "tool_parser")),
    Feature("vllm.renderers.online_renderer", "OnlineRenderer.preprocess_chat", ("messages", "tool_dicts")),
    Feature("vllm.renderers.online_renderer", "OnlineRenderer.preprocess_completion", ("prompt_input",)),
    Feature("vllm.parser.abstract_parser", "Parser.parse", ("model_output", "request")),
    Feature("vllm.parser.abstract_parser", "Parser.adjust_request", ("request",)),
    Feature("vllm.parser.abstract_parser", "Parser.parse_delta", ("request", "prompt_token_ids")),
    Feature("vllm.entrypoints.serve", "create_error_response"),
    Feature("vllm.exceptions", "GenerationError"),
    Feature("vllm.engine.protocol", "EngineClient", ("renderer", "input_processor", "model_config")),
    Feature(ENGINE, "AsyncLLM.check_admission", ("n",)),
    Feature(ENGINE, "AsyncLLM.errored"),
    Feature(ENGINE, "AsyncLLM.dead_error"),
    Feature("vllm.outputs", "CompletionOutput", ("stop_reason",)),
)
LOOPBACK = "127.0.0.1"
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 2.0
WATCH_S = 0.5
IDLE_S = 5.0
"""From when on it is told that no agent asks: one that got no group asks again after its own pause."""


@dataclass(frozen=True)
class GatewaySettings:
    """Address of the gateway, the deadline of a group of sessions, who reads the answers, and how long after
    a restart agents may come back; 0 if their sessions are not recorded.
    """

    host: str
    port: int
    deadline_s: float
    parsers: Parsers
    return_s: float = 0.0


class Gateway:
    """Serves agents over HTTP from the event loop of its replica.

    Args:
        engine: Started before `start`.
        meter: Counts what agents have the engine do.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        rules: Rules,
        key: GatewayKey,
        prompts: PromptSet,
        engine: Llm,
        meter: Meter,
    ) -> None:
        self._settings = settings
        self._key = key
        self._engine = engine
        self._meter = meter
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""
        self.manager = SessionManager(
            prompts, rules, settings.deadline_s, self._abort, return_s=settings.return_s
        )

    async def start(self, on_demand: Callable[[], None]) -> None:
        """Listen. `on_demand` is called when an agent waits for a group.

        Raises:
            ConfigError: The port is taken, or a parser is not vLLM's.
            EngineError: vLLM lacks what serving needs.
            ServiceFailed: The server did not come up.
        """
        from rollout_service.gateway.server import make_server

        self.manager.on_demand = on_demand
        check_features(NEEDED)
        app = self.build_app()
        await app.state.anthropic_serving_messages._get_disabled_thinking_effort()  # else the first call asks
        gc.collect()
        gc.freeze()  # of vLLM's serving, as its own server does: no collection needs to visit it again
        listener = _listen(self._settings.host, self._settings.port)
        self.url = "http://{}:{}".format(*listener.getsockname()[:2])
        self._server = server = make_server(app, STOP_DEADLINE_S)
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                while not server.started:
                    self._check_serving()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            what = f"the gateway did not listen on {self.url} within {START_DEADLINE_S:g} s"
            raise ServiceFailed(what) from None
        log.info("agents are served at %s", self.url)

    async def watch(self) -> None:
        """Look after what agents need, until cancelled: no call in flight may be there to meet its end.

        Raises:
            EngineDied: The engine is gone.
            ServiceFailed: The server has ended and nobody stopped it.
        """
        while True:
            if self._engine.client.errored:
                raise self._engine.death()
            self._check_serving()
            await asyncio.sleep(WATCH_S)

    def _check_serving(self) -> None:
        is_stopping = self._server is not None and self._server.should_exit
        if self._serving is None or not self._serving.done() or is_stopping:
            return
        error = None if self._serving.cancelled() else self._serving.exception()
        raise ServiceFailed(f"the gateway's server at {self.url} has ended: {error}") from error

    def build_app(self) -> FastAPI:
        """Return the app with vLLM's serving objects, over the recorder."""
        from rollout_service.gateway.app import Routes, build_app
        from rollout_service.gateway.recorder import Recorder
        from rollout_service.gateway.serving.apis import Serving
        from rollout_service.gateway.serving.recorded import build_serving

        parsers = self._settings.parsers
        recorder = Recorder(self._engine, self.manager, self._meter)
        routes = Routes(
            self.manager,
            Serving(self.manager, parsers.tools is not None),
            self._key,
            lambda: self.url,
            lambda: not recorder.errored,
        )
        app = build_app(routes)
        for name, handler in build_serving(recorder, self.manager.rules, parsers).items():
            setattr(app.state, name, handler)
        return app

    def status(self) -> GatewayStatus:
        """Return where agents reach the gateway, and its sessions, for the replica's status."""
        return self.manager.status(self.url)

    def obstacles(self) -> tuple[Obstacle, ...]:
        """Return, for the replica's status, that no agent asks for a session, while that is so."""
        if self.manager.idle_s < IDLE_S:
            return ()
        what = f"no agent asks for a session at {self.url} (POST /sessions)"
        return (Obstacle("", Cause.NO_AGENT, what),)

    def drain(self) -> None:
        """Give no more sessions out; groups that agents can still complete go on."""
        self.manager.refuse_sessions()

    async def stop(self) -> None:
        """Stop listening; answers in flight have `STOP_DEADLINE_S` to reach their clients."""
        if self._serving is None or self._server is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._serving], timeout=STOP_DEADLINE_S + 1.0)
        if not done:
            self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
        self._serving = None

    async def _abort(self, request_ids: list[str]) -> None:
        await self._engine.client.abort(request_ids)


def check_gateway(config: Config) -> None:
    """Raise ConfigError if the configuration wants a gateway that anybody could use."""
    if config.rollout.gateway is not None:
        read_key(os.environ, config.launcher.host or LOOPBACK)


def build_gateway(
    context: ServiceContext, prompts: PromptSet, engine: Engine, meter: Meter
) -> Gateway | None:
    """Return the gateway of a replica, None if the configuration wants none.

    Args:
        engine: Itself: the serving classes call its client, which is vLLM's over any engine.
    """
    rollout, host = context.config.rollout, context.config.launcher.host or LOOPBACK
    if rollout.gateway is None:
        return None
    assert isinstance(engine, VllmEngine | SglangEngine), "find_conflicts refuses other engines"
    port = rollout.gateway.port and rollout.gateway.port + context.index
    parsers = Parsers(rollout.gateway.tool_call_parser, rollout.gateway.reasoning_parser)
    deadline_s, return_s = rollout.gateway.session_deadline_s, context.config.buffer.lease_s
    settings = GatewaySettings(host, port, deadline_s, parsers, return_s * rollout.resume_partial)
    rules = Rules(
        run_seed=context.config.run.seed,
        group_size=rollout.group_size,
        temperature=rollout.temperature,
        max_tokens=rollout.max_tokens,
        max_prompt_tokens=context.config.data.max_prompt_tokens,
        max_branches=rollout.gateway.max_branches,
        masks_cut=rollout.truncated == "mask",
        is_strict=rollout.gateway.strict,
    )
    return Gateway(settings, rules, read_key(os.environ, host), prompts, engine, meter)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY on no other: 40 ms a call
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the gateway cannot listen on {host}:{port}: {error.strerror}",
            hint="Choose another rollout.gateway.port; replica n listens on the n-th port after it",
        ) from error
    return listener
