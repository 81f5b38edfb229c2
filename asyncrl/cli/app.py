"""The command line: its groups of commands, and how an error of ours ends it.

Imports at the top stay light: `asyncrl --help` answers in well under half a second. stdout is
data, stderr is talk.

Exit codes: 0 done, 1 the run or a command failed, 2 usage or configuration, 3 a run is degraded,
4 no such run, or no live one, 130 interrupted.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from typer.main import get_command

from asyncrl import __version__
from asyncrl.cli import commands, exits
from asyncrl.cli.options import PLAIN, show_help
from asyncrl.core.errors import AsyncrlError

app = typer.Typer(help="Asynchronous reinforcement learning for language models.", **PLAIN)


def find_groups() -> list[typer.Typer]:
    """Return the `app` of each module in `commands`, by its `PLACE` in the help; one without comes last."""
    names = [f"{commands.__name__}.{one.name}" for one in pkgutil.iter_modules(commands.__path__)]
    modules = sorted(map(importlib.import_module, names), key=lambda one: getattr(one, "PLACE", math.inf))
    return [module.app for module in modules if hasattr(module, "app")]


for group in find_groups():
    app.add_typer(group)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Answer `--version`, and show the help where nothing is asked for."""
    if version:
        print(__version__)
        raise typer.Exit(exits.OK)
    show_help(context)


@functools.cache
def _build_command() -> Callable[..., object]:
    """Return the command of the whole tree, which takes 30 ms to build."""
    return get_command(app)


def main() -> None:
    """Run the command line; whatever goes wrong is one message and an exit code, never a traceback."""
    try:
        _build_command()(prog_name="asyncrl")
    except AsyncrlError as error:
        exits.say(exits.message_of(error))
        sys.exit(exits.code_of(error))
    except BrokenPipeError:  # `asyncrl ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(exits.OK)
    except ModuleNotFoundError as error:
        exits.say(exits.message_of_absent(error) or exits.message_of_defect(error))
        sys.exit(exits.FAILED)
    except OSError as error:
        exits.say(f"asyncrl: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        sys.exit(exits.FAILED)
    except Exception as error:  # process boundary: a defect of ours; nobody reads a traceback on a terminal
        exits.say(exits.message_of_defect(error))
        sys.exit(exits.FAILED)
