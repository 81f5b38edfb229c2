"""The last exception of vLLM's engine core, from the log that it shares with this process.

vLLM's front end says "see stack trace (above)" where its core died; what the core died of is only in the
lines that the core wrote. Reads the file behind standard error, from where it ended when the engine started.
"""

from __future__ import annotations

import os
import re
import stat

MAX_BYTES = 1 << 20
STANDARD_ERROR = 2
_WRITER = r"^\((?:EngineCore|Worker)[^)]*\)"
_LOGGER = r"(?: [A-Z]+ \S+ \S+ \[[^\]]*\])?"
_LAST_LINE = re.compile(rf"{_WRITER}{_LOGGER} ([A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*)$")
"""Of a traceback: its code is indented further."""


class CoreLog:
    """Output of the engine core since this object was made.

    Args:
        descriptor: Of the log, open for whatever; no regular file tells nothing.
    """

    def __init__(self, descriptor: int = STANDARD_ERROR) -> None:
        self._descriptor = descriptor
        self._start = self._size() or 0

    def last_exception(self) -> str:
        """Return the last line of the core's last traceback, empty if there is none."""
        size = self._size()
        if size is None:
            return ""
        start = max(self._start, size - MAX_BYTES)
        with open(f"/proc/self/fd/{self._descriptor}", "rb") as file:
            text = os.pread(file.fileno(), size - start, start).decode(errors="replace")
        return find_last_exception(text)

    def _size(self) -> int | None:
        try:
            found = os.fstat(self._descriptor)
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None


def find_last_exception(text: str) -> str:
    """Return the last exception line that an engine core or one of its workers wrote into `text`.

    >>> find_last_exception("(EngineCore pid=7) ERROR 11-23 18:57:30 [core.py:15] RuntimeError: head_dim=16")
    'RuntimeError: head_dim=16'
    """
    found = (_LAST_LINE.match(line) for line in text.splitlines())
    return next((match[1] for match in reversed([one for one in found if one])), "")
