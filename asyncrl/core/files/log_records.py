"""Log records of a process: one line of our own each, and indented ones after it, whatever they hold."""

from __future__ import annotations

import logging
import sys

from asyncrl.core.files.printable import INDENTED, printable

LAYOUT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RecordFormatter(logging.Formatter):
    """Formats a record so that no text in it begins another record or steers who reads the log."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), INDENTED)


def log_to_stderr() -> None:
    """Send this process's log records, from INFO on, to its standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordFormatter(LAYOUT))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
