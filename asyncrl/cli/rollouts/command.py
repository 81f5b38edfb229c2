"""`asyncrl inspect rollouts`: the answers of a step, or of groups that were dropped."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.cli.exits import say, show
from asyncrl.cli.rollouts.page import sheet_as_page
from asyncrl.cli.rollouts.reading import Choice, make_sheet
from asyncrl.cli.rollouts.sheet import Sheet, values_of

FOLDER = "rollouts"
"""Of the pages, in the run's folder."""
NUM_ON_TERMINAL, NUM_ELSEWHERE = 8, 64


def print_rollouts(
    folder: Path,
    *,
    step: int | None,
    order: str,
    is_dropped: bool,
    limit: int | None,
    as_json: bool,
    as_page: bool,
) -> None:
    """Print answers of the run in `folder`; of a page, print where it was written."""
    most = limit or (NUM_ELSEWHERE if as_json or as_page else NUM_ON_TERMINAL)
    sheet = make_sheet(folder, Choice(step, order, is_dropped, most))
    if as_json:
        print(json.dumps(values_of(sheet), indent=2))
    elif as_page:
        show(_write_page(folder, sheet))
    else:
        _print(sheet)


def _print(sheet: Sheet) -> None:
    from rich.console import Console

    from asyncrl.cli.rollouts.terminal import sheet_on_terminal

    console = Console(highlight=False)
    has_colors = console.color_system is not None
    console.print(sheet_on_terminal(sheet, has_colors=has_colors), soft_wrap=True)
    if sheet.gone and not sheet.entries:
        say("no text of these groups is in the journal; trained ones are kept until checkpoint.keep is past")
    elif not sheet.entries:
        say("no group was dropped there")


def _write_page(folder: Path, sheet: Sheet) -> Path:
    name = sheet.title.replace(",", "").replace(" ", "-")
    path = folder / FOLDER / f"{name}.html"
    path.parent.mkdir(exist_ok=True)
    path.write_text(sheet_as_page(sheet), encoding="utf-8")
    return path
