"""State file of a publisher, which outlives a kill: the fencing token and the current version's segment.

Owns one small file beside the segments, replaced whole. Without it the next publisher would accept an old
learner's calls, and replicas would wait for a version that lies in shared memory already.
Invariant: accepted content was written by `write` of the same run; anything else counts as no state.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgpack

from asyncrl.core.errors import WireError
from asyncrl.core.wire import field
from weight_sync.memory import segments
from weight_sync.memory.manifest import Manifest

SUFFIX = "legacy"


@dataclass(frozen=True)
class Legacy:
    """See the module.

    Attributes:
        token: The newest fencing token that was seen.
        path: Segment of the current version; empty if there is none.
        manifest: Of the current version.
        num_taken: Publishers that have taken it over, each from one that was killed.
    """

    token: int
    path: str = ""
    manifest: Manifest | None = None
    num_taken: int = 0


class PublisherStateFile:
    """The file of the publisher whose segments' names start with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.path = segments.SHM_DIR / f"{prefix}{SUFFIX}"

    def write(self, state_file: Legacy) -> None:
        """Replace what was written before; best effort, for a full /dev/shm must stop nobody."""
        manifest = state_file.manifest.to_bytes() if state_file.manifest else b""
        fields = {"token": state_file.token, "path": state_file.path, "num_taken": state_file.num_taken}
        data = msgpack.packb({**fields, "manifest": manifest})
        draft = Path(f"{self.path}.new")
        with contextlib.suppress(OSError):
            descriptor = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            draft.rename(self.path)
        draft.unlink(missing_ok=True)  # what no room was left for

    def read(self) -> Legacy | None:
        """Return what the publisher before this one has left, or None."""
        try:
            plain = msgpack.unpackb(self.path.read_bytes(), raw=False)
            if not isinstance(plain, dict):
                return None
            data = field(plain, "manifest", bytes)
            manifest = Manifest.from_bytes(data) if data else None
            num_taken = field(plain, "num_taken", int)
            return Legacy(field(plain, "token", int), field(plain, "path", str), manifest, num_taken)
        except (OSError, ValueError, msgpack.UnpackException, WireError):
            return None
