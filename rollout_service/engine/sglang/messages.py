"""Messages between the SGLang adapter and the child process that runs SGLang, and their socket.

A frame is its length in 4 bytes and one message in msgpack; a longer frame than `MAX_FRAME_BYTES` ends the
connection. Invariant: each `Ask` but `Abort` gets one `Answer` with its number, behind its parts if
it is streamed.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from asyncrl.core.errors import WireError

MAX_FRAME_BYTES = 64 << 20
LENGTH_BYTES = 4
LOAD_REQUEST = "ASYNCRL_SGLANG_LOAD_REQUEST"
"""Variable: the file that names the version to load, which no other engine sees."""


class _Message(msgspec.Struct, tag=True, array_like=True):
    number: int


class Start(_Message):
    """Start SGLang with these arguments of `ServerArgs`."""

    engine_args: dict[str, object]


class Generate(_Message):
    """Sample one response; `prompt_ids` are int32. Beside `stop_ids` the model's own ends stop it.

    A streamed one is answered in parts, each with the `num_top` most probable tokens beside its tokens.
    """

    prompt_ids: bytes
    temperature: float
    max_tokens: int
    seed: int
    ignores_eos: bool
    stop_ids: list[int]
    stop: list[str]
    is_streamed: bool = False
    num_top: int = 0


class Abort(_Message):
    """End the requests with these numbers: their answers come with the tokens so far."""

    requests: list[int]


class Pause(_Message):
    """Generate nothing from here on; without `keeps_cache` running requests are prefilled anew later."""

    keeps_cache: bool


class Load(_Message):
    """Load the version in the file at `path`, and label what follows with its number."""

    path: str
    manifest: bytes
    version: int
    flushes_cache: bool


class Resume(_Message):
    """Go on generating."""


class Started(_Message):
    """SGLang's processes run, besides this one."""

    pids: list[int]


class Generated(_Message):
    """A response: int32 ids, float32 log-probs, spans as (version, start, end); or the next part of it.

    All parts but the last have no finish reason. `top_ids` and `top_logprobs` are rows of `num_top` each.
    """

    token_ids: bytes
    logprobs: bytes
    spans: list[tuple[int, int, int]]
    finish_reason: str
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class Loaded(_Message):
    """The version is loaded; the gap of the engine's last probe to the learner, None without one."""

    probe_gap: float | None


class Done(_Message):
    """It was done."""


class Failed(_Message):
    """It could not be done, and why."""

    why: str


Ask = Start | Generate | Abort | Pause | Load | Resume
Answer = Started | Generated | Loaded | Done | Failed
T = TypeVar("T")


class Channel(Generic[T]):
    """One end of the connection; what it receives is of the type `T`, which `kind` is."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: object) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = msgspec.msgpack.Decoder(kind)

    @staticmethod
    async def over(end: socket.socket, kind: object) -> Channel[T]:
        """Return the channel over a connected socket."""
        return Channel(*await asyncio.open_connection(sock=end, limit=MAX_FRAME_BYTES), kind)

    def send(self, message: object) -> None:
        """Send `message` behind those before. Raises WireError if it is too large."""
        frame = msgspec.msgpack.encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a message of {len(frame)} bytes, at most {MAX_FRAME_BYTES} are sent")
        self._writer.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)

    async def receive(self) -> T | None:
        """Return the next message; None once the other side is gone.

        Raises:
            WireError: It is too large, or no message of this kind.
        """
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            if size > MAX_FRAME_BYTES:
                raise WireError(f"a message of {size} bytes, at most {MAX_FRAME_BYTES} are read")
            frame = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        try:
            message: T = self._decoder.decode(frame)
        except msgspec.DecodeError as error:
            raise WireError(f"no message of this connection: {error}") from error
        return message

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


def read_request(path: Path) -> Load:
    """Return the load that the file at `path` asks for."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Load)


def write_request(path: Path, load: Load) -> None:
    """Write what `read_request` reads."""
    path.write_bytes(msgspec.msgpack.encode(load))
