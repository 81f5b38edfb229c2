"""Exit codes, and how an error reaches the terminal. stdout is data, stderr is talk."""

from __future__ import annotations

import sys

from asyncrl.config.problems import ConfigProblems
from asyncrl.errors import AsyncrlError, ConfigError, DataError

OK = 0
FAILED = 1
USAGE = 2
DEGRADED = 3
NOT_RUNNING = 4
INTERRUPTED = 130


def code_of(error: AsyncrlError) -> int:
    """Return the exit code that `error` ends the command with.

    A lookup that found nothing is a run that is not there.
    """
    if isinstance(error, ConfigError | DataError):
        return USAGE
    return NOT_RUNNING if isinstance(error, LookupError) else FAILED


def message_of(error: AsyncrlError) -> str:
    """Return what to print: problems of a file begin with their place, all else with our name."""
    return str(error) if isinstance(error, ConfigProblems) else f"asyncrl: {error}"


def say(sentence: str) -> None:
    """Print to stderr; nothing when there is nothing to say."""
    if sentence:
        print(sentence, file=sys.stderr, flush=True)
