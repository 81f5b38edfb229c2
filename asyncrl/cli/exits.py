"""Exit codes, and how texts reach the terminal, which they never steer. stdout is data, stderr is talk."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from importlib.util import find_spec

from asyncrl.core.config.reading.problems import ConfigProblems
from asyncrl.core.errors import AsyncrlError, ConfigError, DataError
from asyncrl.core.files.printable import INDENTED, printable

OK = 0
FAILED = 1
USAGE = 2
DEGRADED = 3
NOT_RUNNING = 4
INTERRUPTED = 130
EXTRA = ("megatron", "ray", "torch", "transformers", "vllm")
"""Packages that the core does without."""


def code_of(error: AsyncrlError) -> int:
    """Return the exit code that `error` ends the command with.

    A lookup that found nothing is a run that is not there.
    """
    if isinstance(error, LookupError):
        return NOT_RUNNING
    return USAGE if isinstance(error, ConfigError | DataError) else FAILED


def message_of(error: AsyncrlError) -> str:
    """Return what to print: problems of a file begin with their place, all else with our name."""
    return str(error) if isinstance(error, ConfigProblems) else f"asyncrl: {error}"


def message_of_defect(error: Exception) -> str:
    """Return what to print of an error that nobody foresaw; its traceback goes into a file."""
    descriptor, path = tempfile.mkstemp(prefix="asyncrl-", suffix=".traceback", text=True)
    with os.fdopen(descriptor, "w") as file:
        traceback.print_exception(error, file=file)
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"asyncrl: a defect of asyncrl: {what}\nPlease report it with {path}"


def message_of_absent(error: ModuleNotFoundError) -> str:
    """Return which extra of the installation has the package that a command needs; empty for a defect."""
    package = (error.name or "").partition(".")[0]
    extras = "train,cpu] or asyncrl[train,gpu" if package == "vllm" else "train"
    hint = f"Install asyncrl[{extras}], or 'make setup' in a checkout"
    return f"asyncrl: the package {package} is not installed here. {hint}" if package in EXTRA else ""


def need(*packages: str) -> None:
    """Raise ModuleNotFoundError for the first of `packages` that is not installed; none is imported."""
    for name in packages:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def show(*lines: object) -> None:
    """Print lines of data to stdout."""
    for line in lines:
        print(printable(str(line), INDENTED))
    sys.stdout.flush()


def say(sentence: str) -> None:
    """Print to stderr; nothing when there is nothing to say."""
    if sentence:
        print(printable(sentence), file=sys.stderr, flush=True)
