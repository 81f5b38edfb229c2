"""Cost of a sync to a replica that generates: its pause, and its speed while a transfer goes on.

Owns one real vLLM engine in a process of its own, beside our services. The pause is the whole swap, with
requests in flight. It is compared with two local loads of the same weights without requests: the same
load of the staged copy, and vLLM's own `reload_weights` from the checkpoint, which lies in memory too.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from asyncrl.core.errors import ServiceFailed
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.sockets.keys import ClientKeys
from benchmarks.learner.inputs import save_qwen3
from benchmarks.weight_sync.peers.peers import FRESH, WAIT_S, Peer, now_s, obey
from benchmarks.weight_sync.peers.services import Fleet
from rollout_service.engine.protocol import Sampling
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings
from weight_sync.link import ReceiverLink
from weight_sync.memory.staging import Staged

START_S = 300.0
NUM_REQUESTS, NUM_TOKENS, PROMPT = 8, 32, [5, 6, 7, 8]
SETTLE_S = 0.5
KV_CACHE_BYTES = 256 << 20
HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE = 512, 6, 8192
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 3 * HIDDEN_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
"""About 26 M parameters: 106 MB in float32."""


class Replica:
    """The engine and its receiver's link; every method is called in turn, on one event loop."""

    def __init__(self, folder: Path, receiver: str, keys: ClientKeys) -> None:
        settings = VllmSettings(str(folder), "float32", 1024, NUM_REQUESTS, KV_CACHE_BYTES)
        self._engine = VllmEngine(settings)
        self._link = ReceiverLink(ThreadRuntime(), receiver, keys)
        self._ids = itertools.count()

    async def start(self) -> None:
        await self._engine.start()

    async def load(self, is_busy: bool) -> float:
        """Load the next version; return the seconds that generation was or would have been paused."""
        staged = await self._link.next_staged(self._engine.serving.number, WAIT_S)
        if staged is None:
            raise ServiceFailed("no version came")
        requests = [asyncio.create_task(self._generate(900)) for _ in range(NUM_REQUESTS if is_busy else 0)]
        if is_busy:
            await asyncio.sleep(SETTLE_S)
        seconds = await self._swap(staged)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        return seconds

    async def _swap(self, staged: Staged) -> float:
        began = now_s()
        await self._engine.swap(staged)
        seconds = now_s() - began
        await self._link.report_loaded(staged.version.number, ok=True)
        return seconds

    async def reload(self) -> float:
        """Return the seconds of vLLM's own reload of the checkpoint."""
        began = now_s()
        await self._engine.client.collective_rpc("reload_weights")
        return now_s() - began

    async def rate(self, seconds: float) -> float:
        """Generate for about `seconds`; return tokens per second."""
        end, count = now_s() + seconds, [0]

        async def follow_on() -> None:
            while now_s() < end:
                count[0] += await self._generate(NUM_TOKENS)

        began = now_s()
        await asyncio.gather(*(follow_on() for _ in range(NUM_REQUESTS)))
        return count[0] / (now_s() - began)

    async def _generate(self, num_tokens: int) -> int:
        number = next(self._ids)
        sampling = Sampling(1.0, num_tokens, seed=number, ignores_eos=True)
        completion = await self._engine.generate(PROMPT, sampling, f"request-{number}")
        return len(completion.token_ids)

    async def shutdown(self) -> None:
        await self._engine.shutdown()
        self._link.close()


def run_replica(pipe: Connection, folder: Path, receiver: str, keys: ClientKeys) -> None:
    """Entry of the engine's process."""
    with asyncio.Runner() as runner:
        replica = Replica(folder, receiver, keys)

        def act(method: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
            async def run(*args: Any) -> Any:
                return await method(*args)

            return lambda *args: runner.run(run(*args))

        runner.run(replica.start())
        pipe.send("started")
        try:
            obey(pipe, {name: act(getattr(replica, name)) for name in ("load", "reload", "rate")})
        finally:
            runner.run(replica.shutdown())


def measure_engine(num_turns: int, seconds: float, bucket_bytes: int) -> dict[str, Any]:
    """Return the pause, the local loads and the generation rates of `num_turns` turns.

    Args:
        seconds: Of generation per rate.

    Raises:
        ServiceFailed: A process has failed, for example because vLLM could not start.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        save_qwen3(folder, dtype=torch.float32, **MODEL)
        fleet = Fleet(1, folder, bucket_bytes)
        address, keys = fleet.context.addresses[fleet.receivers[0]], fleet.context.client_keys
        replica = Peer("replica", run_replica, folder, address, keys, way=FRESH)
        try:
            replica.hear(START_S)
            loads = [_take_turn(fleet, replica) for _ in range(num_turns + 1)][1:]
            rates = _compare_rates(fleet, replica, num_turns, seconds)
        finally:
            replica.close()
            fleet.close()
    names = ("pause_s", "load_s", "reload_s")
    by_name = {name: [load[name] for load in loads] for name in names}
    return {"num_bytes": fleet.num_bytes, "num_requests": NUM_REQUESTS, **by_name, **rates}


def _take_turn(fleet: Fleet, replica: Peer) -> dict[str, float]:
    found = {}
    for name, is_busy in (("pause_s", True), ("load_s", False)):
        fleet.publish()
        found[name] = float(replica.ask("load", is_busy))
        fleet.follow("loaded")
    return {**found, "reload_s": float(replica.ask("reload"))}


def _compare_rates(fleet: Fleet, replica: Peer, num_turns: int, seconds: float) -> dict[str, Any]:
    """Measure the generation rate without and with versions on their way all the time, in turns."""
    alone, beside, shares = [], [], []
    fleet.attend(copies=False)  # takes what arrives, so that the next transfer can begin
    for _ in range(num_turns):
        alone.append(float(replica.ask("rate", seconds)))
        stop, transfers = ThreadEvent(), _Transfers(fleet)
        thread = threading.Thread(target=transfers.repeat, args=(stop,))
        thread.start()
        began = now_s()
        beside.append(float(replica.ask("rate", seconds)))
        lasted_s = now_s() - began
        stop.set()
        thread.join(WAIT_S)
        shares.append(transfers.total_s / lasted_s)
    return {"tokens_per_s_alone": alone, "tokens_per_s_during_transfers": beside, "transfer_share": shares}


class _Transfers:
    """Publishes again and again. `total_s`: seconds in which a transfer was on its way."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.total_s = 0.0

    def repeat(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.total_s += self._fleet.sync().transfer_s
