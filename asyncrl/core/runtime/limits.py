"""Limits of one request, in bytes and parts."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.core import wire

SPARE_BYTES = 1 << 30
"""Memory that a service may take beyond twice the groups that it keeps."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        frame_bytes: The longest part of a message; a longer one ends the connection before it is read.
        message_bytes: All parts together.
        num_parts: The header and the frames after it.
        memory_bytes: By how much the process may grow before the server drops all connections, as the
            last resort against messages that never end.
    """

    frame_bytes: int = 64 << 20
    message_bytes: int = 256 << 20
    num_parts: int = 64
    memory_bytes: int = 4 << 30

    @staticmethod
    def of_groups(max_group_bytes: int, memory_bytes: int) -> Limits:
        """Return the limits of a service that keeps `memory_bytes` of groups, one per message."""
        longest = 2 * max_group_bytes + wire.MAX_REQUEST_BYTES  # who is a little over is told, not cut off
        return Limits(
            frame_bytes=longest,
            message_bytes=longest,
            num_parts=16,
            memory_bytes=2 * memory_bytes + SPARE_BYTES,
        )

    def are_passed(self, num_parts: int, num_bytes: int) -> bool:
        """Tell whether a message so far is more than it may be."""
        return num_parts > self.num_parts or num_bytes > self.message_bytes
