"""The page `docs/cli.md`, made from the commands: `python -m asyncrl.cli.commands.page > docs/cli.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

import typer
import typer.main
from typer.core import TyperGroup

from asyncrl.cli.options import RUN_HELP, RUNS_DIR_HELP

HEAD = """# Commands

Generated: `python -m asyncrl.cli.commands.page > docs/cli.md`. `asyncrl COMMAND --help` prints the same.

Data goes to stdout, messages to stderr; [exit codes](operations.md#exit-codes). Every command about a run
takes the run's name or folder as `RUN` or as `--run RUN`, and looks for it in `--dir DIR` (default `runs`);
without a name it uses the run that was started last. An unknown run, or one that is not live where it must
be, is exit code 4. `asyncrl --install-completion` lets the shell complete commands, options, run names and
shipped configurations. Replay in full: [replay.md](replay.md).
"""
COMMON = (RUN_HELP, "The same.", RUNS_DIR_HELP, "Show this message and exit.")
"""Help of the parameters that the head of the page describes."""
TYPE = re.compile(r" <(str|path|list\[str\])>$")


def render() -> str:
    """Return the page in Markdown."""
    from asyncrl.cli.app import app

    root = typer.main.get_group(app)
    return "\n".join([HEAD, *_sections(root, typer.Context(root, info_name="asyncrl"))])


def _sections(group: TyperGroup, context: typer.Context) -> Iterator[str]:
    for name, command in group.commands.items():
        below = typer.Context(command, info_name=name, parent=context)
        if name == "bench" and isinstance(command, TyperGroup):
            yield f"## bench\n\n{command.help} Figures and targets: [benchmarks.md](benchmarks.md).\n"
            yield _table((f"bench {one}", found.help or "") for one, found in command.commands.items())
        elif isinstance(command, TyperGroup):
            yield from _sections(command, below)
        else:
            title = below.command_path.removeprefix("asyncrl ")
            records = [one.get_help_record(below) for one in command.get_params(below)]
            rows = [one for one in records if one and not one[1].startswith(COMMON)]
            yield f"## {title}\n\n{' '.join((command.help or '').split())}\n"
            if rows:
                yield _table((TYPE.sub("", name), meaning) for name, meaning in rows)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = [f"| `{name}` | {meaning} |".replace("auto|never", "auto\\|never") for name, meaning in rows]
    return "\n".join(["| | |", "|---|---|", *cells, ""])


if __name__ == "__main__":
    sys.stdout.write(render())
