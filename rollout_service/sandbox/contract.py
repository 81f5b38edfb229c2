"""Contract of a sandbox: commands run one after the other over files that the sandbox keeps.

The state of a sandbox is its files and nothing else: when a command has ended, all that it started is killed.
Invariant: `snapshot` is a value, so a sandbox can be made again, or be forked, from it wherever one runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from asyncrl.core.errors import AsyncrlError, ConfigError


class SandboxFailed(AsyncrlError, RuntimeError):
    """The sandbox itself failed: nothing is known of the commands, and the files are those of before."""


@dataclass(frozen=True)
class Command:
    """One program; its home is the folder of the sandbox's files."""

    argv: Sequence[str]
    stdin: bytes = b""
    deadline_s: float = 10.0


class Completed(msgspec.Struct, frozen=True):
    """End of a command.

    Attributes:
        code: Exit code; below 0 the signal that ended it, 127 if it could not be started.
        stdout: Its first `output_bytes` bytes. stderr: Its last ones.
        ended: Limit that it was killed at, empty if it ended by itself.
    """

    code: int
    stdout: str
    stderr: str
    ended: Literal["", "timeout", "memory"]


@dataclass(frozen=True)
class SandboxSettings:
    """Limits of each sandbox.

    Attributes:
        memory_bytes: Of one process's address space, and of what all of them use.
        files_bytes: Of its files, of `/tmp`, and of each output before it is cut.
        processes: At once. output_bytes: Of each output that is kept.
        folders: Folders of the machine that it sees at their place, read-only, besides `/usr` and Python.
        network: Whether it uses the machine's network; by default it has none.
        workers: Sandboxes that run something at once; others wait.
        isolate: False runs commands as plain child processes of this user.

    Raises:
        ConfigError: Nothing could run within these.
    """

    memory_bytes: int = 512 << 20
    files_bytes: int = 16 << 20
    processes: int = 32
    output_bytes: int = 16 << 10
    folders: Sequence[str] = ()
    network: bool = False
    workers: int = 4
    isolate: bool = True

    def __post_init__(self) -> None:
        least = (self.memory_bytes >> 26, self.files_bytes >> 16, self.processes, self.output_bytes)
        if min(*least, self.workers) < 1 or any(not folder.startswith("/") for folder in self.folders):
            raise ConfigError(
                "a sandbox cannot work within these limits",
                hint="memory_bytes from 64 MiB, files_bytes from 64 KiB, the rest from 1, absolute folders",
            )


class Sandbox(Protocol):
    """One sandbox. `create` of its maker begins it, empty or from a snapshot."""

    @property
    def is_sealed(self) -> bool:
        """Whether commands change nothing but the files of the sandbox."""

    async def exec(self, *commands: Command) -> list[Completed]:
        """Run commands in order. Raises SandboxFailed, and then none of them counts."""

    def write(self, files: Mapping[str, bytes]) -> None:
        """Put files in, by relative name. Raises ValueError: a name leaves the folder."""

    def read(self, name: str) -> bytes:
        """Return a file. Raises FileNotFoundError: there is no such file, or it is a link."""

    def snapshot(self) -> bytes:
        """Return the files, for `create`."""

    async def destroy(self) -> None:
        """End what runs and drop the files."""
