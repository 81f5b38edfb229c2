"""The gateway as a part of a replica: made with it, started after its engine, stopped with it.

consumes: HTTP of agents; grants of the replica's lease loop (`manager.run`)
waits for: agents, until a group's deadline
unblocked by: rewards, failures, deadlines, a drain
produces: groups, as a `GroupRunner` does
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError, ServiceFailed
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.service import ServiceContext
from asyncrl.core.status.replica import GatewayStatus
from rollout_service.engine.protocol import Engine, EngineDied
from rollout_service.engine.vllm.engine import VllmEngine
from rollout_service.engine.vllm.features import ENGINE, Feature, check_features
from rollout_service.engine.vllm.objects import ServingClient
from rollout_service.gateway.keys import GatewayKey, read_key
from rollout_service.gateway.rules import Rules
from rollout_service.gateway.sessions import SessionManager

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from rollout_service.data.prompts import PromptSet
    from rollout_service.gateway.recorder import Meter, Recorder

log = logging.getLogger(__name__)

OPENAI = "vllm.entrypoints.openai"
NEEDED = (
    Feature(f"{OPENAI}.chat_completion.api_router", "create_chat_completion", ("request", "raw_request")),
    Feature(f"{OPENAI}.completion.api_router", "create_completion", ("request", "raw_request")),
    Feature(f"{OPENAI}.chat_completion.serving", "OpenAIServingChat", ("online_renderer", "chat_template")),
    Feature(f"{OPENAI}.completion.serving", "OpenAIServingCompletion", ("online_renderer",)),
    Feature(f"{OPENAI}.models.serving", "OpenAIServingModels", ("engine_client", "base_model_paths")),
    Feature("vllm.renderers.online_renderer", "OnlineRenderer", ("model_config", "renderer")),
    Feature(f"{OPENAI}.chat_completion.protocol", "ChatCompletionRequest", ("session_id",)),
    Feature(f"{OPENAI}.completion.protocol", "CompletionRequest", ("session_id",)),
    Feature("vllm.entrypoints.serve", "create_error_response"),
    Feature("vllm.exceptions", "GenerationError"),
    Feature("vllm.engine.protocol", "EngineClient", ("renderer", "input_processor", "model_config")),
    Feature(ENGINE, "AsyncLLM.generate", ("session_id",)),
    Feature(ENGINE, "AsyncLLM.check_admission", ("n",)),
    Feature(ENGINE, "AsyncLLM.errored"),
    Feature(ENGINE, "AsyncLLM.dead_error"),
    Feature("vllm.outputs", "CompletionOutput", ("stop_reason",)),
)
LOOPBACK = "127.0.0.1"
MODEL = "policy"
"""Name of the model that clients read; they may ask for it by any."""
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 2.0
WATCH_S = 0.5
IDLE_S = 5.0
"""From when on it is told that no agent asks: one that got no group asks again after its own pause."""


class Llm(Protocol):
    """Interface of `VllmEngine` that the gateway needs."""

    @property
    def client(self) -> ServingClient: ...

    def cache_salt(self) -> str | None: ...

    def death(self) -> EngineDied: ...


@dataclass(frozen=True)
class GatewaySettings:
    """Address of the gateway, and the deadline of a group of sessions."""

    host: str
    port: int
    deadline_s: float


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
        self.manager = SessionManager(prompts, rules, settings.deadline_s, self._abort)

    async def start(self, on_demand: Callable[[], None]) -> None:
        """Listen. `on_demand` is called when an agent waits for a group.

        Raises:
            ConfigError: The port is taken.
            EngineError: vLLM lacks what serving needs.
            ServiceFailed: The server did not come up.
        """
        from rollout_service.gateway.server import make_server

        self.manager.on_demand = on_demand
        check_features(NEEDED)
        listener = _listen(self._settings.host, self._settings.port)
        self.url = "http://{}:{}".format(*listener.getsockname()[:2])
        self._server = server = make_server(self.build_app(), STOP_DEADLINE_S)
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
        from rollout_service.gateway.app import Routes, Serving, build_app
        from rollout_service.gateway.recorder import Recorder

        recorder = Recorder(self._engine.client, self.manager, self._meter, self._engine.cache_salt)
        routes = Routes(
            self.manager,
            Serving(self.manager.counters),
            self._key,
            lambda: self.url,
            lambda: not recorder.errored,
        )
        app = build_app(routes)
        for name, handler in _build_serving(recorder).items():
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
        engine: Itself, a `VllmEngine`: the serving classes call vLLM's client.
    """
    rollout, host = context.config.rollout, context.config.launcher.host or LOOPBACK
    if rollout.gateway is None:
        return None
    assert isinstance(engine, VllmEngine), "find_conflicts refuses other engines"
    port = rollout.gateway.port and rollout.gateway.port + context.index
    settings = GatewaySettings(host, port, rollout.gateway.session_deadline_s)
    rules = Rules(
        run_seed=context.config.run.seed,
        group_size=rollout.group_size,
        temperature=rollout.temperature,
        max_tokens=rollout.max_tokens,
        max_prompt_tokens=context.config.data.max_prompt_tokens,
        masks_cut=rollout.truncated == "mask",
        is_strict=rollout.gateway.strict,
    )
    return Gateway(settings, rules, read_key(os.environ, host), prompts, engine, meter)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
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


def _build_serving(client: Recorder) -> dict[str, object]:
    """Return vLLM's serving objects by the names under which its handlers look for them."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.renderers.online_renderer import OnlineRenderer

    models = OpenAIServingModels(client, [BaseModelPath(name=MODEL, model_path=MODEL)])
    template: dict[str, object] = {"chat_template": None, "chat_template_content_format": "auto"}
    renderer = OnlineRenderer(client.model_config, client.renderer, request_logger=None, **template)
    common: dict[str, object] = {"online_renderer": renderer, "request_logger": None}
    return {
        "openai_serving_models": models,
        "openai_serving_chat": OpenAIServingChat(client, models, "assistant", **common, **template),
        "openai_serving_completion": OpenAIServingCompletion(client, models, **common),
    }
