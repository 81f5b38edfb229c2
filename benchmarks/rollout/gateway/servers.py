"""Servers of the benchmark, each a process of its own that tells its address and its processor seconds.

`gateway` is asyncrl's, on the event loop of a replica, its groups granted as soon as an agent asks. `vllm` is
vLLM's own server, as `vllm serve` builds and runs it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.config.tree import SourceSection
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.threads import ThreadRuntime
from benchmarks.rollout.gateway.engine import ScriptedClient, ServedEngine, engine_arguments
from rollout_service.data.prompts import PromptSet
from rollout_service.data.sources import load_sources
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings
from rollout_service.engine.vllm.environment import prepare_environment
from rollout_service.gateway.gateway import LOOPBACK, Gateway, GatewaySettings
from rollout_service.gateway.keys import GatewayKey
from rollout_service.gateway.parsers import Parsers
from rollout_service.gateway.rules import Rules
from rollout_service.tasks.tiny_text import build_tokenizer, make_folder

MODEL_TOKENS, PROMPT_TOKENS = 4096, 1024
MAX_SEQUENCES = 64
GROUP_SIZE = 8
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Setting:
    """Engine of a server: scripted, at `tokens_per_s` each, or vLLM's on the model in `folder`."""

    folder: Path
    is_scripted: bool
    tokens_per_s: float = 0.0


def run_gateway(pipe: Connection, setting: Setting) -> None:
    """Entry of the gateway's process."""
    _serve(pipe, ThreadRuntime().run_async, lambda tell: _serve_gateway(setting, tell))


def run_vllm(pipe: Connection, setting: Setting) -> None:
    """Entry of the process of vLLM's server."""
    import uvloop

    _serve(pipe, uvloop.run, lambda tell: _serve_vllm(setting, tell))


def _serve(
    pipe: Connection,
    run: Callable[[Any], None],
    serve: Callable[[Callable[[str], None]], Awaitable[None]],
) -> None:
    """Serve until the pipe closes; `cpu_s` tells the seconds of this process alone."""
    prepare_environment(has_gpu=False)

    def obey() -> None:
        while True:
            try:
                pipe.recv()
                pipe.send(time.process_time())
            except (EOFError, OSError):
                os._exit(0)  # the benchmark has ended

    def tell(url: str) -> None:
        pipe.send(url)
        threading.Thread(target=obey, daemon=True).start()

    run(serve(tell))


async def _serve_gateway(setting: Setting, tell: Callable[[str], None]) -> None:
    engine: Any = _make_engine(setting)
    await engine.start()
    gateway = make_gateway(setting.folder, engine)
    wanted = asyncio.Event()
    await gateway.start(wanted.set)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_grant(gateway, wanted, tasks))
        tell(gateway.url)
        await gateway.watch()


async def _grant(gateway: Gateway, wanted: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
    """Grant as many groups as the agents that wait can begin, as a ledger without a bound."""
    for number in itertools.count(1):
        while not gateway.manager.num_groups_wanted:
            wanted.clear()
            await wanted.wait()
        tasks.create_task(gateway.manager.run(LeaseGrant(number, 1, 0, 0, 0, 0, DEADLINE_S)))
        await asyncio.sleep(0.0)  # the group takes them in


def make_gateway(
    folder: Path, engine: Any, group_size: int = GROUP_SIZE, deadline_s: float = DEADLINE_S
) -> Gateway:
    """Return a gateway over `engine` and the prompts in `folder`."""
    rules = Rules(0, group_size, 1.0, MODEL_TOKENS - PROMPT_TOKENS, PROMPT_TOKENS)
    settings = GatewaySettings(LOOPBACK, 0, deadline_s, Parsers())
    meter = MeteredEngine(engine, SystemClock())
    return Gateway(settings, rules, GatewayKey(), load_prompts(folder), engine, meter)


def load_prompts(folder: Path) -> PromptSet:
    """Return the prompts of a folder that `make_model` has made."""
    source = SourceSection(path=str(folder / "prompts.jsonl"))
    return load_sources([source], build_tokenizer(), PROMPT_TOKENS)


def make_model(folder: Path) -> Path:
    """Make `folder` with the model and one prompt, and return it."""
    make_folder(folder)
    row = {"prompt": [{"role": "user", "content": "Count with me."}], "ground_truth": ""}
    (folder / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def _make_engine(setting: Setting) -> Any:
    if setting.is_scripted:
        return ServedEngine(_arguments(setting), setting.tokens_per_s)
    return VllmEngine(VllmSettings(str(setting.folder), "float32", MODEL_TOKENS, MAX_SEQUENCES, 256 << 20))


def _arguments(setting: Setting) -> dict[str, Any]:
    return engine_arguments(setting.folder, MODEL_TOKENS, MAX_SEQUENCES)


async def _serve_vllm(setting: Setting, tell: Callable[[str], None]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import (
        build_and_serve,
        build_async_engine_client_from_engine_args,
    )
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    command = [
        "--model",
        str(setting.folder),
        "--served-model-name",
        "policy",
        "--disable-uvicorn-access-log",
    ]
    command += ["--host", LOOPBACK, "--port", url.rpartition(":")[2], "--uvicorn-log-level", "warning"]
    given = make_arg_parser(FlexibleArgumentParser()).parse_args([*command, "--generation-config", "vllm"])
    arguments = _arguments(setting)
    if setting.is_scripted:
        client: Any = ScriptedClient(arguments, setting.tokens_per_s)
        stopping = await _announced(build_and_serve(client, url, listener, given), url, tell)
    else:
        async with build_async_engine_client_from_engine_args(AsyncEngineArgs(**arguments)) as client:
            stopping = await _announced(build_and_serve(client, url, listener, given), url, tell)
    await stopping


async def _announced(serving: Any, url: str, tell: Callable[[str], None]) -> Any:
    """Serve; tell the address as soon as it is answered."""
    task = asyncio.ensure_future(serving)
    host, port = url.removeprefix("http://").split(":")
    while not task.done():
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        tell(url)
        break
    return await task
