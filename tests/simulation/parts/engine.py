"""A played engine: the scripted one, with bytes that it reads while time passes.

Invariant: a load that fails leaves it half loaded and paused, and only a whole load lets it go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from asyncrl.core.errors import EngineError, SyncError
from asyncrl.core.staleness import UNLOADED, PolicyVersion
from rollout_service.engine.scripted.engine import ScriptedEngine
from weight_sync.memory.staging import Staged, open_tensors

LOAD_S, PAUSED_S = 0.05, 0.05
Loaded = Callable[[PolicyVersion, dict[str, bytes]], None]
"""Called with the version that is served from now on, and its bytes as they were read."""


class PlayedEngine(ScriptedEngine):
    """See the module.

    Args:
        on_load: See `Loaded`.
        refuses: Tells whether the next load fails.
    """

    def __init__(
        self, eos_id: int, tokens_per_s: float, on_load: Loaded, refuses: Callable[[], bool]
    ) -> None:
        super().__init__(eos_id, tokens_per_s)
        self._on_load, self._refuses = on_load, refuses

    async def start(self) -> None:
        await asyncio.sleep(LOAD_S)
        await super().start()

    async def swap(self, staged: Staged) -> None:
        self._is_running.clear()
        try:
            found = await self._read(staged)
        except SyncError as error:
            raise EngineError(f"version {staged.version.number} cannot be read: {error}") from error
        self._on_load(staged.version, found)
        await super().swap(staged)

    async def _read(self, staged: Staged) -> dict[str, bytes]:
        """Read tensor by tensor: what is written meanwhile is seen."""
        found: dict[str, bytes] = {}
        for name, tensor in open_tensors(staged):
            await asyncio.sleep(LOAD_S)
            found[name] = tensor.contiguous().view(-1).view(dtype=torch.uint8).numpy().tobytes()
            if self._refuses():
                raise EngineError(f"the played engine was told to refuse version {staged.version.number}")
        return found

    async def _wait_one_token(self, ended: asyncio.Event) -> None:
        """Let the time of a token pass; nothing is sampled while the engine is paused."""
        await asyncio.sleep(1.0 / self._tokens_per_s)
        while not (self._is_running.is_set() or ended.is_set()):
            await asyncio.sleep(PAUSED_S)

    @property
    def number(self) -> int:
        """The version number that it serves, 0 while it is paused."""
        return self.serving.number if self.is_loaded else UNLOADED
