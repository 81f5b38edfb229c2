"""A scripted engine under vLLM's real front end: it samples given tokens, and the gateway serves them.

Rendering, input processing, detokenizing, parsing and serving are vLLM's and the gateway's own; only the
engine core, which would sample from a model, is a script. No replica and no buffer are around it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
from transformers import PreTrainedTokenizerFast
from vllm.config import ModelConfig, VllmConfig
from vllm.renderers.hf import HfRenderer
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.experience import Group
from asyncrl.core.runtime.clock import SystemClock
from rollout_service.data.prompts import Prompt, PromptSet, TokenizedPrompt
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.protocol import EngineDied
from rollout_service.engine.scripted.engine import ScriptedEngine
from rollout_service.gateway.gateway import Gateway, GatewaySettings
from rollout_service.gateway.keys import read_key
from rollout_service.gateway.parsers import Parsers
from rollout_service.gateway.rules import Rules

LOGPROB, VERSION, MAX_TOKENS = -0.5, "1", 3_000
GRANT = LeaseGrant(ticket=5, attempt=1, source=0, pass_number=0, index=0, seed=0, lease_s=60.0)
RULES = Rules(0, 2, 1.0, max_tokens=MAX_TOKENS, max_prompt_tokens=1_000, max_branches=4)


class ScriptedClient:
    """vLLM's client of an engine (`ServingClient`) that answers turn n of every session with `script[n]`.

    Attributes:
        asked: Ids of each prompt that it was given, and its sampling parameters.
    """

    errored = False

    def __init__(
        self, config: VllmConfig, tokenizer: PreTrainedTokenizerFast, script: Sequence[Sequence[int]]
    ) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = HfRenderer(config, get_cached_tokenizer(tokenizer))
        self.input_processor = InputProcessor(config, self.renderer)
        self._outputs = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self._script = script
        self.asked: list[tuple[list[int], Any]] = []

    @property
    def dead_error(self) -> BaseException:
        raise AssertionError("a script does not die")

    def check_admission(self, n: int = 1) -> None:
        """Admit all."""

    async def abort(self, request_id: list[str]) -> None:
        self._outputs.abort_requests(request_id, internal=False)

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """Yield the outputs of a token at a time."""
        self.asked.append((list(prompt["prompt_token_ids"]), params))
        request = self.input_processor.process_inputs(request_id, prompt, params, ("generate",))
        self.input_processor.assign_request_id(request)
        self._outputs.add_request(request, None)
        turn = int(request_id.split(".")[-2])
        ids = self._script[turn][: params.max_tokens]
        for place, token in enumerate(ids, 1):
            end = FinishReason.STOP if place == len(self._script[turn]) else FinishReason.LENGTH
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[token],
                new_logprobs=LogprobsLists(np.array([[token]]), np.array([[LOGPROB]]), np.array([0])),
                finish_reason=end if place == len(ids) else None,
            )
            for said in self._outputs.process_outputs([output], weight_version=VERSION).request_outputs:
                yield said
            await asyncio.sleep(0)


class ScriptedVllm:
    """The part of `VllmEngine` that the gateway needs."""

    def __init__(self, client: ScriptedClient) -> None:
        self.client = client

    def cache_salt(self) -> str | None:
        return None

    def experts_of(self, _completion: object) -> None:
        pass

    def death(self) -> EngineDied:
        raise AssertionError("a script does not die")


@dataclass
class ScriptedStage:
    """A gateway over a script; `running` is its one leased group."""

    gateway: Gateway
    client: ScriptedClient
    running: asyncio.Task[Group]

    async def open(self) -> ScriptedAgent:
        """Open a session."""
        async with httpx.AsyncClient() as http:
            reply = await http.post(f"{self.gateway.url}/sessions", json={"wait_s": 20})
        assert reply.status_code == 200, reply.text
        session = reply.json()
        client = openai.AsyncOpenAI(base_url=session["base_url"], api_key="none", max_retries=0, timeout=60)
        return ScriptedAgent(self, session, client)


@dataclass
class ScriptedAgent:
    """A session and its client."""

    stage: ScriptedStage
    session: dict[str, Any]
    client: openai.AsyncOpenAI

    async def reward(self, reward: float) -> None:
        """Close the session."""
        async with httpx.AsyncClient() as http:
            key = {"Authorization": f"Bearer {self.session['key']}"}
            reply = await http.post(f"{self.stage.gateway.url}/reward", json={"reward": reward}, headers=key)
        assert reply.status_code == 200, reply.text
        await self.client.close()


def make_config(folder: Path) -> VllmConfig:
    """Return vLLM's configuration of a model folder, whose weights nobody reads."""
    model = ModelConfig(model=str(folder), dtype="float32", max_model_len=4_000)
    return VllmConfig(model_config=model)


@contextlib.asynccontextmanager
async def open_scripted_stage(
    config: VllmConfig, tokenizer: PreTrainedTokenizerFast, parsers: Parsers, script: Sequence[Sequence[int]]
) -> AsyncIterator[ScriptedStage]:
    """A gateway whose sessions get the script's answers, with a group of two leased to it."""
    client = ScriptedClient(config, tokenizer, script)
    prompt = TokenizedPrompt(0, Prompt(0, "hello", "truth", "", {}), np.asarray([1], dtype=np.int32))
    settings = GatewaySettings("127.0.0.1", 0, 60.0, parsers)
    meter = MeteredEngine(ScriptedEngine(0), SystemClock())
    key = read_key({}, settings.host)
    gateway = Gateway(settings, RULES, key, PromptSet((prompt,), "digest"), ScriptedVllm(client), meter)
    await gateway.start(lambda: None)
    running = asyncio.create_task(gateway.manager.run(GRANT))
    try:
        yield ScriptedStage(gateway, client, running)
    finally:
        running.cancel()
        await gateway.stop()
